"""K and V of the running requests side by side, kept from step to step."""

from __future__ import annotations

import torch

SPARE_COLUMNS = 64  # tokens that may be added before everything is gathered again
MAX_KEPT_BYTES = 256 << 20  # of all layers together; above it nothing is kept


class GatheredKV:
    """Gathers the paged KV of a batch; while the batch stays the same, only its new tokens.

    A step may add to the KV that the step before gathered if both have the same requests,
    recognized by their slots. No other step can have written these slots in between, since every
    step that is attended without this class calls `forget`.

    Args:
        pool: per layer [num_slots, 2 * num_kv_heads, head_dim].
    """

    def __init__(self, pool: list[torch.Tensor]) -> None:
        self._pool = pool
        self._buffers = [kv[:0] for kv in pool]  # per layer [N * capacity, 2 * kv_heads, D]
        self._capacity = 0
        self._num_entries = 0
        self._is_kept = True
        self._slots: torch.Tensor | None = None  # [N, L] of the last step
        self._kv_lens = torch.empty(0, dtype=torch.int64)
        self._gathered = torch.empty(0, dtype=torch.int64)
        self._added = torch.empty(0, dtype=torch.int64)
        self._is_extended = False

    def forget(self) -> None:
        """Makes the next step gather everything."""
        self._slots = None

    def plan(self, slots: torch.Tensor, positions: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """Once per step.

        Args:
            slots: [N, L] int64; slot of each token, the dummy slot 0 past a request's end.
            positions: [N, q] int64; tokens that this step stores.
            kv_lens: [N] int64; tokens with KV once they are stored.
        """
        self._is_extended = self._extends_last_step(slots, positions)
        if self._is_extended:
            first = torch.arange(slots.shape[0], device=slots.device) * self._capacity
            self._added = (first[:, None] + positions).flatten()
            self._gathered = slots.gather(1, positions).flatten()
        else:
            self._make_room(slots)
            padding = (0, self._capacity - slots.shape[1])
            self._gathered = torch.nn.functional.pad(slots, padding).flatten()
        self._slots = slots if self._is_kept else None
        self._kv_lens = kv_lens

    def gather(self, layer: int) -> torch.Tensor:
        """Returns [N, capacity, 2 * num_kv_heads, head_dim] of a layer, after this step's K and V
        are in the pool; values past a request's end are meaningless but finite."""
        pool = self._pool[layer]
        buffer = self._buffers[layer][: self._num_entries]
        if self._is_extended:
            buffer.index_copy_(0, self._added, pool.index_select(0, self._gathered))
        else:
            torch.index_select(pool, 0, self._gathered, out=buffer)
        return buffer.view(-1, self._capacity, *pool.shape[1:])

    def _extends_last_step(self, slots: torch.Tensor, positions: torch.Tensor) -> bool:
        last = self._slots
        if last is None or last.shape[0] != slots.shape[0]:
            return False
        if not last.shape[1] <= slots.shape[1] <= self._capacity:
            return False
        same = (slots[:, : last.shape[1]] == last) | (last == 0)
        return bool(same.all() & (positions[:, 0] <= self._kv_lens).all())

    def _make_room(self, slots: torch.Tensor) -> None:
        """Chooses the capacity, and buffers: one per layer if that is not too much, else one."""
        num_requests, length = slots.shape
        num_layers = len(self._pool)
        size = num_requests * (length + SPARE_COLUMNS) * self._pool[0][0].nbytes * num_layers
        is_kept = size <= MAX_KEPT_BYTES
        self._capacity = length + SPARE_COLUMNS if is_kept else length
        self._num_entries = num_requests * self._capacity
        if is_kept == self._is_kept and self._buffers[0].shape[0] >= self._num_entries:
            return
        self._is_kept = is_kept
        shape = (self._num_entries, *self._pool[0].shape[1:])
        if is_kept:
            self._buffers = [kv.new_empty(shape) for kv in self._pool]
        else:
            self._buffers = [self._pool[0].new_empty(shape)] * num_layers
