"""The real model behind a worker that accepts two tokens per step: what speculation does to the
scheduler, to penalties and to stops, with tokens that are still the plain worker's."""

from __future__ import annotations

import dataclasses

import torch

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch
from sglang.srt.workers.tp_worker import TpModelWorker


class DoubleStepWorker:
    """Runs the plain worker twice for decode rows."""

    def __init__(self, worker: TpModelWorker) -> None:
        self._worker = worker

    def step_width(self, params: SamplingParams) -> StepWidth:
        return StepWidth(decode_rows=2, lookahead_rows=0, max_kept=2)

    def observe(self, result: HostResult) -> None:
        pass

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        decodes = [i for i, count in enumerate(batch.num_prompt_tokens) if count == 0]
        plain = [
            request if request.num_prompt_tokens else request._replace(max_q_len=1)
            for request in batch.requests
        ]
        first = self._worker.forward_batch_generation(dataclasses.replace(batch, requests=plain))
        tokens = torch.cat((first.next_token_ids, torch.zeros_like(first.next_token_ids)), dim=1)
        accept, kept = first.accept_lens.clone(), first.kept_lens.clone()
        if decodes:
            second = self._worker.forward_batch_generation(
                ScheduleBatch(
                    [plain[i]._replace(kv_len_before=1 + plain[i].kv_len_before) for i in decodes],
                    all_greedy=batch.all_greedy,
                    adjusts_logits=batch.adjusts_logits,
                )
            )
            tokens[decodes, 1] = second.next_token_ids[:, 0]
            accept[decodes] += 1
            kept[decodes] += 1
        return GenerationBatchResult(tokens, accept, kept)
