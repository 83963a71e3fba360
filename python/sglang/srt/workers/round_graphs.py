"""Steps as CUDA graphs, two for each step. The first one lays rows out, has the target verify
drafts, accepts tokens and has the drafter's model extend over the same rows. The second one
proposes the next drafts.

The first differs by how many drafts each request verifies, the second by how many it is given. So a
step that gives another number of drafts than it verified replays two graphs, as any other does.

Both orders of the target's sums have graphs of the first kind, where there are both
(`ScheduleBatch.fixed_orders`).

Steps have such graphs where every request verifies the same number of drafts and none asks for
anything that the host must look at, such as log-probabilities; proposals, where every request is
given the same number. All others run piece by piece (`TpModelWorker`).
"""

from __future__ import annotations

import bisect
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from tqdm import tqdm

from sglang.srt.device_copies import overwrite, to_device
from sglang.srt.garbage import no_collections
from sglang.srt.layers.forward_batch import ModelOutput
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.lookahead.draft_planner import plan_of_drafts
from sglang.srt.model_executor.cuda_graph_runner import GraphMemory, capture_graph, poison
from sglang.srt.model_executor.graph_keys import MAX_WIDE_TOKENS, decode_sizes
from sglang.srt.model_executor.model_runner import LESS_STATIC_MEMORY
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.platform import memory_for
from sglang.srt.speculative.drafter import ExtendedStep
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import NUM_COUNTS, ROW, AcceptedTokens, pack_for_device
from sglang.srt.step.step_outputs import RunRows
from sglang.srt.step.worker import BatchRequest, ScheduleBatch

logger = logging.getLogger(__name__)

RunStep = Callable[[ScheduleBatch, StepPlan, torch.Tensor], tuple[RunRows, torch.Tensor | None]]
Propose = Callable[[ExtendedStep], None]


class VerifiedStep(NamedTuple):
    """The results of the first graph of a step; its next replay overwrites them."""

    run: RunRows
    extended: ExtendedStep

    @property
    def accepted(self) -> AcceptedTokens:
        return self.run.accepted


@dataclass(slots=True)
class _Captured:
    """A graph for a number of requests.

    Attributes:
        rows: [R] int64; of the page table, which the graph reads; all else it finds after them.
        host_rows: what `rows` holds.
    """

    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor
    host_rows: list[int]

    def replay(self, rows: list[int]) -> None:
        if rows != self.host_rows:
            overwrite(self.rows, rows)
            self.host_rows = rows
        self.graph.replay()


@dataclass(slots=True)
class _CapturedStep(_Captured):
    """A graph of a step.

    Attributes:
        run: what it gives; the next replay overwrites it.
        gives_output: it writes what `Drafter.extend` gives.
    """

    run: RunRows
    gives_output: bool


class _Verification(NamedTuple):
    """The steps that a graph is of: drafts that each request verifies, and
    `ScheduleBatch.fixed_orders`."""

    num_drafts: int
    fixed_orders: bool


class _Proposal(NamedTuple):
    """The proposals that a graph is of: a number of drafts of each request, with
    `ExtendedStep.output` or without."""

    num_drafts: int
    has_output: bool


Graph = TypeVar("Graph", bound=_Captured)


class RoundGraphs:
    """Captures steps and proposals, and replays them.

    Args:
        runners: of the target and the drafter's models.
        needs: of the drafter.
        state: the device rows.
        run: a step, from `RowLayout.per_request` on to what `Drafter.extend` gives.
        propose: `Drafter.propose`.
    """

    def __init__(
        self,
        runners: RunnerGroup,
        needs: DrafterNeeds,
        state: RequestRows,
        run: RunStep,
        propose: Propose,
    ) -> None:
        self._runners = runners
        self._table = runners.memory.table
        self._rounds = needs.rounds
        self._proposes_without_output = needs.proposes_without_output
        self._slots = needs.max_slots  # of each request in a step
        self._max_confirmed = needs.max_confirmed
        self._state = state
        self._run = run
        self._propose = propose
        self._poisons = runners.target.config.poisons_graphs
        # By kind, then by requests, ascending.
        self._steps: dict[_Verification, dict[int, _CapturedStep]] = {}
        self._proposals: dict[_Proposal, dict[int, _Captured]] = {}
        self._output: torch.Tensor | None = None  # [rows of the page table, width]
        # As `ModelOutput`, of the rows of the largest step.
        self._states: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_graphs(self) -> int:
        steps, proposals = self._steps.values(), self._proposals.values()
        return sum(len(each) for each in steps) + sum(len(each) for each in proposals)

    def drop(self) -> None:
        """Gives the graphs' memory back; steps run piece by piece until they are captured again."""
        self._steps, self._proposals, self._output, self._states = {}, {}, None, None

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
        start = time.perf_counter()
        with (
            memory_for(
                "CUDA graphs of rounds",
                f"{LESS_STATIC_MEMORY} or --max-running-requests, or --disable-cuda-graph.",
            ),
            no_collections(),
            warnings.catch_warnings(),
        ):
            # A draft model that is to draft nothing has nothing to do.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            logger.info("Capturing CUDA graphs of rounds.")
            self._capture_steps()
            self._capture_proposals()
        seconds = time.perf_counter() - start
        logger.info("Captured %d CUDA graphs of rounds in %.1f s.", self.num_graphs, seconds)

    def _capture_steps(self) -> None:
        keys = [
            (size, _Verification(count, fixed_orders))
            for count in self._rounds
            for fixed_orders in self._runners.target.config.orders
            for size in self._step_sizes(count)
        ]
        keys.sort(key=lambda key: -key[0] * (1 + key[1].num_drafts))
        for size, kind in tqdm(keys, desc="Capturing steps", unit="graph", disable=None):
            self._steps.setdefault(kind, {})[size] = self._capture_step(size, kind)
        self._steps = {kind: dict(sorted(graphs.items())) for kind, graphs in self._steps.items()}

    def _capture_proposals(self) -> None:
        kinds = []
        if self._output is not None:  # not needed when no drafts are proposed
            kinds += [_Proposal(count, True) for count in self._rounds if count]
        if self._proposes_without_output:
            kinds += [_Proposal(count, False) for count in self._rounds]
        keys = [(size, kind) for kind in kinds for size in self._batch_sizes(kind.num_drafts)]
        keys.sort(key=lambda key: -key[0])
        for size, kind in tqdm(keys, desc="Capturing proposals", unit="graph", disable=None):
            self._proposals.setdefault(kind, {})[size] = self._capture_proposal(size, kind)
        self._proposals = {
            kind: dict(sorted(each.items())) for kind, each in self._proposals.items()
        }

    def _batch_sizes(self, count: int) -> list[int]:
        """Requests that may have `count` drafts, ascending. Steps of more rows keep the device
        busy for longer than their launches take."""
        return [
            size
            for size in decode_sizes(self._table.num_rows)
            if size * (1 + count) <= MAX_WIDE_TOKENS
            and any(size in each for each in self._rounds[count])
        ]

    def _step_sizes(self, count: int) -> list[int]:
        """Requests of each step that verifies `count` drafts. There is none of a size where a
        larger one takes less time: batches are padded to that."""
        keys, width = self._runners.target.graph_keys, 1 + count
        assert keys is not None, "The target has graphs."
        sizes = self._batch_sizes(count)
        return [
            size
            for place, size in enumerate(sizes)
            if not keys.is_undercut(size * width, [each * width for each in sizes[place + 1 :]])
        ]

    def _capture_step(self, num_reqs: int, kind: _Verification) -> _CapturedStep:
        batch = self._batch_of_padding(num_reqs, kind.fixed_orders)
        plan = plan_of_drafts(batch, [kind.num_drafts] * num_reqs, self._max_confirmed)
        packed = to_device(pack_for_device(batch, plan.counts), self._table.req_to_token.device)
        per_request = packed.view(NUM_COUNTS, num_reqs)

        def run() -> tuple[RunRows, torch.Tensor | None]:
            found, output = self._run(batch, plan, per_request)
            if output is not None:
                self._keep(output)
            return found._replace(output=self._kept_states(found.output)), output

        with self._runners.as_parts_of_graph():
            graph, (found, output) = capture_graph(self._memory, run)
        gives_output = output is not None
        return _CapturedStep(graph, per_request[ROW], batch.rows, found, gives_output)

    def _capture_proposal(self, num_reqs: int, kind: _Proposal) -> _Captured:
        batch = self._batch_of_padding(num_reqs)
        most = max(self._rounds)
        plan = plan_of_drafts(batch, [most] * num_reqs, self._max_confirmed)
        plan = replace(plan, next_drafts=[kind.num_drafts] * num_reqs)
        rows = to_device(batch.rows, self._table.req_to_token.device, torch.int64)
        output = self._output_of(num_reqs) if kind.has_output else None
        step = ExtendedStep(batch, plan, self._state, rows, output)
        with self._runners.as_parts_of_graph():
            graph, _ = capture_graph(self._memory, lambda: self._propose(step))
        return _Captured(graph, rows, batch.rows)

    @property
    def _memory(self) -> GraphMemory:
        memory = self._runners.target.graph_memory
        assert memory is not None, "The target has graphs."
        return memory

    def _batch_of_padding(self, num_reqs: int, fixed_orders: bool = False) -> ScheduleBatch:
        padding = BatchRequest(self._table.padding_row, self._slots)
        return ScheduleBatch([padding] * num_reqs, all_greedy=False, fixed_orders=fixed_orders)

    def verify(self, batch: ScheduleBatch, plan: StepPlan) -> VerifiedStep | None:
        """Runs a step of the worker, whose new rows have their state, up to the proposal; None if
        there is no graph for it. The next replay overwrites the result."""
        num_reqs, num_drafts = len(batch.rows), plan.max_pending - 1
        kind = _Verification(num_drafts, batch.fixed_orders)
        found = _smallest(self._steps.get(kind), num_reqs)
        if found is None or self._are_checked or not _is_uniform(batch, plan, num_drafts):
            return None
        if batch.hidden_rows and found.run.output is None:
            return None
        target, accepted = self._runners.target, found.run.accepted
        for runner in self._runners.runners:
            runner.assert_ready()
        target.step_ops.write_table(batch.table_writes, self._table)
        output = self._output_of(num_reqs) if found.gives_output else None
        if self._poisons:
            poison((accepted.next_token_ids, output))
        found.replay(self._padded(batch.rows, found))
        extended = ExtendedStep(batch, plan, self._state, found.rows[:num_reqs], output)
        return VerifiedStep(found.run._replace(accepted=_first(accepted, num_reqs)), extended)

    def propose(self, step: ExtendedStep) -> bool:
        """Proposes what is next; False if there is no graph for it."""
        counts, rows = step.plan.next_drafts, step.batch.rows
        if step.plan.without_model:
            return False
        kind = _Proposal(counts[0], step.output is not None)
        found = _smallest(self._proposals.get(kind), len(rows))
        if found is None or self._are_checked or list(counts) != [counts[0]] * len(rows):
            return False
        if step.output is not None:
            self._keep(step.output)
        found.replay(self._padded(rows, found))
        return True

    @property
    def _are_checked(self) -> bool:
        """Tells whether anything checks what the models are fed."""
        return any(runner.checks for runner in self._runners.runners)

    def _padded(self, rows: list[int], found: _Captured) -> list[int]:
        return rows + [self._table.padding_row] * (len(found.host_rows) - len(rows))

    def _keep(self, output: torch.Tensor) -> None:
        """Copies what `Drafter.extend` gave to where proposals find it, unless it is there."""
        kept = self._output
        if kept is None:
            self._output = kept = output.new_zeros((self._table.num_rows, output.shape[1]))
        if output.data_ptr() != kept.data_ptr():
            kept[: len(output)].copy_(output)

    def _kept_states(self, output: ModelOutput | None) -> ModelOutput | None:
        """Copies what the target gave to where all graphs have it, the largest of which comes
        first; None where no request may ask for it."""
        if output is None or not self._runners.target.config.capture.returned:
            return None
        hidden, taps = output
        assert taps is not None, "There are layers to return."
        if self._states is None:
            self._states = torch.zeros_like(hidden), torch.zeros_like(taps)
        kept = self._states[0][: len(hidden)], self._states[1][: len(hidden)]
        return ModelOutput(kept[0].copy_(hidden), kept[1].copy_(taps))

    def _output_of(self, num_reqs: int) -> torch.Tensor:
        """[R, width]; what `Drafter.extend` gave last."""
        assert self._output is not None, "No step gives any."
        return self._output[:num_reqs]


def _smallest(graphs: dict[int, Graph] | None, num_reqs: int) -> Graph | None:
    """The graph of the fewest requests that has room for `num_reqs`; sizes ascend."""
    sizes = [*graphs] if graphs else []
    if not graphs or num_reqs > sizes[-1]:
        return None
    return graphs[sizes[bisect.bisect_left(sizes, num_reqs)]]


def _is_uniform(batch: ScheduleBatch, plan: StepPlan, num_drafts: int) -> bool:
    """Tells whether every request verifies `num_drafts` drafts, and none asks for more."""
    return (
        not (plan.left_out or plan.without_model)
        and plan.counts.q_lens == [1 + num_drafts] * len(batch.rows)
        and plan.counts.packed is None
        and not any(batch.num_prompt_tokens)
        and all(batch.emits)
        and not batch.adjusts_logits
        and batch.logprobs is None
        and batch.constraint is None
    )


def _first(accepted: AcceptedTokens, count: int) -> AcceptedTokens:
    """Returns what the first `count` requests are given."""
    path, num_drafts = accepted.path, accepted.num_drafts
    return AcceptedTokens(
        accepted.accept_lens[:count],
        accepted.kept_lens[:count],
        accepted.next_token_ids[:count],
        None if path is None else path[:count],
        None if num_drafts is None else num_drafts[:count],
    )
