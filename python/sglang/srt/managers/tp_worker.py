"""The plain worker: one token per request and step."""

from __future__ import annotations

import torch

from sglang.srt.base_worker import (
    GenerationBatchResult,
    LogprobPlan,
    ScheduleBatch,
    StepWidth,
)
from sglang.srt.layers.logprobs import LogprobTensors, query_logprobs, query_prompt_logprobs
from sglang.srt.layers.sampler import SamplingRows, sample
from sglang.srt.model_executor.forward_inputs import build_forward_batch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.request_rows import RequestRows
from sglang.srt.sampling.sampling_params import SamplingParams

PLAIN_WIDTH = StepWidth(decode_rows=1, lookahead_rows=0, max_kept=1)


class TpModelWorker:
    """Feeds the pending token (or a prompt chunk), samples the next one from its last row.

    Args:
        suppressed_token_ids: ids that are never emitted (a model's mask token).
    """

    def __init__(
        self, runner: ModelRunner, num_rows: int, device: str, suppressed_token_ids: tuple[int, ...]
    ) -> None:
        self._runner = runner
        self._table = runner.req_to_token_pool
        self._state = RequestRows(num_rows, 1, runner.vocab_size, device)
        self._suppressed = list(suppressed_token_ids)

    def step_width(self, params: SamplingParams) -> StepWidth:
        return PLAIN_WIDTH

    @torch.inference_mode()
    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        state = self._state
        inputs = build_forward_batch(batch, state, self._table)
        hidden = self._runner.forward(inputs)
        last = hidden if inputs.logits_index is None else hidden[inputs.logits_index]
        logits = self._runner.compute_logits(last)
        state.committed[inputs.rows] = inputs.kv_lens
        device = inputs.rows.device
        if all(batch.emits):
            rows, positions = inputs.rows, inputs.kv_lens
        else:
            emits = torch.tensor(batch.emits, device=device)
            rows, positions = inputs.rows[emits], inputs.kv_lens[emits]
        if batch.adjusts_logits:
            state.adjustments.apply(logits, rows, positions)
        if self._suppressed:
            logits[:, self._suppressed] = float("-inf")
        sampling = state.sampling(rows, positions, batch.all_greedy)
        tokens = sample(logits, sampling)
        state.pending[rows, 0] = tokens
        if batch.adjusts_logits:
            state.adjustments.record(rows, tokens)
        emitted, prompts = self._logprobs(batch.logprobs, logits, sampling, tokens, hidden)
        return GenerationBatchResult(
            next_token_ids=state.pending[inputs.rows],
            accept_lens=torch.tensor(batch.emits, dtype=torch.int64, device=device),
            kept_lens=torch.tensor(batch.q_lens, dtype=torch.int64, device=device),
            emitted_logprobs=emitted,
            prompt_logprobs=prompts,
            hidden_states=hidden[batch.hidden_rows].float() if batch.hidden_rows else None,
        )

    def _logprobs(
        self,
        plan: LogprobPlan | None,
        logits: torch.Tensor,
        sampling: SamplingRows,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
    ) -> tuple[LogprobTensors | None, LogprobTensors | None]:
        """Of the emitted tokens, in the distribution they were drawn from before top-k, top-p and
        min-p; of prompt tokens, in the model's own."""
        if plan is None:
            return None, None
        emitted = prompts = None
        if plan.emitting:
            logprobs = torch.log_softmax(sampling.scale(logits), dim=-1)[plan.emitting]
            emitted = query_logprobs(logprobs, tokens[plan.emitting], plan.emitted)
        if plan.prompt_rows:
            prompts = query_prompt_logprobs(
                hidden[plan.prompt_rows],
                self._runner.compute_logits,
                plan.prompt_targets,
                plan.prompts,
            )
        return emitted, prompts
