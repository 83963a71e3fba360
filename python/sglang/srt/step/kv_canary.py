"""Checks, step by step, that each KV slot holds what the request that reads it takes it to hold."""

from __future__ import annotations

from itertools import accumulate

import torch

from sglang.srt.layers.forward_batch import ForwardBatch

# Odd numbers of 64 bits, as int64, to mix a token with its position. The first is 2**64 divided by
# the golden ratio (multiplicative hashing: Knuth, TAOCP volume 3, section 6.4).
_TOKEN_FACTOR, _POSITION_FACTOR = -7046029254386353131, -4417276706812531889


class KVCanary:
    """A checksum per slot, of the token whose KV it holds, its position, and all tokens before it.
    So requests that share a prefix agree on its slots, and nobody else does.

    For debugging: it waits for the device in every step, and reads all KV lengths.

    Args:
        num_slots: of the pool, the dummy page included.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._sums = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def check(self, batch: ForwardBatch, tokens: torch.Tensor, page_table: torch.Tensor) -> None:
        """Before a step's forward pass: compares the slots that it reads, and notes what it writes
        to others.

        Args:
            tokens: [N, width] int32; the token table.
            page_table: [N, width] int32; the slot of each token of each row.

        Raises:
            RuntimeError: if a slot does not hold what its reader takes it to hold, or a row would
                be written to another slot than the page table says.
        """
        rows, kv_lens = batch.rows.tolist(), batch.kv_lens.tolist()
        for row, kv_len, first, q_len in zip(
            rows, kv_lens, accumulate(batch.q_lens, initial=0), batch.q_lens, strict=False
        ):
            num_read = kv_len - q_len
            fed = batch.input_ids[first : first + q_len]
            sums = prefix_sums(torch.cat((tokens[row, :num_read].to(torch.int64), fed)))
            slots = page_table[row, :kv_len].to(torch.int64)
            _raise_if_wrong(
                self._sums[slots[:num_read]] != sums[:num_read], slots, row, 0, "read at"
            )
            written = batch.slots[first : first + q_len]
            _raise_if_wrong(written != slots[num_read:], slots, row, num_read, "written beside")
            self._sums[written] = sums[num_read:]


def prefix_sums(tokens: torch.Tensor) -> torch.Tensor:
    """[n] int64: the checksum of each prefix of tokens [n] int64, modulo 2**64."""
    positions = torch.arange(1, len(tokens) + 1, device=tokens.device)
    mixed = (tokens + 1) * _TOKEN_FACTOR ^ positions * _POSITION_FACTOR
    return (mixed * _TOKEN_FACTOR).cumsum(0)


def _raise_if_wrong(
    is_wrong: torch.Tensor, slots: torch.Tensor, row: int, start: int, what: str
) -> None:
    """`is_wrong` is about the slots from `start` on."""
    if not is_wrong.any():
        return
    position = start + int(is_wrong.nonzero()[0])
    raise RuntimeError(
        f"KV canary: row {row}, position {position}: another token's KV is {what} slot"
        f" {int(slots[position])}; {int(is_wrong.sum())} positions in all."
    )
