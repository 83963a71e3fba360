"""Starts of a server that keeps prices of steps, without a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.speculative.tile_spec.profiler import KeptPrices, TileSpecProfiler
from sglang.srt.step.price_table import Curve, DraftPrices, PassPrices, PriceTable
from utils import Setup, make_execution

CURVE = Curve((1, 8, 64), (1.5, 1.25, 9.0))
PASSES = {1: PassPrices(CURVE), 2: PassPrices(Curve((4,), (2.0,)), 1e-5)}


def runner_of(model: Path, hidden_width: int = 0, **changes: Any) -> Any:
    """Makes what the profiler looks at of a runner with graphs."""
    execution = make_execution(model, Setup(), 64, 4)
    keys = GraphKeys(GraphSupport.RAGGED_Q, 8, 4, 64, hidden_width=hidden_width)
    return SimpleNamespace(
        config=replace(
            execution, **{"max_decode_rows": 4, "draft_steps": {1: (), 2: ()}, **changes}
        ),
        graph_keys=keys,
        model=SimpleNamespace(hidden_width=hidden_width),
        ranks=None,
    )


def measured(runner: Any) -> PriceTable:
    keys = runner.graph_keys.all
    costs = {key: 1.0 + key.num_tokens / 7 for key in keys}
    find = partial(runner.graph_keys.find_shape, hidden_width=runner.model.hidden_width)
    return PriceTable(find, costs, CURVE, CURVE, 1e-6, 3e-9, CURVE, 0.01)


def signed(raw: bytes) -> bytes:
    """Returns a file with the digest of what it holds now, if it can have one."""
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        kept = msgspec.json.decode(raw, type=KeptPrices)
        kept.digest = kept.own_digest()
        return msgspec.json.encode(kept)
    return raw


def contents(prices: PriceTable) -> tuple[Any, ...]:
    """All that was measured, and what steps of some shapes cost by it."""
    known = (getattr(prices, each.name) for each in fields(prices) if each.name != "find")
    return *known, *(prices.rows_ms(*shape) for shape in ((1, 4, 4), (3, 2, 5), (8, 4, 32)))


class Start:
    """A server that starts: what it measured, and the prices that it goes by."""

    def __init__(self, cache: Path, target: Any, head: Any, slowness: float = 1.0) -> None:
        """
        Args:
            slowness: of graphs now, beside what `measured` says.
        """
        self.measured: list[str] = []
        prices = measured(target)
        now = {key: slowness * cost_ms for key, cost_ms in prices.graphs_ms.items()}
        meter: Any = SimpleNamespace(
            graph_ms=lambda key, repeats: now[key],
            measure=self._measure("target", replace(prices, graphs_ms=now)),
        )
        self.target = contents(TileSpecProfiler(cache, target).target(meter))
        drafts = DraftPrices(measured(head), PASSES)
        found = TileSpecProfiler(cache, head, target).head(self._measure("head", drafts))
        self.head = contents(found.extend), found.passes

    def _measure(self, name: str, prices: Any) -> Callable[[], Any]:
        def measure() -> Any:
            self.measured.append(name)
            return prices

        return measure
