"""Whole steps as CUDA graphs: rows are laid out, the target verifies drafts, tokens are accepted
and the next drafts are proposed, all in one launch.

Only steps of one shape are captured: every request verifies the same number of drafts and is given
as many for its next step, or another number in small batches, whose steps are short
(`DrafterNeeds.rounds`); and nobody asks for anything that the host must look at, such as
log-probabilities. All others run piece by piece (`TpModelWorker`).
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from sglang.srt.device_copies import overwrite, to_device
from sglang.srt.garbage import no_collections
from sglang.srt.mem_cache.kv_ledger import PageTableWrites
from sglang.srt.model_executor.cuda_graph_runner import capture_graph
from sglang.srt.model_executor.graph_keys import MAX_WIDE_TOKENS, decode_sizes
from sglang.srt.model_executor.model_runner import LESS_STATIC_MEMORY
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.platform import memory_for
from sglang.srt.speculative.drafter import RowPlan, plan_of_drafts
from sglang.srt.step.step_ops import NUM_COUNTS, ROW, AcceptedTokens, pack_for_device
from sglang.srt.step.worker import ScheduleBatch

logger = logging.getLogger(__name__)

MAX_CHANGING_REQS = 8  # of steps that give another number of drafts than they verify
Shape = tuple[int, int]  # drafts that each request verifies, and that it is given
RunStep = Callable[[ScheduleBatch, RowPlan, torch.Tensor], AcceptedTokens]


@dataclass(slots=True)
class _Captured:
    """A graph of steps of so many requests.

    Attributes:
        per_request: [NUM_COUNTS, R] int64; what the graph reads of its requests, of which `ROW`
            alone changes.
        rows: what `per_request[ROW]` holds.
        accepted: what the graph gives; the next replay overwrites it.
    """

    graph: torch.cuda.CUDAGraph
    per_request: torch.Tensor
    rows: list[int]
    accepted: AcceptedTokens


class RoundGraphs:
    """Captures steps and replays them.

    Args:
        runners: of the target and the drafter's models.
        rounds: see `DrafterNeeds`.
        slots: of each request in a step (`DrafterNeeds.max_slots`).
        max_confirmed: see `DrafterNeeds`.
        run: a step, from `RowLayout.per_request` on to the next drafts.
    """

    def __init__(
        self,
        runners: RunnerGroup,
        rounds: Mapping[int, Sequence[range]],
        slots: int,
        max_confirmed: int | None,
        run: RunStep,
    ) -> None:
        self._runners = runners
        self._table = runners.memory.table
        self._rounds = rounds
        self._slots = slots
        self._max_confirmed = max_confirmed
        self._run = run
        self._poisons = runners.target.config.poisons_graphs
        self._captured: dict[Shape, dict[int, _Captured]] = {}  # then by requests
        self._sizes: dict[Shape, list[int]] = {}

    @property
    def num_graphs(self) -> int:
        return sum(map(len, self._captured.values()))

    def drop(self) -> None:
        """Gives the graphs' memory back; steps run piece by piece until they are captured again."""
        self._captured, self._sizes = {}, {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures all graphs anew, if the runners can be part of any now; the largest first, so
        that the others fit into its memory.

        Raises:
            MemoryError: if the device has too little memory; the text says for what.
        """
        self.drop()
        if not all(runner.can_be_part_of_graph for runner in self._runners.runners):
            return
        start, keys = time.perf_counter(), self._keys()
        with (
            memory_for(
                "CUDA graphs of rounds",
                f"{LESS_STATIC_MEMORY} or --max-running-requests, or --disable-cuda-graph.",
            ),
            no_collections(),
        ):
            for shape, num_reqs in tqdm(keys, desc="Capturing rounds", unit="graph", disable=None):
                found = self._capture(num_reqs, *shape)
                self._captured.setdefault(shape, {})[num_reqs] = found
        self._sizes = {shape: sorted(graphs) for shape, graphs in self._captured.items()}
        seconds = time.perf_counter() - start
        logger.info("Captured %d CUDA graphs of rounds in %.1f s.", len(keys), seconds)

    def _keys(self) -> list[tuple[Shape, int]]:
        """Drafts and requests of each graph, those of most rows first. There is none of a size
        where a larger one takes less time: batches are padded to that."""
        steps = self._runners.target.graph_keys
        assert steps is not None, "The target has graphs."
        keys = []
        for shape in itertools.product(self._rounds, self._rounds):
            sizes, width = self._batch_sizes(shape), 1 + shape[0]
            for place, size in enumerate(sizes):
                larger = [each * width for each in sizes[place + 1 :]]
                if not steps.is_undercut(size * width, larger):
                    keys.append((shape, size))
        return sorted(keys, key=lambda key: -key[1] * (1 + key[0][0]))

    def _batch_sizes(self, shape: Shape) -> list[int]:
        """Requests that there may be a graph for, ascending."""
        most = MAX_CHANGING_REQS if shape[0] != shape[1] else self._table.num_rows
        return [
            size
            for size in decode_sizes(self._table.num_rows)
            if size <= most
            and all(any(size in each for each in self._rounds[count]) for count in shape)
            and size * (1 + max(shape)) <= MAX_WIDE_TOKENS
        ]

    def _capture(self, num_reqs: int, num_drafts: int, num_next: int) -> _Captured:
        rows = [self._table.padding_row] * num_reqs
        batch = ScheduleBatch(
            rows=rows,
            max_q_lens=[self._slots] * num_reqs,
            num_prompt_tokens=[0] * num_reqs,
            emits=[True] * num_reqs,
            kv_len_upper_bounds=[self._slots] * num_reqs,
            new_rows=[],
            table_writes=PageTableWrites(np.zeros((3, 0), dtype=np.int64)),
            all_greedy=False,  # greedy requests are drawn for as well
        )
        plan = plan_of_drafts(batch, [num_drafts] * num_reqs, self._max_confirmed)
        plan = replace(plan, next_drafts=[num_next] * num_reqs)
        packed = to_device(pack_for_device(batch, plan.counts), self._table.req_to_token.device)
        per_request = packed.view(NUM_COUNTS, num_reqs)
        memory = self._runners.target.graph_memory
        assert memory is not None, "The target has graphs."
        with self._runners.as_parts_of_graph():
            graph, accepted = capture_graph(memory, lambda: self._run(batch, plan, per_request))
        return _Captured(graph, per_request, rows, accepted)

    def replay(self, batch: ScheduleBatch, plan: RowPlan) -> AcceptedTokens | None:
        """Runs a step of the worker, whose new rows have their state; None if there is no graph
        for it. The next replay overwrites the result."""
        found = self._find(batch, plan)
        if found is None:
            return None
        target, num_reqs = self._runners.target, len(batch.rows)
        for runner in self._runners.runners:
            runner.assert_ready()
        target.step_ops.write_table(batch.table_writes, self._table)
        rows = batch.rows + [self._table.padding_row] * (len(found.rows) - num_reqs)
        if rows != found.rows:
            overwrite(found.per_request[ROW], rows)
            found.rows = rows
        if self._poisons:
            found.accepted.next_token_ids.fill_(-1)
        found.graph.replay()
        return _first(found.accepted, num_reqs)

    def _find(self, batch: ScheduleBatch, plan: RowPlan) -> _Captured | None:
        num_reqs, shape = len(batch.rows), (plan.max_pending - 1, max(plan.next_drafts, default=0))
        sizes = self._sizes.get(shape)
        if sizes is None or num_reqs > sizes[-1] or not _is_round(batch, plan, shape):
            return None
        if plan.rests or any(runner.checks for runner in self._runners.runners):
            return None
        return self._captured[shape][sizes[bisect.bisect_left(sizes, num_reqs)]]


def _is_round(batch: ScheduleBatch, plan: RowPlan, shape: Shape) -> bool:
    """Whether every request verifies and is given so many drafts, and nobody asks for more."""
    num_reqs = len(batch.rows)
    return (
        list(plan.next_drafts) == [shape[1]] * num_reqs
        and plan.counts.q_lens == [1 + shape[0]] * num_reqs
        and plan.counts.packed is None
        and not any(batch.num_prompt_tokens)
        and all(batch.emits)
        and not batch.adjusts_logits
        and batch.logprobs is None
        and not batch.hidden_rows
        and batch.constraint is None
    )


def _first(accepted: AcceptedTokens, count: int) -> AcceptedTokens:
    """What the first `count` requests are given."""
    path, num_drafts = accepted.path, accepted.num_drafts
    return AcceptedTokens(
        accepted.accept_lens[:count],
        accepted.kept_lens[:count],
        accepted.next_token_ids[:count],
        None if path is None else path[:count],
        None if num_drafts is None else num_drafts[:count],
    )
