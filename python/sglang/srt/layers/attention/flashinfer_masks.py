"""Masks of trees in FlashInfer's form: one bool for each pair of a row and a key of its request,
request after request, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.attention.flashinfer_plan import StepLayout
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.forward_options import MAX_TREE_ROWS

MAX_ENTRIES = 1 << 22  # computed at once; each takes some 30 bytes meanwhile


def tree_masks(
    batch: ForwardBatch,
    layout: StepLayout,
    windows: Sequence[int | None],
    max_entries: int = MAX_ENTRIES,
) -> dict[int | None, torch.Tensor]:
    """Returns, by sliding window, which keys each row of a batch with `ancestors` sees: [sum of
    q_lens[i] * kv_lens[i]] bool, on the batch's device. Nothing waits.

    Args:
        layout: of the batch, exact.
        windows: of the layers; as for `AttentionBackend`.
        max_entries: pairs that are computed at once, at least those of one row.
    """
    assert batch.ancestors is not None, "No trees."
    device, wished = batch.ancestors.device, list(dict.fromkeys(windows))
    columns = torch.arange(max(layout.kv_lens), device=device)
    rows = _rows_of(batch, layout)
    count, num_rows = rows.num_entries, len(rows.at)
    # Columns after the keys of a row's own request are written to one extra entry.
    masks = {w: torch.empty(count + 1, dtype=torch.bool, device=device) for w in wished}
    step = max(1, max_entries // len(columns))
    for first in range(0, num_rows, step):
        part = rows.part(first, first + step)
        seen = part.sees(columns)
        places = torch.where(columns < part.kv_lens, part.origins + columns, count).flatten()
        order = None
        for window, mask in masks.items():
            if window is None or window >= len(columns):
                mask.scatter_(0, places, seen.flatten())
                continue
            if order is None:  # in place of a position, the number of keys seen up to here
                order = seen.cumsum(-1, dtype=torch.int32)
            near = seen & (order > order[:, -1:] - window)
            mask.scatter_(0, places, near.flatten())
    return {window: mask[:count] for window, mask in masks.items()}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a step, each with a number [T, 1] int64 of each kind.

    Attributes:
        kv_lens: tokens with KV of its request.
        at: the row's own place among these.
        starts: the place that bit 0 of `ancestors` means.
        ancestors: as in `ForwardBatch`.
        origins: the row's first entry in a mask.
        num_entries: entries of a mask.
    """

    kv_lens: torch.Tensor
    at: torch.Tensor
    starts: torch.Tensor
    ancestors: torch.Tensor
    origins: torch.Tensor
    num_entries: int

    def part(self, first: int, end: int) -> _Rows:
        some = slice(first, end)
        return _Rows(
            self.kv_lens[some],
            self.at[some],
            self.starts[some],
            self.ancestors[some],
            self.origins[some],
            self.num_entries,
        )

    def sees(self, columns: torch.Tensor) -> torch.Tensor:
        """[T, len(columns)] bool; whether each row sees the keys at these places."""
        bit = columns - self.starts
        has_bit = (self.ancestors >> bit.clamp(0, MAX_TREE_ROWS - 1)) & 1 == 1
        return (columns <= self.at) & ((bit < 0) | has_bit)


def _rows_of(batch: ForwardBatch, layout: StepLayout) -> _Rows:
    assert batch.ancestors is not None
    device, num_rows = batch.ancestors.device, layout.qo_indptr[-1]
    numbers, origin = [], 0
    for q_len, kv_len in zip(layout.q_lens, layout.kv_lens, strict=True):
        numbers.append((q_len, kv_len, origin))
        origin += q_len * kv_len
    q_lens, kv_lens, origins = to_device(numbers, device, torch.int64).T
    starts = kv_lens - q_lens if batch.tree_starts is None else batch.tree_starts
    # If a request has more from there on, all its rows are plain causal.
    starts = torch.where(kv_lens - starts <= MAX_TREE_ROWS, starts, kv_lens)
    requests = torch.repeat_interleave(q_lens, output_size=num_rows)
    firsts = (q_lens.cumsum(0) - q_lens)[requests]
    own = torch.arange(num_rows, device=device) - firsts
    return _Rows(
        kv_lens=kv_lens[requests][:, None],
        at=(kv_lens - q_lens)[requests][:, None] + own[:, None],
        starts=starts[requests][:, None],
        ancestors=batch.ancestors[:num_rows, None],
        origins=origins[requests][:, None] + (own * kv_lens[requests])[:, None],
        num_entries=origin,
    )
