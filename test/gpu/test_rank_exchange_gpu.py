"""Sums in one exchange by the kernels of ranks; two streams of one GPU stand in for the ranks."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.ops.rank_exchange import BLOCK_BYTES, VECTOR_BYTES, Room, exchange

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NUM_RANKS, NUM_ROUNDS = 2, 50
# Programs of both ranks must fit on the GPU together, since they wait for each other.
ROOM = Room(NUM_RANKS, lines_bytes=1 << 18, piece_bytes=64 * BLOCK_BYTES)
SIZES = (
    VECTOR_BYTES,
    ROOM.lines_bytes,
    ROOM.lines_bytes + VECTOR_BYTES,
    ROOM.piece_bytes,
    3 * ROOM.piece_bytes + BLOCK_BYTES + VECTOR_BYTES,
)


class Ranks:
    """Both ranks: their buffers, and a stream for each."""

    def __init__(self, dtype: torch.dtype) -> None:
        shape = (NUM_RANKS, ROOM.num_bytes)
        self._memory = torch.empty(shape, dtype=torch.uint8, device="cuda")
        addresses = [memory.data_ptr() for memory in self._memory]
        self._buffers = torch.tensor(addresses, device="cuda")
        self._epochs = torch.zeros((NUM_RANKS, ROOM.num_epochs), dtype=torch.int32, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(NUM_RANKS)]
        self._compile(dtype)

    def _compile(self, dtype: torch.dtype) -> None:
        """Loads both kernels before one waits, which nothing can be loaded beside: here all memory
        has the number of the first exchange, so no rank waits for the other."""
        self._memory.view(torch.int32).fill_(1)
        for rank in range(NUM_RANKS):
            for size in (ROOM.lines_bytes, ROOM.piece_bytes):
                self.sum(rank, torch.zeros(size // dtype.itemsize, dtype=dtype, device="cuda"))
        self._memory.zero_()
        self._epochs.zero_()

    def sum(self, rank: int, message: torch.Tensor) -> None:
        exchange(message, self._epochs[rank], self._buffers, ROOM, rank)


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ranks_have_the_bits_of_the_sum(dtype: torch.dtype, has_graphs: bool) -> None:
    """In each of many rounds, in lines and in blocks, of one piece and of several."""
    ranks = Ranks(dtype)
    messages = [
        [torch.zeros(size // dtype.itemsize, dtype=dtype, device="cuda") for size in SIZES]
        for _ in range(NUM_RANKS)
    ]
    graphs = [torch.cuda.CUDAGraph() for _ in range(NUM_RANKS)] if has_graphs else []
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            for message in messages[rank]:
                ranks.sum(rank, message)
    for number in range(NUM_ROUNDS):
        pairs = [*zip(*messages, strict=True)]
        for first, second in pairs:
            first.normal_()
            second.normal_()
        totals = [(first.float() + second.float()).to(dtype) for first, second in pairs]
        torch.cuda.synchronize()
        for rank in range(NUM_RANKS):
            with torch.cuda.stream(ranks.streams[rank]):
                if has_graphs:
                    graphs[rank].replay()
                    continue
                for message in messages[rank]:
                    ranks.sum(rank, message)
        torch.cuda.synchronize()
        for found in messages:
            for message, total in zip(found, totals, strict=True):
                assert message.equal(total), number
