"""Device memory of the KV cache: the request-to-token table and the K and V of every slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.device_copies import HostCopy, to_device


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The head of several rows of the page table, where all name the same slots with KV.

    Attributes:
        num_tokens: of the head; each request has more.
        requests: two at least, as places in their step; each is in one prefix of it at most.
        rows: of the page table, of these requests.
    """

    num_tokens: int
    requests: tuple[int, ...]
    rows: tuple[int, ...]


class ReqToTokenPool:
    """Slot of each token of each running request.

    Attributes:
        num_rows: rows that requests may have.
        padding_row: a further one, after them, of requests that only pad a captured step
            (`RoundGraphs`). All its entries stay the dummy slot.
        req_to_token: [num_rows + 1, width] int32; entry [r, i] is the slot of token i of row r.
            Rows are `row_width` wide. Entries that were never written point to the dummy slot 0.
        outside: [1] int64; the last column outside of its row that a kernel was told to access, in
            this table or in the token table of the same width; 0: none so far. Kernels never access
            such a column; here they report it. None: they do not report it.
    """

    def __init__(self, num_rows: int, width: int, device: str, is_guarded: bool = False) -> None:
        self.num_rows = self.padding_row = num_rows
        shape = (num_rows + 1, width)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=device)
        self.outside: torch.Tensor | None = None
        if is_guarded:
            self.outside = torch.zeros(1, dtype=torch.int64, device=device)
        self._outside_copy: HostCopy | None = None

    def write(self, entries: Sequence[Sequence[int]] | np.ndarray) -> None:
        """Sets req_to_token[row, column] = slot for all entries.

        Args:
            entries: [3, W]; rows, columns and slots.
        """
        entries = np.asarray(entries, dtype=np.int64)
        if not entries.size:
            return
        width, columns = self.req_to_token.shape[1], entries[1]
        assert columns.min() >= 0, "A column outside of its row."
        assert columns.max() < width, "A column outside of its row."
        index = to_device(entries, self.req_to_token.device)
        self.req_to_token[index[0], index[1]] = index[2].to(torch.int32)

    def raise_if_outside(self) -> None:
        """Looks at `outside` without waiting for the device, so on a GPU a few steps late.

        Raises:
            RuntimeError: if a kernel met a column outside of its row.
        """
        if self.outside is None:
            return
        if self._outside_copy is None:
            self._outside_copy = HostCopy([self.outside])
        if not self._outside_copy.is_ready:
            return
        column = int(self._outside_copy.read()[0])
        self._outside_copy = None
        if column != 0:
            raise RuntimeError(
                f"A kernel met column {column} of the page table or the token table, whose rows"
                f" have {self.req_to_token.shape[1]}: a step has lengths or slots that are wrong."
            )


class MHATokenToKVPool:
    """K and V of every layer, by slot. Page 0 (slots 0..page_size-1) is a dummy that stays zero
    until a warm-up or padding rows of a CUDA graph write to it; it is no part of the pool.

    Attributes:
        kv: per layer [num_slots + page_size, 2 * num_kv_heads, head_dim]; a slot's K, then its V,
            so that one gather fetches both.
        k, v: per layer [num_slots + page_size, num_kv_heads, head_dim], views of `kv`.
        tensors: all that have a row per slot: `kv`, `is_fed` and what `add_notes` has made.
            Whoever moves a slot moves its row of each.
        kv_starts: [rows of the page table] int64, where the model is not fed every token: the first
            token of each row from which on all have KV, so that steps see no others. Who leaves
            tokens out writes it, between steps. None: the model is fed all.
        hides_kv: an entry of `kv_starts` may be above 0; for those who would wait for the device to
            look.
        is_fed: [num_slots + page_size, 1] bool, where there is `kv_starts`: the model was fed the
            slot's token.
        page_size: tokens that lie side by side.
        is_released: the pool has no memory, so it must not be read or written.

    The tensors stay the same objects for good; only their memory is given back and taken again.
    """

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        shape = (num_slots + page_size, 2 * num_kv_heads, head_dim)
        self.kv = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.k = [kv[:, :num_kv_heads] for kv in self.kv]
        self.v = [kv[:, num_kv_heads:] for kv in self.kv]
        self.tensors = list(self.kv)
        self.kv_starts: torch.Tensor | None = None
        self.is_fed: torch.Tensor | None = None
        self.hides_kv = False
        self.page_size = page_size
        self.is_released = False

    def track_starts(self, num_rows: int) -> None:
        """Makes `kv_starts` and `is_fed`, all 0. Before attention over the pool and notes are
        made."""
        device = self.kv[0].device
        self.kv_starts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.is_fed = torch.zeros((len(self.kv[0]), 1), dtype=torch.bool, device=device)
        self.tensors = self._without_notes()

    def add_notes(self, num_columns: int) -> torch.Tensor:
        """[num_slots + page_size, num_columns] int64, all zero, for debugging: what somebody notes
        of each slot. It is moved, released and restored with K and V. It takes the place of what
        was added before."""
        shape = (len(self.kv[0]), num_columns)
        notes = torch.zeros(shape, dtype=torch.int64, device=self.kv[0].device)
        self.tensors = [*self._without_notes(), notes]
        return notes

    def _without_notes(self) -> list[torch.Tensor]:
        return self.kv + ([] if self.is_fed is None else [self.is_fed])

    def release(self) -> None:
        """Gives the memory back; its contents are lost.

        Raises:
            RuntimeError: if that has been done already.
        """
        if self.is_released:
            raise RuntimeError("The KV pool is released already.")
        self._free()
        self.is_released = True

    def restore(self) -> None:
        """Takes memory again, filled with zeros; its addresses may be others.

        Raises:
            RuntimeError: if nothing was released, or if there is not enough memory; then the pool
                stays released.
        """
        if not self.is_released:
            raise RuntimeError("The KV pool is not released.")
        try:
            for tensor in self.tensors:
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.zero_()
        except RuntimeError:
            self._free()
            raise
        self.is_released = False

    def _free(self) -> None:
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)
        hand_back_unused(self.kv[0].device)


def hand_back_unused(device: torch.device) -> None:
    """Returns freed memory of an accelerator to other processes: torch would keep it for itself."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
