"""The draft steps of a drafter with a model of its own: between two steps of the target, that model
runs a few times over one row of each request, after all that the target has kept.

They need slots, which the scheduler reserves for the target's step: for N draft steps after up to
K rows kept, `StepWidth.decode_rows` is K + N, `StepWidth.lookahead_rows` is N, and
`DrafterNeeds.extra_slots` is N. What a draft step writes lies after the watermark, and the rows of
the next step overwrite it. Where each step feeds several rows of a request, as those of trees do, N
is the number of these rows in all steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative.drafter import ExtendedStep
from sglang.srt.step.request_rows import RequestRows


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """N draft steps of the D requests that draft, N may be 0. Step j feeds one token of each at
    its watermark + j: a model of tokens begins with the certain token, and a head that is fed each
    position's next token (`DrafterNeeds.token_shift`) with the first draft.

    Attributes:
        requests: [D] int64; place of each among the R requests of the step; None: they are all.
        rows: [D] int64; row of the request-to-token table.
        positions, slots: [N, D] int64; of the row that each step feeds.
        kv_lens: [N, D] int64; tokens with KV once it is written.
        kv_len_upper_bounds: host list of D; at least those of step 0.
        num_drafts: host list of D; drafts that each is to have, at least 1.
        certain_tokens: [D] int64; the last tokens that are no drafts.
    """

    requests: torch.Tensor | None
    rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    kv_len_upper_bounds: list[int]
    num_drafts: list[int]
    certain_tokens: torch.Tensor

    @property
    def num_steps(self) -> int:
        """N."""
        return self.positions.shape[0]

    def of_requests(self, values: torch.Tensor) -> torch.Tensor:
        """[D, ...]; of values [R, ...] those of the requests that draft."""
        return values if self.requests is None else values[self.requests]

    def batch(
        self, index: int, token_ids: torch.Tensor, hidden: torch.Tensor | None = None
    ) -> ForwardBatch:
        """Step `index`, which feeds token_ids [D] int64. It replays graphs of plain decoding.

        Args:
            hidden: [D, width]; see `ForwardBatch.hidden`.
        """
        return ForwardBatch(
            input_ids=token_ids,
            positions=self.positions[index],
            slots=self.slots[index],
            rows=self.rows,
            q_lens=[1] * len(self.kv_len_upper_bounds),
            kv_lens=self.kv_lens[index],
            kv_len_upper_bounds=[bound + index for bound in self.kv_len_upper_bounds],
            hidden=hidden,
        )


def plan_draft_steps(step: ExtendedStep, page_table: ReqToTokenPool, num_steps: int) -> DraftSteps:
    """The draft steps after a step of the target, of the requests that are to have drafts
    (`StepPlan.next_drafts`), one at least. Nothing here waits for the device."""
    batch, table = step.batch, page_table.req_to_token
    requests = [i for i, count in enumerate(step.plan.next_drafts) if count]
    bounds = []
    for i in requests:
        most_kept = batch.num_prompt_tokens[i] or step.plan.max_accepted
        bounds.append(batch.kv_lens_before[i] + most_kept + 1)
    assert max(bounds) + num_steps - 1 <= table.shape[1], "Slots are reserved past a row's end."
    rows, chosen = step.rows, None
    if len(requests) < len(batch.rows):
        chosen = to_device(requests, rows.device, torch.int64)
        rows = rows[chosen]
    count = len(requests)
    # Each step's numbers begin at a multiple of 16 bytes, which kernels are compiled for.
    shape = (3, num_steps, count + count % 2)
    numbers = torch.empty(shape, dtype=torch.int64, device=rows.device)[:, :, :count]
    positions, slots, kv_lens = numbers
    ahead = torch.arange(num_steps, device=rows.device)
    committed = step.state.committed[rows]
    torch.add(committed, ahead[:, None], out=positions)
    slots.copy_(table[rows, positions])
    torch.add(positions, 1, out=kv_lens)
    certain = step.state.tokens[rows, committed].to(torch.int64)
    num_drafts = [step.plan.next_drafts[i] for i in requests]
    return DraftSteps(chosen, rows, positions, slots, kv_lens, bounds, num_drafts, certain)


def rows_of_requests(ends: torch.Tensor, inputs: ForwardBatch) -> torch.Tensor:
    """[T] int64; the row of the token table that each row fed belongs to, of padding any.

    Args:
        ends: [R] int64; place after the last row of each request.
    """
    places = torch.arange(inputs.input_ids.shape[0], device=ends.device)
    requests = torch.searchsorted(ends, places, right=True)
    return inputs.rows[requests.clamp(max=len(ends) - 1)]


def next_tokens(state: RequestRows, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T] int64; the token at the position after each of positions [T] of rows [T]: of a prompt's
    row the prompt's next one, also at a chunk's end; of the last row kept the certain one; after
    rows that were not kept, any."""
    last = state.tokens.shape[1] - 1
    return state.tokens[rows, (positions + 1).clamp(max=last)].to(torch.int64)
