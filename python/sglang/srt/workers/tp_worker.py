"""The plain worker: one token per request and step."""

from __future__ import annotations

import itertools

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.forward_inputs import build_forward_batch
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import RowLayout, StepCounts
from sglang.srt.step.step_outputs import hidden_of_reads, hidden_states, prompt_logprobs
from sglang.srt.step.worker import (
    GenerationBatchResult,
    HostResult,
    LogprobPlan,
    ScheduleBatch,
    StepWidth,
)

PLAIN_WIDTH = StepWidth(decode_rows=1, lookahead_rows=0, max_kept=1)


class TpModelWorker:
    """Feeds the pending token (or a prompt chunk), samples the next one from its last row.

    The name is SGLang's ("Tp" is tensor parallelism there); here one process has the whole model.

    Args:
        suppressed_token_ids: ids that are never emitted (a model's mask token).

    Attributes:
        sampler: draws its tokens.
    """

    def __init__(
        self, runner: ModelRunner, state: RequestRows, suppressed_token_ids: tuple[int, ...]
    ) -> None:
        self._runner = runner
        self._table = runner.req_to_token_pool
        self._state = state
        self.sampler = Sampler(state.committed.device, suppressed_token_ids)
        runner.step_ops.warm_up(state, self._table)

    def step_width(self, params: SamplingParams) -> StepWidth:
        return PLAIN_WIDTH

    @torch.inference_mode()
    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        self._state.initialize(batch.new_rows)
        counts = StepCounts.plain(batch)
        inputs, layout = build_forward_batch(
            self._runner.step_ops, batch, counts, self._state, self._table, bounds_are_exact=True
        )
        result, _ = self.run(batch, inputs, layout)
        return result

    def run(
        self, batch: ScheduleBatch, inputs: ForwardBatch, layout: RowLayout
    ) -> tuple[GenerationBatchResult, bool]:
        """Runs a step that is laid out and reads the last row of each request that emits.

        Returns:
            The result, and whether a captured graph was replayed.
        """
        state, q_lens, reads = self._state, inputs.q_lens, layout.reads
        forward = self._runner.forward(inputs)
        hidden = forward.hidden
        logits = self._runner.compute_logits(hidden_of_reads(hidden, reads))
        if batch.adjusts_logits:
            logits = state.adjustments.apply(logits, reads.rows, reads.positions)
        sampling = None if batch.all_greedy else state.sampling(reads.rows, reads.positions)
        drawn = self.sampler.sample_scored(logits, sampling) if batch.scores_emitted else None
        tokens = self.sampler.sample(logits, sampling) if drawn is None else drawn.tokens
        next_token_ids = self._runner.step_ops.commit(layout, tokens, state)
        if batch.adjusts_logits:
            state.adjustments.record(reads.rows, tokens)
        emitted = prompts = None
        if batch.logprobs is not None:
            prompts = prompt_logprobs(batch.logprobs, hidden, q_lens, self._runner.compute_logits)
            if drawn is not None:
                wanted = self._wanted(batch, batch.logprobs)
                queries = batch.logprobs.emitted
                emitted = self.sampler.query(logits, sampling, drawn, queries, wanted)
        result = GenerationBatchResult(
            next_token_ids=next_token_ids,
            accept_lens=torch.tensor(batch.emits, dtype=torch.int64),
            kept_lens=torch.tensor(q_lens),
            emitted_logprobs=emitted,
            prompt_logprobs=prompts,
            hidden_states=hidden_states(batch, hidden, q_lens),
        )
        return result, forward.used_graph

    def observe(self, result: HostResult) -> None:
        """Learns nothing from results."""

    def _wanted(self, batch: ScheduleBatch, plan: LogprobPlan) -> torch.Tensor | None:
        """[Q] int64; which of the rows read belong to requests that want log-probabilities; None
        where all do."""
        if len(plan.emitting) == sum(batch.emits):
            return None
        places = list(itertools.accumulate(batch.emits, initial=0))
        return to_device([places[i] for i in plan.emitting], self._state.committed.device)
