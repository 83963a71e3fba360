"""The price of a step by its rows, measured once at start-up."""

from __future__ import annotations

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.mtp.length_policy import CostTable, measure_costs

MAX_MEASURED_ROWS = 1024


@torch.inference_mode()
def measure_step_costs(runner: ModelRunner, max_rows: int) -> CostTable:
    """Times forward passes of 1, 2, 4 ... rows, logits included, over the dummy slot."""
    device = runner.req_to_token_pool.req_to_token.device

    def run_step(num_rows: int) -> None:
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
        batch = ForwardBatch(
            input_ids=zeros,
            positions=zeros,
            slots=zeros,
            rows=zeros,
            q_lens=[1] * num_rows,
            kv_lens=zeros + 1,
            kv_len_upper_bounds=[1] * num_rows,
        )
        logits = runner.compute_logits(runner.forward(batch).hidden)
        logits.argmax(dim=-1).tolist()  # waits for the device

    most = min(max_rows, MAX_MEASURED_ROWS)
    num_rows = [1 << power for power in range(most.bit_length())]
    return measure_costs(run_step, num_rows)
