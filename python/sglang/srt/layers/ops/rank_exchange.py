"""Sums small messages of GPUs in one exchange: each rank writes its message into the memory of the
others, and adds up those that it gets.

A message goes in lines of 8 bytes: 4 bytes of it, and the number of the exchange. A GPU writes and
reads a line at once, so whoever finds the number has the data, and nobody waits for anything else
(as in NCCL's protocol LL).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin, dependent_launch
from sglang.srt.shard import Shard

BLOCK = 512  # words of a program, the same in all exchanges: it counts the exchanges of its words
WORD_BYTES, LINE_BYTES = 4, 8
HALVES = 2  # of a buffer, used in turn
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["num_words", "early"])
def _exchange_kernel(
    x_ptr, epochs_ptr, buffers_ptr, num_words, room,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, TYPE: tl.constexpr, IS_WORD: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Overwrites x, as words, with the sum of all ranks'.

    Args:
        epochs: int32, how many exchanges the words of each program had.
        buffers: int64, address of each rank's buffer: lines [HALVES, NUM_RANKS, room]. The words of
            one exchange are in one half. A rank writes there again two exchanges later; the one
            between needs data that the reader has sent after it had read.
    """
    begin(PDL, early)
    program = tl.program_id(0)
    place = program * BLOCK + tl.arange(0, BLOCK)
    exists = place < num_words
    epoch = tl.load(epochs_ptr + program) + 1
    half = (epoch & 1) * NUM_RANKS
    own = tl.load(x_ptr + place, mask=exists, other=0)
    line = (epoch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            buffer = tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.int64))
            tl.store(buffer + (half + RANK) * room + place, line, mask=exists)

    buffer = tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.int64))
    total = tl.zeros([BLOCK], dtype=tl.float32)
    second = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        words = own
        if rank != RANK:
            source = buffer + (half + rank) * room + place
            line = tl.load(source, mask=exists, other=0, volatile=True)
            while tl.max((exists & ((line >> 32) != epoch)).to(tl.int32), 0) > 0:
                line = tl.load(source, mask=exists, other=0, volatile=True)
            words = line.to(tl.int32)
        if IS_WORD:
            total += words.to(tl.float32, bitcast=True)
        else:
            total += words.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
            second += (words >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    if IS_WORD:
        result = total.to(tl.int32, bitcast=True)
    else:
        low = total.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        result = low | (second.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    tl.store(x_ptr + place, result, mask=exists)
    tl.store(epochs_ptr + program, epoch)


def buffer_bytes(num_bytes: int, num_ranks: int) -> int:
    """Computes the size of a rank's buffer for messages of up to `num_bytes`."""
    return HALVES * num_ranks * (num_bytes // WORD_BYTES) * LINE_BYTES


def num_epochs(num_bytes: int) -> int:
    """Computes how many programs count exchanges of messages of up to `num_bytes`."""
    return triton.cdiv(num_bytes // WORD_BYTES, BLOCK)


def exchange(
    x: torch.Tensor, epochs: torch.Tensor, buffers: torch.Tensor, num_bytes: int, shard: Shard
) -> None:
    """Overwrites x with the sum of all ranks', in float32 and in the order of ranks, rounded once:
    the same bits on all ranks, and for each element whatever else is in x.

    Args:
        x: contiguous, a multiple of 4 bytes, of a type in TYPES.
        epochs: [num_epochs(num_bytes)] int32, 0 at first.
        buffers: [num_ranks] int64, addresses of what all ranks can write, 0 at first.
        num_bytes: of the largest message.
    """
    words = x.view(-1).view(torch.int32)
    num_programs = triton.cdiv(len(words), BLOCK)
    _exchange_kernel[(num_programs,)](
        words, epochs, buffers, len(words), num_bytes // WORD_BYTES,
        RANK=shard.rank, NUM_RANKS=shard.num_ranks, TYPE=TYPES[x.dtype],
        IS_WORD=x.itemsize == WORD_BYTES, BLOCK=BLOCK,
        num_warps=4, **dependent_launch(x.device, num_programs),
    )  # fmt: skip
