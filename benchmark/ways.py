"""Ways to serve the same requests: flags of an Engine, and what its requests ask for."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import sglang
from benchmark.mtp_model import start_engine
from benchmark.replay import replaying


@dataclass(frozen=True, kw_only=True)
class EngineWay:
    """A way to serve requests.

    Attributes:
        flags: of its Engine, beside those of all ways.
        is_drafted: the Engine has the experiment's head or draft model.
        replay_errors: NGRAM drafts known answers, of which this share is spoilt
            (`benchmark.replay`); None: it does not.
        params: sampling parameters of its requests.
        of_one: more of them, of one request at a time.
        fields: of its requests, beside sampling parameters.
        route: of a server with these flags that is asked for them; None: an Engine is.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    is_drafted: bool = False
    replay_errors: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    of_one: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    route: str | None = None

    @property
    def serving(self) -> tuple[Any, ...]:
        """The flags of its Engine: ways for which they are equal share one."""
        return self.flags, self.is_drafted, self.replay_errors

    @property
    def starts_alone(self) -> bool:
        """Tells whether no other Engine may start beside it: it measures prices of steps, or has an
        environment of its own."""
        return self.measures_prices or self.replay_errors is not None

    @property
    def measures_prices(self) -> bool:
        """Tells whether its Engine measures prices of steps when it starts."""
        flags = self.flags
        if flags.get("tile_spec") or flags.get("mtp_load_aware_k"):
            return True
        if flags.get("speculative_adaptive"):
            is_ema = "speculative_adaptive_config" in flags
            return flags.get("speculative_adaptive_strategy") == "throughput" or not is_ema
        has_drafts = self.is_drafted or "speculative_algorithm" in flags
        return has_drafts and flags.get("speculative_load_aware") != "off"


def servings(ways: Mapping[str, EngineWay]) -> list[dict[str, EngineWay]]:
    """Groups ways that share an Engine."""
    groups: list[dict[str, EngineWay]] = []
    for name, way in ways.items():
        shared = (each for each in groups if next(iter(each.values())).serving == way.serving)
        if (group := next(shared, None)) is None:
            groups.append(group := {})
        group[name] = way
    return groups


def start_engines(
    stack: ExitStack,
    ways: Mapping[str, EngineWay],
    flags: dict[str, Any],
    drafter: Mapping[str, Any],
) -> dict[str, sglang.Engine]:
    """Starts an Engine for each way, or one for ways that share it. Those that start alone do so
    one by one; then all others together.

    Args:
        stack: shuts them down.
        flags: of all Engines.
        drafter: of `drafter_flags`.
    """
    caches = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def start(name: str) -> sglang.Engine:
        way = ways[name]
        more = {**(drafter if way.is_drafted else {}), **way.flags}
        if more.get("tile_spec"):
            more["tile_spec_cache_dir"] = str(caches / name)
        engine = start_engine(flags, **more)
        stack.callback(engine.shutdown)
        return engine

    engines, groups = {}, {next(iter(group)): group for group in servings(ways)}
    for name in (name for name in groups if ways[name].starts_alone):
        with replaying(ways[name].replay_errors):
            engines[name] = start(name)
    others = [name for name in groups if name not in engines]
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        engines |= zip(others, pool.map(start, others), strict=True)
    return {name: engines[first] for first, group in groups.items() for name in group}


@dataclass(frozen=True)
class Asked:
    """An Engine that is asked with more fields. Files of hidden states are removed unread.

    Attributes:
        fields: of each request.
        is_salted: each request has a cache salt of its own, so nothing is known of those before.
        of_one: further sampling parameters of one request at a time: of the next one after that.
    """

    engine: sglang.Engine
    fields: Mapping[str, Any]
    is_salted: bool = False
    of_one: Mapping[str, Any] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _the_one: Lock = field(default_factory=Lock)

    async def async_generate(self, *, input_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        salt: dict[str, Any] = {"cache_salt": str(next(self._numbers))} if self.is_salted else {}
        is_the_one = bool(self.of_one) and self._the_one.acquire(blocking=False)
        params = sampling_params | self.of_one if is_the_one else sampling_params
        try:
            answer = await self.engine.async_generate(
                input_ids=input_ids, sampling_params=params, **self.fields, **salt
            )
            if not isinstance(answer, dict):  # a stream, of which the last chunk has all
                chunks = answer
                async for chunk in chunks:
                    answer = chunk
        finally:
            if is_the_one:
                self._the_one.release()
        if path := answer["meta_info"].get("hidden_states_file"):
            await asyncio.to_thread(Path(path).unlink)
        return answer

    async def async_abort_request(self, *, abort_all: bool) -> int:
        return await self.engine.async_abort_request(abort_all=abort_all)
