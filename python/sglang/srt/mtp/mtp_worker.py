"""Multi-token prediction: one model predicts k tokens per step from mask tokens.

A step feeds the pending tokens (or a prompt chunk), then mask tokens. Masks come last, so under
causal attention they change nothing before them: requests with any k, threshold and mode, and
requests without look-ahead, share one batch, and a row may be padded with masks to any width.
Nothing here waits for the device: what depends on the step before is gathered from device rows.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch

from sgl_kernel import SamplingRows
from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.logit_adjustments import ExtraTokens
from sglang.srt.layers.logprobs import LogprobQueries
from sglang.srt.layers.sampler import ScoredTokens
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.mtp.acceptance import AcceptanceOps, AcceptedTokens, DrawnTokens
from sglang.srt.mtp.debug_trace import DebugTrace
from sglang.srt.mtp.lookahead_rows import LookaheadPlan, LookaheadRows
from sglang.srt.registry import load
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.length_policy import LengthPolicy
from sglang.srt.step.forward_inputs import build_forward_batch
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import EMITS_ONLY_CONFIRMED, RowLayout
from sglang.srt.step.step_outputs import hidden_of_reads, hidden_states, prompt_logprobs
from sglang.srt.step.worker import (
    GenerationBatchResult,
    HostResult,
    LogprobPlan,
    ScheduleBatch,
    StepWidth,
)
from sglang.srt.workers.tp_worker import PLAIN_WIDTH, TpModelWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MTPConfig:
    """What the worker needs to know.

    Attributes:
        mask_token_id: fed by look-ahead rows; never emitted.
        max_k: tokens that a request may predict per step, at most.
        limits_unverified: the length policy also shortens unverified requests, whose output
            depends on k.
        trims_rows: look at how many tokens are pending and pad to the longest run of the batch, not
            to the longest possible one: for devices where looking costs nothing.
        length_policy: a name in `LENGTH_POLICIES` (registry.py).
        bypasses_graphs: steps of several rows per request replay no captured graph, though steps of
            one row do; the first such step logs a warning.
    """

    mask_token_id: int
    max_k: int
    limits_unverified: bool = False
    trims_rows: bool = False
    length_policy: str = "full_length"
    bypasses_graphs: bool = False


@dataclass(frozen=True, slots=True)
class _Unread:
    """A step that was launched and not read; `was_chosen`: the length policy chose its lengths."""

    rows: list[int]
    plan: LookaheadPlan
    was_chosen: bool


class MTPWorker:
    """Runs steps of requests that look ahead and of others.

    Args:
        state: device rows with room for `max_k` pending tokens.
        policy: how many tokens may be predicted under the load at hand.
        trace: is told of every launched step; None without one.
    """

    def __init__(
        self,
        runner: ModelRunner,
        state: RequestRows,
        config: MTPConfig,
        policy: LengthPolicy,
        trace: DebugTrace | None = None,
    ) -> None:
        self._runner = runner
        self._table = runner.req_to_token_pool
        self._state = state
        self._config = config
        self._policy = policy
        self._trace = trace
        self._plain = TpModelWorker(runner, state, (config.mask_token_id,))
        self._sampler = self._plain.sampler
        num_rows = state.committed.shape[0]
        self._lookahead = LookaheadRows(
            num_rows, str(state.committed.device), config.limits_unverified
        )
        accept = load(runner.operations.acceptance)
        self._acceptance: AcceptanceOps = accept(state, self._lookahead.thresholds)
        self._unread: deque[_Unread] = deque()
        self._has_warned = False

    def step_width(self, params: SamplingParams) -> StepWidth:
        k = params.num_predicted
        return PLAIN_WIDTH if k == 1 else StepWidth(2 * k - 1, k - 1, k)

    def observe(self, result: HostResult) -> None:
        """Tells the length policy how many tokens of the oldest unread step were accepted."""
        step = self._unread.popleft()
        accepted = self._lookahead.accepted(step.rows, step.plan, result.accept_lens)
        if step.was_chosen:
            self._policy.observe(accepted)

    @torch.inference_mode()
    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        state = self._state
        state.initialize(batch.new_rows)
        self._lookahead.initialize(batch.new_rows)
        longest = None
        if self._config.trims_rows:
            longest = int(state.pending_lens[batch.rows].max())
        limit = self._limit(batch, longest)
        plan = self._lookahead.plan(batch, limit or self._config.max_k, longest)
        self._unread.append(_Unread(batch.rows, plan, limit is not None))
        mask = self._config.mask_token_id
        inputs, layout = build_forward_batch(
            self._runner.step_ops,
            batch,
            plan.counts,
            state,
            self._table,
            mask,
            not any(plan.looks_ahead),
        )
        run = self._plain.run if plan.is_plain else partial(self._run, plan)
        result, used_graph = run(batch, inputs, layout)
        if not used_graph and self._config.bypasses_graphs:
            self._warn_of_bypass(batch, plan)
        if self._trace is not None:
            self._trace.launched(inputs, plan.counts.num_predicted, state, used_graph)
        return result

    def _run(
        self, plan: LookaheadPlan, batch: ScheduleBatch, inputs: ForwardBatch, layout: RowLayout
    ) -> tuple[GenerationBatchResult, bool]:
        forward = self._runner.forward(inputs)
        hidden, reads = forward.hidden, layout.reads
        sampling = None if batch.all_greedy else self._state.sampling(reads.rows, reads.positions)
        logits = self._logits(batch, layout, hidden)
        tokens, drawn, probs = self._choose(batch, logits, sampling)
        width = max(1, *plan.max_accepted)
        outcome = self._acceptance.accept(
            DrawnTokens(layout.per_request, tokens, probs, max(plan.counts.num_read), width)
        )
        if batch.adjusts_logits:
            self._record(inputs.rows, outcome)
        emitted = prompts = None
        if batch.logprobs is not None:
            logprobs, compute = batch.logprobs, self._runner.compute_logits
            prompts = prompt_logprobs(logprobs, hidden, plan.counts.q_lens, compute)
            if drawn is not None and batch.scores_emitted:
                queries, wanted = _logprob_queries(logprobs, plan.counts.num_read, width)
                rows = to_device(wanted, logits.device)
                emitted = self._sampler.query(logits, sampling, drawn, queries, rows)
        result = GenerationBatchResult(
            next_token_ids=outcome.next_token_ids,
            accept_lens=outcome.accept_lens,
            kept_lens=outcome.kept_lens,
            emitted_logprobs=emitted,
            prompt_logprobs=prompts,
            hidden_states=hidden_states(batch, hidden, plan.counts.q_lens),
        )
        return result, forward.used_graph

    def _warn_of_bypass(self, batch: ScheduleBatch, plan: LookaheadPlan) -> None:
        """Warns once, of the first request whose look-ahead ran without a graph."""
        if self._has_warned or not any(plan.looks_ahead):
            return
        self._has_warned = True
        index = plan.looks_ahead.index(True)
        has_threshold = self._lookahead.host_thresholds[batch.rows[index]] > 0
        logger.warning(
            "--disable-mtp-cuda-graph: steps of several rows run without CUDA graphs"
            " (decode_q_len_per_req=%d, mtp_phase=%s, mtp_strategy_kind=%s).",
            plan.counts.q_lens[index],
            "seed" if batch.num_prompt_tokens[index] else "steady",
            "conf_adapt" if has_threshold else "static",
        )

    def _limit(self, batch: ScheduleBatch, longest_pending: int | None) -> int | None:
        """The most tokens that a request may predict whose length the policy may choose; None where
        no such request looks ahead."""
        rows = self._lookahead
        if not any(
            emits and rows.max_predicted[row] > 1 and rows.is_adjustable(row)
            for row, emits in zip(batch.rows, batch.emits, strict=True)
        ):
            return None
        return self._policy.choose(rows.upcoming_step(batch, longest_pending))

    def _logits(
        self, batch: ScheduleBatch, layout: RowLayout, hidden: torch.Tensor
    ) -> torch.Tensor:
        """[S, V], after penalties and biases."""
        reads = layout.reads
        logits = self._runner.compute_logits(hidden_of_reads(hidden, reads))
        if not batch.adjusts_logits:
            return logits
        fed_before = self._drafts_before(layout)
        adjustments = self._state.adjustments
        return adjustments.apply(logits, reads.rows, reads.positions, fed_before)

    def _choose(
        self, batch: ScheduleBatch, logits: torch.Tensor, sampling: SamplingRows | None
    ) -> tuple[torch.Tensor, ScoredTokens | None, torch.Tensor | None]:
        """Tokens [S] int64; the same with log-probabilities, where anyone wants them; and, where
        some request has a threshold, the best probability [S] float32."""
        best = drawn = None
        if any(self._lookahead.host_thresholds[row] > 0 for row in batch.rows):
            best = self._sampler.sample_scored(logits, None)
        if sampling is None:
            drawn = best
        if drawn is None and batch.scores_emitted:
            drawn = self._sampler.sample_scored(logits, sampling)
        tokens = self._sampler.sample(logits, sampling) if drawn is None else drawn.tokens
        return tokens, drawn, None if best is None else best.logprobs.exp()

    def _drafts_before(self, layout: RowLayout) -> ExtraTokens:
        """Drafts fed before each row read: a row counts only if they are confirmed, and then they
        are part of the output that penalties look at."""
        reads = layout.reads
        drafts = self._state.pending(reads.rows, start=1)
        num_before = torch.minimum(reads.offset, self._state.pending_lens[reads.rows] - 1)
        num_before *= layout.per_request[EMITS_ONLY_CONFIRMED][reads.request]
        columns = torch.arange(drafts.shape[1], device=drafts.device)
        return ExtraTokens(drafts, (columns < num_before[:, None]).int())

    def _record(self, rows: torch.Tensor, outcome: AcceptedTokens) -> None:
        """Accepted tokens count for penalties; rows [R] int64."""
        tokens = outcome.next_token_ids
        columns = torch.arange(tokens.shape[1], device=rows.device)
        counts = (columns < outcome.accept_lens[:, None]).int()
        repeated = rows[:, None].expand_as(tokens)
        self._state.adjustments.record(repeated.flatten(), tokens.flatten(), counts.flatten())


def _logprob_queries(
    plan: LogprobPlan, num_read: list[int], width: int
) -> tuple[LogprobQueries, list[int]]:
    """What emitting requests want to know of `width` rows read of each, and which rows those are:
    an accepted token's logprob is that of the row that emitted it. Where a request has fewer rows,
    the rest are rows of other requests, and nobody reads what is returned for them.

    Args:
        num_read: R counts.
    """
    starts = list(itertools.accumulate(num_read, initial=0))
    last = starts[-1] - 1
    wanted = [min(starts[i] + j, last) for i in plan.emitting for j in range(width)]
    token_ids = [ids for ids in plan.emitted.token_ids for _ in range(width)]
    return LogprobQueries(plan.emitted.top_num, token_ids), wanted
