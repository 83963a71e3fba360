"""Measures what decode attention gains from prefixes that requests share, in ms of all layers.

Attention alone, in CUDA graphs, in the geometry of an 8B model (32 query heads, 8 KV heads of 128,
bfloat16, pages of 1) over random KV at random slots. A graph has LAYERS layers, each with KV of its
own, so that none finds its KV in the GPU's cache; times are given for 32. "own" reads all KV for
each request, "shared" reads that of prefixes for tiles of requests. Both take turns.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from benchmark.command import make_parser, print_rows, store, take_turns
from benchmark.environment import describe_environment
from sglang.srt.layers.attention.triton_backend import TritonBackend
from sglang.srt.layers.forward_batch import DECODE, ForwardBatch, GraphKey
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool, SharedPrefix

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
LAYERS, ALL_LAYERS = 4, 32
CONTEXT_LEN, NUM_ROWS = 32768, 128
REPLAYS = 10


@dataclass(frozen=True)
class Case:
    """Requests of one row, in groups that share a prefix each.

    Attributes:
        num_groups, group_size: groups, and requests of each.
        prefix_len, own_len: tokens that a group shares, and those of each request after them.
    """

    num_groups: int
    group_size: int
    prefix_len: int
    own_len: int = 100

    @property
    def name(self) -> str:
        """Says who shares what."""
        groups = f"{self.num_groups} groups of " if self.num_groups > 1 else ""
        return f"{groups}{self.group_size} sharing {self.prefix_len:,}, {self.own_len:,} own"

    @property
    def num_requests(self) -> int:
        return self.num_groups * self.group_size


CASES = (
    *(Case(1, size, 4096) for size in (128, 64, 16, 4)),
    *(Case(8, 16, length) for length in (4096, 512)),
    Case(32, 4, 2048),
    Case(1, 16, 2048, 16000),
    Case(1, 4, 30000),
    *(Case(1, 128, length) for length in (256, 512)),
    Case(1, 64, 1024),
    *(Case(1, 16, length) for length in (1024, 2048)),
    Case(1, 8, 4096),
    Case(128, 1, 4096),  # nothing is shared
)


class Step:
    """A step's memory, inputs and backend.

    Attributes:
        q: [R, NUM_HEADS, HEAD_DIM].
        batches: the step with the prefixes known, "shared", and without them, "own".
    """

    def __init__(self, case: Case, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.case, count = case, case.num_requests
        num_slots = case.num_groups * case.prefix_len + count * case.own_len
        table = ReqToTokenPool(NUM_ROWS, CONTEXT_LEN, device)
        sizes = LAYERS, NUM_KV_HEADS, HEAD_DIM
        self.pool = MHATokenToKVPool(num_slots, 1, *sizes, dtype, device)
        for kv in self.pool.kv:
            kv.normal_()
        self.q = torch.randn(count, NUM_HEADS, HEAD_DIM, dtype=dtype, device=device)
        slots = 1 + torch.randperm(num_slots, device=device).to(torch.int32)
        shared, own = slots.split([case.num_groups * case.prefix_len, count * case.own_len])
        rows = torch.arange(count, device=device)
        heads = shared.view(case.num_groups, -1).repeat_interleave(case.group_size, 0)
        table.req_to_token[:count, : case.prefix_len] = heads
        end = case.prefix_len + case.own_len
        table.req_to_token[:count, case.prefix_len : end] = own.view(count, -1)
        self.backend = TritonBackend(table, self.pool, NUM_HEADS, [None] * LAYERS)
        numbers = torch.zeros(count, dtype=torch.int64, device=device)
        places = [
            tuple(range(first, first + case.group_size))
            for first in range(0, count, case.group_size)
        ]
        prefixes = [SharedPrefix(case.prefix_len, each, each) for each in places if len(each) > 1]
        self.batches = {
            name: ForwardBatch(
                input_ids=numbers,
                positions=numbers + end - 1,
                slots=numbers,
                rows=rows,
                q_lens=[1] * count,
                kv_lens=numbers + end,
                kv_len_upper_bounds=[end] * count,
                graph_key=GraphKey(DECODE, count, 1, count, shares_kv=known),
                shared_prefixes=prefixes if known else [],
            )
            for name, known in (("own", False), ("shared", True))
        }

    def forward(self) -> None:
        """Runs all layers of the planned step."""
        for layer in range(LAYERS):
            self.backend.forward(layer, self.q)

    def captured(self, name: str) -> torch.cuda.CUDAGraph:
        """Captures a batch in a graph."""
        self.backend.plan(self.batches[name])
        self.forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward()
        return graph


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of ALL_LAYERS layers, the mean of some replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed / REPLAYS * ALL_LAYERS / LAYERS


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Measures a case: the median of rounds."""
    step = Step(case, "cuda")
    works = {name: partial(replay_ms, step.captured(name)) for name in step.batches}
    times = take_turns(works, rounds)
    medians = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    return {"name": case.name, **asdict(case), **medians, "times_ms": times}


def main() -> None:
    """Measures all cases, prints a table."""
    parser = make_parser(__doc__, "shared_prefixes")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = [measure(case, arguments.rounds) for case in tqdm(CASES, unit="case")]
    store(arguments.out, {**describe_environment(), "layers": ALL_LAYERS, "rows": rows})
    print_rows(rows)


if __name__ == "__main__":
    main()
