"""Cases of sums in one exchange, for Triton's interpreter: two or three processes share memory.

As a program it runs them on a CPU and prints a line of JSON for each; TRITON_INTERPRET=1 must be in
the environment, as for `layer_ops_cases.py`.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from interpreted import asked
from sglang.srt.layers.ops.rank_exchange import (
    BLOCK,
    BLOCK_BYTES,
    WORD_BYTES,
    Room,
    exchange,
    takes,
)

LINES_BYTES, PIECE_BYTES = 3 * BLOCK * WORD_BYTES, 2 * BLOCK_BYTES
LIMIT_S = 60.0
# Words of each exchange: whole programs, parts of one, and fewer than before, in lines and in
# blocks; of several pieces.
MOST, BLOCK_WORDS = 3 * BLOCK, BLOCK_BYTES // WORD_BYTES
WORDS = (4, MOST, BLOCK + 4, 8, MOST + 4, 2 * BLOCK, BLOCK_WORDS, 2 * BLOCK_WORDS, 4, 4, MOST)
WORDS += (5 * BLOCK_WORDS + 8, MOST + 4, 2 * BLOCK_WORDS + 4, 4)
CASES = {
    "two ranks, bfloat16": (2, torch.bfloat16),
    "two ranks, float32": (2, torch.float32),
    "three ranks, float16": (3, torch.float16),
}


def message(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Draws what a rank sends; sums in bfloat16 need no rounding, where interpreters differ."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    count = WORDS[number] * WORD_BYTES // dtype.itemsize
    values = torch.randn(count, generator=generator)
    return ((values * 32).round() if dtype == torch.bfloat16 else values).to(dtype)


def run_rank(rank: int, num_ranks: int, dtype: torch.dtype, names: list[str], results: Any) -> None:
    """Takes part in all exchanges, and tells how many sums have other bits than they should."""
    memories = [SharedMemory(name) for name in names]
    buffers = [torch.frombuffer(memory.buf, dtype=torch.int64) for memory in memories]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    room = Room(num_ranks, LINES_BYTES, PIECE_BYTES)
    epochs = torch.zeros(room.num_epochs, dtype=torch.int32)
    wrong = 0
    for number in range(len(WORDS)):
        x = message(rank, number, dtype)
        assert takes(x, room)
        exchange(x, epochs, addresses, room, rank)
        total = torch.zeros(x.shape)
        for other in range(num_ranks):
            total += message(other, number, dtype).float()
        wrong += not x.equal(total.to(dtype))
    results.put(wrong)


def errors(num_ranks: int, dtype: torch.dtype) -> float:
    """Runs all ranks; the number of wrong sums."""
    context = mp.get_context("fork")
    size = Room(num_ranks, LINES_BYTES, PIECE_BYTES).num_bytes
    memories = [SharedMemory(create=True, size=size) for _ in range(num_ranks)]
    results = context.Queue()
    try:
        names = [memory.name for memory in memories]
        ranks = [
            context.Process(target=run_rank, args=(rank, num_ranks, dtype, names, results))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        found = [results.get(timeout=LIMIT_S) for _ in ranks]
        for rank in ranks:
            rank.kill()
            rank.join()
    finally:
        for memory in memories:
            memory.close()
            memory.unlink()
    return float(sum(found))


if __name__ == "__main__":
    assert sys.argv[1:] == ["triton"]
    for name, case in asked(CASES).items():
        print(json.dumps([name, errors(*case)]))
