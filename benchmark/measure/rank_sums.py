"""Times sums of two ranks: through NCCL, and over memory that both GPUs write, in lines and blocks.

    python -m benchmark.measure.rank_sums

Each rank is a process with a GPU, as in a server. A graph has many sums of one size, one after the
other; graphs of both kinds are replayed in turn, and a time is the median of one sum. With
`--device cpu --sums 2` gloo alone tries the command.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmark.command import make_parser, print_rows, store, take_turns
from benchmark.environment import describe_environment
from sglang.srt.distributed.group import RankGroup
from sglang.srt.entrypoints.children import child_environ
from sglang.srt.processes.model_parts import EXCHANGE
from sglang.srt.shard import Shard

SIZES = [1 << power for power in range(13, 27)]  # bytes: 8 KB to 64 MB
NUM_RANKS, REPEATS, LIMIT_S = 2, 20, 300
DTYPE = torch.bfloat16


def ways_of(folder: Path, rank: int, device: str) -> dict[str, RankGroup]:
    """Connects the ranks, once for each way."""
    shard = Shard(rank, NUM_RANKS)
    if device == "cpu":
        return {"gloo": RankGroup(shard, folder / "gloo")}
    kernels = import_module(EXCHANGE)
    usual = kernels.room_of(NUM_RANKS)
    rooms = {
        "nccl": None,
        "lines": usual._replace(lines_bytes=2 * usual.lines_bytes, piece_bytes=0),
        "blocks": usual._replace(lines_bytes=0),
    }
    ways = {way: RankGroup(shard, folder / way) for way in rooms}
    for way, room in rooms.items():
        ways[way].connect_gpus(device, DTYPE, None if room is None else kernels, room)
        assert room is None or ways[way].one_shot, "These GPUs cannot; the log says why."
    return ways


def replayable(work: Callable[[], None], device: str) -> Callable[[], None]:
    """Captures work in a graph if there is a GPU, and returns what runs it to its end."""
    if device == "cpu":
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):  # beside NCCL's threads
        work()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def measure(ways: dict[str, RankGroup], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures one row per size; both ranks do so together."""
    rows, device = [], arguments.device
    for size in tqdm(SIZES, desc="sums", unit="size", disable=arguments.rank > 0):
        generator = torch.Generator().manual_seed(arguments.rank)
        values = torch.randn((1, size // DTYPE.itemsize), generator=generator).to(device, DTYPE)
        able = {
            way: each
            for way, each in ways.items()
            if not each.one_shot or each.one_shot.takes(values)
        }
        totals = [ranks.sum(values.clone()) for ranks in able.values()]
        values.zero_()  # stays so

        def sums(ranks: RankGroup, x: torch.Tensor = values) -> None:
            for _ in range(arguments.sums):
                ranks.sum(x)

        def sum_us(ranks: RankGroup, work: Callable[[], None]) -> float:
            ranks.least(0)  # both ranks begin now
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) / arguments.sums * 1e6

        works = {
            way: partial(sum_us, ranks, replayable(partial(sums, ranks), device))
            for way, ranks in able.items()
        }
        times = take_turns(works, REPEATS)
        medians = {f"{way}_us": statistics.median(found) for way, found in times.items()}
        equal = all(totals[0].equal(total) for total in totals)
        rows.append({"bytes": size, **medians, "equal": equal})
    return rows


def run_ranks(device: str, num_sums: int) -> list[dict[str, Any]]:
    """Starts both ranks, and returns the rows of the first."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--folder", folder, "--device", device, "--sums", str(num_sums), "--rank"]
        command = [sys.executable, "-m", "benchmark.measure.rank_sums", *words]
        gpu_ids = [0 if device == "cpu" else rank for rank in range(NUM_RANKS)]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=child_environ(gpu_id))
            for rank, gpu_id in enumerate(gpu_ids)
        ]
        try:
            for rank in reversed(ranks):
                if rank.wait(LIMIT_S):
                    raise SystemExit("A rank failed.")
            return json.loads((Path(folder) / "0.json").read_text())  # type: ignore[no-any-return]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = make_parser(__doc__, "rank_sums")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sums", type=int, default=200, help="in a graph")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        ways = ways_of(arguments.folder, arguments.rank, arguments.device)
        rows = measure(ways, arguments)
        (arguments.folder / f"{arguments.rank}.json").write_text(json.dumps(rows))
        os._exit(0)  # groups of NCCL, where they are released, would wait for each other
    rows = run_ranks(arguments.device, arguments.sums)
    print_rows(rows)
    store(arguments.out, {**describe_environment(), "sums": arguments.sums, "rows": rows})


if __name__ == "__main__":
    main()
