"""The plain worker: one token per request and step."""

from __future__ import annotations

import torch

from sglang.srt.base_worker import GenerationBatchResult, ScheduleBatch, StepWidth
from sglang.srt.layers.sampler import sample
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
        logits = self._runner.forward(inputs)
        if self._suppressed:
            logits[:, self._suppressed] = float("-inf")
        state.committed[inputs.rows] = inputs.kv_lens
        device = inputs.rows.device
        if all(batch.emits):
            rows, positions = inputs.rows, inputs.kv_lens
        else:
            emits = torch.tensor(batch.emits, device=device)
            rows, positions = inputs.rows[emits], inputs.kv_lens[emits]
        tokens = sample(logits, state.sampling(rows, positions, batch.all_greedy))
        state.pending[rows, 0] = tokens
        return GenerationBatchResult(
            next_token_ids=state.pending[inputs.rows],
            accept_lens=torch.tensor(batch.emits, dtype=torch.int64, device=device),
            kept_lens=torch.tensor(batch.q_lens, dtype=torch.int64, device=device),
        )
