"""Sums messages of GPUs in one exchange: each rank writes its own into the memory of the others,
and adds up those that it gets.

A small message goes in lines of 8 bytes: 4 bytes of it, and the number of the exchange. A GPU
writes and reads a line at once, so whoever finds the number has the data, and nothing else is
waited for (as in NCCL's protocol LL). A larger one goes in blocks, each of which has one number
that is written after it: half as many bytes on the way, and more time until the first ones arrive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin, dependent_launch

BLOCK = 512  # words of a program, the same in all exchanges: it counts the exchanges of its words
WORD_BYTES, LINE_BYTES = 4, 8
BLOCK_BYTES, VECTOR_BYTES = 1 << 14, 16
LINES_BYTES = 1 << 20  # that a rank sends to all others together, in lines, at most
PIECE_BYTES = 1 << 24
HALVES = 2  # of a buffer, used in turn
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Room(NamedTuple):
    """Says which messages go how, and so how large a rank's buffer is. It has lines
    [HALVES, num_ranks, lines_bytes / 4] int64, then blocks [HALVES, num_ranks, piece_bytes], then
    numbers of blocks [HALVES, num_ranks, piece_bytes / BLOCK_BYTES] int32.

    Attributes:
        num_ranks: that take part.
        lines_bytes: of the largest message in lines; a multiple of VECTOR_BYTES.
        piece_bytes: of a larger message, that goes in blocks at once; a multiple of BLOCK_BYTES.
            0: no message is larger.
    """

    num_ranks: int
    lines_bytes: int
    piece_bytes: int

    @property
    def blocks_place(self) -> int:
        """Bytes before the blocks."""
        return HALVES * self.num_ranks * (self.lines_bytes // WORD_BYTES) * LINE_BYTES

    @property
    def numbers_place(self) -> int:
        """Bytes before the numbers of blocks."""
        return self.blocks_place + HALVES * self.num_ranks * self.piece_bytes

    @property
    def num_bytes(self) -> int:
        """The size of a rank's buffer."""
        return self.numbers_place + HALVES * self.num_ranks * self.num_blocks * WORD_BYTES

    @property
    def num_blocks(self) -> int:
        """Blocks of a piece."""
        return self.piece_bytes // BLOCK_BYTES

    @property
    def num_line_programs(self) -> int:
        return triton.cdiv(self.lines_bytes // WORD_BYTES, BLOCK)

    @property
    def num_epochs(self) -> int:
        """Programs that count exchanges: those of lines, then those of blocks."""
        return self.num_line_programs + self.num_blocks


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


@triton.jit(do_not_specialize=["num_vectors", "early"])
def _exchange_blocks_kernel(
    x_ptr, epochs_ptr, buffers_ptr, num_vectors, room, blocks_place, numbers_place,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, TYPE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Overwrites x, `VECTOR` elements for each of `num_vectors`, with the sum of all ranks'.

    Args:
        epochs: int32, how many exchanges each program had. Buffers are used in halves as above.
        room: elements of a piece.
        blocks_place, numbers_place: see `Room`.
    """
    begin(PDL, early)
    program = tl.program_id(0)
    place = program * BLOCK + tl.arange(0, BLOCK)
    exists = place < num_vectors * VECTOR
    epoch = tl.load(epochs_ptr + program) + 1
    half = (epoch & 1) * NUM_RANKS
    own = tl.load(x_ptr + place, mask=exists, other=0.0)
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            blocks = (tl.load(buffers_ptr + rank) + blocks_place).to(tl.pointer_type(TYPE))
            target = tl.multiple_of(blocks + (half + RANK) * room + place, 16)
            tl.store(target, own, mask=exists)
    tl.debug_barrier()  # so the numbers, which one thread writes, come after what all have written
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            numbers = (tl.load(buffers_ptr + rank) + numbers_place).to(tl.pointer_type(tl.int32))
            target = numbers + (half + RANK) * NUM_BLOCKS + program
            tl.atomic_xchg(target, epoch, sem="release", scope="sys")

    own_blocks = (tl.load(buffers_ptr + RANK) + blocks_place).to(tl.pointer_type(TYPE))
    own_numbers = (tl.load(buffers_ptr + RANK) + numbers_place).to(tl.pointer_type(tl.int32))
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            number = own_numbers + (half + rank) * NUM_BLOCKS + program
            while tl.atomic_add(number, 0, sem="acquire", scope="sys") != epoch:
                pass
    tl.debug_barrier()
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        if rank == RANK:
            total += own.to(tl.float32)
        else:
            source = tl.multiple_of(own_blocks + (half + rank) * room + place, 16)
            found = tl.load(source, mask=exists, other=0.0, cache_modifier=".cg")
            total += found.to(tl.float32)
    tl.store(x_ptr + place, total.to(TYPE), mask=exists)
    tl.store(epochs_ptr + program, epoch)


def room_of(num_ranks: int) -> Room:
    """Makes the room of a server's ranks. With more than two, blocks would send more bytes than
    rings do, so there are none. With two, messages above LINES_BYTES / 2 go in blocks: of that
    size lines and blocks take about as long."""
    lines_bytes = LINES_BYTES // max(2, num_ranks - 1) // VECTOR_BYTES * VECTOR_BYTES
    return Room(num_ranks, lines_bytes, PIECE_BYTES if num_ranks == 2 else 0)


def takes(x: torch.Tensor, room: Room) -> bool:
    """Tells whether `exchange` can sum x."""
    first_byte = x.storage_offset() * x.element_size()
    is_aligned = first_byte % VECTOR_BYTES == x.nbytes % VECTOR_BYTES == 0
    has_room = x.nbytes <= room.lines_bytes or room.piece_bytes > 0
    return x.dtype in TYPES and is_aligned and has_room


def exchange(
    x: torch.Tensor, epochs: torch.Tensor, buffers: torch.Tensor, room: Room, rank: int
) -> None:
    """Overwrites x with the sum of all ranks', in float32 and in the order of ranks, rounded once:
    the same bits on all ranks, and for each element whatever else is in x.

    Args:
        x: contiguous, and `takes` it.
        epochs: [room.num_epochs] int32, 0 at first.
        buffers: [num_ranks] int64, addresses of what all ranks can write, 0 at first; multiples of
            VECTOR_BYTES.
        rank: which one this is.
    """
    ranks = {"RANK": rank, "NUM_RANKS": room.num_ranks, "TYPE": TYPES[x.dtype]}
    if x.nbytes <= room.lines_bytes:
        words = x.view(-1).view(torch.int32)
        num_programs = triton.cdiv(len(words), BLOCK)
        _exchange_kernel[(num_programs,)](
            words, epochs, buffers, len(words), room.lines_bytes // WORD_BYTES,
            IS_WORD=x.itemsize == WORD_BYTES, BLOCK=BLOCK, **ranks,
            num_warps=4, **dependent_launch(x.device, num_programs),
        )  # fmt: skip
        return
    vector, block = VECTOR_BYTES // x.itemsize, BLOCK_BYTES // x.itemsize
    for piece in x.view(-1).split(room.piece_bytes // x.itemsize):
        num_programs = triton.cdiv(len(piece), block)
        _exchange_blocks_kernel[(num_programs,)](
            piece, epochs[room.num_line_programs :], buffers,
            len(piece) // vector, room.piece_bytes // x.itemsize,
            room.blocks_place, room.numbers_place,
            VECTOR=vector, BLOCK=block, NUM_BLOCKS=room.num_blocks, **ranks,
            num_warps=8, **dependent_launch(x.device, num_programs),
        )  # fmt: skip
