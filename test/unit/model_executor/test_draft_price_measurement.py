"""Tests how prices of a head are measured, and a server that goes by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from draft_heads import DFLASH, EAGLE, EAGLE3, P_EAGLE
from drafted_serving import Drafted, params_of, prompts
from eagle_models import CONTEXT, eagle_config_for, write_models
from head_rounds import MAX_REQUESTS, MAX_ROWS, NUM_STEPS, WRITERS, make_head
from recorded_graphs import recorded_graphs, replayable_backends
from sglang.srt.layers.attention.torch_native_backend import TorchNativeBackend
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices, StepCase
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.price_measurement import PriceMeter, measure_draft_prices
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.processes.runtime_config import drafter_needs
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.step.price_table import StepShape
from utils import Setup, make_execution, make_random_llama

KINDS = pytest.mark.parametrize("kind", [EAGLE, EAGLE3])


@pytest.mark.long_matrix
@KINDS
@pytest.mark.parametrize("has_graphs", [False, True])
def test_what_a_head_does_in_a_round_is_timed(tmp_path: Path, kind: str, has_graphs: bool) -> None:
    """Each graph that serves steps is timed by a replay; passes of each number of draft steps."""
    target = make_random_llama(tmp_path / "target", num_hidden_layers=8, vocab_size=320)
    head_path = WRITERS[kind](tmp_path / "head")
    with recorded_graphs(), replayable_backends():
        changes = {"attention_backend": "ragged", "max_graph_width": MAX_ROWS} if has_graphs else {}
        head = make_head(target, head_path, kind, 1, **changes)
        used: list[bool] = []
        forward = head.forward

        def noting(batch):  # type: ignore[no-untyped-def]
            result = forward(batch)
            used.append(result.used_graph)
            return result

        with mock.patch.object(head, "forward", noting):
            prices = measure_draft_prices(head, MAX_REQUESTS, MAX_ROWS, NUM_STEPS)
    assert set(prices.passes) == set(NUM_STEPS)
    for drafting in prices.passes.values():
        assert drafting.by_requests.sizes[0] == 1
        assert min(drafting.by_requests.costs_ms) > 0
    assert prices.extend.head.at(1) > 0
    assert any(used) == has_graphs
    for num_reqs in (1, 5, MAX_REQUESTS):
        for width in (1, 2, MAX_ROWS):
            key = prices.extend.find(num_reqs, width, num_reqs * width)
            assert (key is not None) == has_graphs
            assert key is None or prices.extend.graphs_ms[key] > 0
            assert prices.extend.rows_ms(num_reqs, width, num_reqs * width) > 0


class ReadingClock:
    """Shows 1 us for each token of KV that attention has read in a first layer, and some time for
    each look at it."""

    def __init__(self) -> None:
        self._num_planned = self._num_read = self._num_looks = 0

    def __call__(self) -> float:
        self._num_looks += 1
        return 1e-6 * (self._num_read + self._num_looks)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Runs while this lasts."""
        backend, clock = TorchNativeBackend, self
        plan, forward = backend.plan, backend.forward

        def planned(self: TorchNativeBackend, batch: ForwardBatch) -> None:
            clock._num_planned = int(batch.kv_lens.sum())
            plan(self, batch)

        def ran(self: TorchNativeBackend, layer: int, q: torch.Tensor) -> torch.Tensor:
            clock._num_read += clock._num_planned if layer == 0 else 0
            return forward(self, layer, q)

        with mock.patch.multiple(backend, plan=planned, forward=ran):
            yield


@pytest.mark.parametrize(
    ("kind", "reads"),
    [(EAGLE, {1: 1, 3: 3}), (P_EAGLE, {1: 1, 3: 1}), (DFLASH, {1: 1, 3: 1})],
)
def test_a_pass_is_priced_with_all_kv_that_it_reads(
    tmp_path: Path, kind: str, reads: dict[int, int]
) -> None:
    """Draft steps read it once each, rows over mask tokens together. A head of blocks only stores
    KV when it is fed, so nothing that is measured there tells what its block reads."""
    target = make_random_llama(tmp_path / "target", num_hidden_layers=8, vocab_size=320)
    clock, head = ReadingClock(), make_head(target, WRITERS[kind](tmp_path / "head"), kind, 1)
    with clock.at_work():
        prices = measure_draft_prices(head, MAX_REQUESTS, MAX_ROWS, NUM_STEPS, clock)
    us = {shape: 1e3 * each.kv_ms for shape, each in prices.passes.items()}
    assert us == pytest.approx(reads)
    assert 1e3 * prices.extend.kv_ms == pytest.approx(0 if kind == DFLASH else 1)
    rounds = MeasuredRoundPrices(prices.extend, prices, num_free=int(kind != DFLASH))
    for num_drafts in (1, 3):
        short, long = (rounds.round_ms(StepCase(2, kv), num_drafts) for kv in (0, 1000))
        of_rows = 2 * prices.extend.attention_ms(StepShape(2, 0, 0, 0, 1000, 0))
        num_steps = num_drafts - rounds.num_free
        drafting = reads[3 if num_steps > 1 else 1] if num_steps else 0
        assert long - short == pytest.approx(of_rows + drafting, abs=0.01)


@pytest.mark.long_matrix
@KINDS
def test_tokens_are_the_same_where_drafts_follow_measured_prices(tmp_path: Path, kind: str) -> None:
    paths = write_models(tmp_path)
    setup = Setup(num_pages=1024, context_len=CONTEXT, max_decode_rows=6)

    def serve(with_head: bool) -> tuple[list[list[int]], Drafted]:
        drafter, prices = None, None
        if with_head:
            drafter = eagle_config_for(paths["target"], paths[kind], kind, 3, "load_aware")
        needs = drafter_needs(drafter)
        assert needs.needs_prices == with_head
        execution = make_execution(
            paths["target"],
            setup,
            CONTEXT,
            needs.max_rows,
            row_width=setup.row_width,
            capture=needs.capture,
        )
        group = make_runners(execution, *drafter_models(drafter, execution))
        if with_head:
            target: ModelRunner = group.target
            prices = PriceMeter(target, setup.max_running_requests, needs.max_rows).measure()
        harness = Drafted(group, drafter, setup, checks_kv=with_head, prices=prices)
        ids = [harness.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts())]
        harness.run()
        harness.check()
        return [harness.outputs[req_id].token_ids for req_id in ids], harness

    right, _ = serve(False)
    found, harness = serve(True)
    assert found == right
    assert harness.num_steps > 10
