"""The price of a step by its rows, measured once at start-up."""

from __future__ import annotations

import torch

from sglang.srt.model_executor.forward_batch_info import dummy_step
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.mtp.length_policy import CostTable, measure_costs

MAX_MEASURED_ROWS = 1024
# Matrix products take whole tiles of rows, so the price has steps; most of them are near these.
MEASURED_ROWS = (
    *(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    *(288, 320, 384, 448, 512, 640, 768, 896, 1024),
)


@torch.inference_mode()
def measure_step_costs(runner: ModelRunner, max_requests: int, max_width: int) -> CostTable:
    """Times forward passes, logits included, over the dummy slot, of as few requests as the rows
    allow.

    Args:
        max_requests: of a step.
        max_width: rows that a request feeds, at most.
    """
    device = runner.req_to_token_pool.req_to_token.device

    def run_step(num_rows: int) -> None:
        num_reqs = -(-num_rows // max_width)
        share, rest = divmod(num_rows, num_reqs)
        batch = dummy_step([share + (index < rest) for index in range(num_reqs)], device)
        logits = runner.compute_logits(runner.forward(batch).hidden)
        logits.argmax(dim=-1).tolist()  # waits for the device

    most = min(max_requests * max_width, MAX_MEASURED_ROWS)
    num_rows = [rows for rows in MEASURED_ROWS if rows <= most]
    return measure_costs(run_step, num_rows)
