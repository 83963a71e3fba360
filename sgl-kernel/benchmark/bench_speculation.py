"""Times the ops of speculation against torch on one GPU: medians of CUDA graph replays.

    python sgl-kernel/benchmark/bench_speculation.py --out results.json

`confirm`: chains or trees whose drafts are all confirmed along one branch, the longest walk.
`move`: the KV of that branch in all layers of a target and one layer of a draft model, bfloat16;
0 moved is a step whose kept rows lie at the front already.
`build`: trees of equal size from EAGLE's candidates (tree_cases.py). The uniform launch gets the
candidates selected, the ragged one selects them too; `select, build uniform` does as much, with
torch's topk and sort. `verify` and `sample`: those trees, from a
vocabulary of `--vocabulary` tokens; no draft is confirmed. Timed as timing.py says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from timing import device_time_us, environment, host_time_us
from tqdm import tqdm
from tree_cases import DEPTH, TOPK, drafted_trees

import sgl_kernel
from sgl_kernel import reference


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one op.

    Attributes:
        rows: pending rows of each request.
        moved: rows of each request whose KV moves.
        gigabytes_per_s: KV read and written, divided by the device time.
    """

    op: str
    requests: int
    rows: int
    moved: int
    device_us: float
    host_us: float
    gigabytes_per_s: float


def main() -> None:
    options = parse_options()
    sgl_kernel.warm_up()
    confirm = [(name, rows) for rows in options.rows for name in _CONFIRM]
    moves = [(name, moved) for moved in options.moved for name in _MOVE]
    timings = []
    for requests in tqdm(options.requests, desc="timing", file=sys.stderr):
        timings += [measure_confirm(name, requests, rows, options) for name, rows in confirm]
        timings += [measure_move(name, requests, moved, options) for name, moved in moves]
    for requests in tqdm(options.tree_requests, desc="timing trees", file=sys.stderr):
        for rows in options.tree_rows:
            timings += measure_trees(requests, rows, options)
    print_table(timings)
    if options.out is not None:
        record = {
            **environment("bench_speculation.py"),
            "timings": [asdict(timing) for timing in timings],
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--moved", type=int, nargs="+", default=[0, 3, 7])
    parser.add_argument("--tree-requests", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tree-rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8, help="KV heads of 128")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


_CONFIRM: dict[str, tuple[Callable[..., object], bool]] = {
    "confirm chain": (sgl_kernel.confirm_drafts, False),
    "confirm tree": (sgl_kernel.confirm_drafts, True),
    "torch confirm tree": (reference.confirm_drafts, True),
}
_MOVE: dict[str, Callable[..., object]] = {
    "move": sgl_kernel.move_kept_kv,
    "torch move": reference.move_kept_kv,
}


def measure_confirm(name: str, requests: int, rows: int, options: argparse.Namespace) -> Timing:
    """Medians for drafts that are all confirmed; trees have a sibling beside each of them."""
    op, is_tree = _CONFIRM[name]
    index = torch.arange(rows, device="cuda")
    depth = (index + 1) // 2 if is_tree else index
    # Rows 2d - 1 and 2d are at depth d, and both follow row 2d - 3: the lower one is confirmed.
    parents = (2 * depth - 3).clamp(min=0) if is_tree else index - 1
    tokens = (2 * depth + (index % 2 == 0)) if is_tree else depth
    targets = (2 * depth + 2) if is_tree else depth + 1
    packed = [part.repeat(requests) for part in (tokens, targets)]
    arguments = (
        *packed,
        parents.to(torch.int32).repeat(requests) if is_tree else None,
        torch.arange(requests + 1, device="cuda") * rows,
        torch.full((requests,), rows, device="cuda"),
        rows,
    )
    num_confirmed = sgl_kernel.confirm_drafts(*arguments).num_confirmed
    assert (num_confirmed == depth[-1]).all(), "the walk is not the longest one"
    return _timed(name, (requests, rows, 0), lambda _: op(*arguments), options)


def measure_move(name: str, requests: int, moved: int, options: argparse.Namespace) -> Timing:
    """Medians for kept rows 1 .. moved that lie twice as far back; of a chain of 7 for 0 moved."""
    op, page, width = _MOVE[name], options.page_size, 64
    num_slots = page + requests * width
    shape = (num_slots, 2 * options.heads, 128)
    layers = [
        torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(options.layers + 1)
    ]
    order = torch.randperm(requests * width // page, device="cuda") * page + page
    slots = order[:, None] + torch.arange(page, device="cuda")
    path = torch.arange(8, device="cuda") * (2 if moved else 1)
    arguments = (
        sgl_kernel.KVAddresses(layers),
        slots.view(requests, width).to(torch.int32),
        torch.arange(requests, device="cuda"),
        torch.full((requests,), 20, device="cuda"),
        path.to(torch.int32).repeat(requests, 1),
        torch.full((requests,), moved or 7, device="cuda"),
    )
    rows = int(path[moved or 7]) + 1
    num_bytes = 2 * moved * requests * len(layers) * layers[0][0].nbytes
    return _timed(name, (requests, rows, moved), lambda _: op(*arguments), options, num_bytes)


def measure_trees(requests: int, rows: int, options: argparse.Namespace) -> list[Timing]:
    """Medians of both builds of the same trees, and of both verifications of what they make."""
    flat, uniform = drafted_trees(requests, rows)
    num_rows = requests * rows
    mask = torch.empty(num_rows * rows, dtype=torch.bool, device="cuda")
    positions = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    links = [torch.empty(requests, rows, dtype=torch.int64, device="cuda") for _ in range(3)]
    mode = sgl_kernel.TreeMaskMode.QLEN_ONLY
    results = (mask, positions, *links, TOPK, DEPTH, rows, mode)
    built = sgl_kernel.build_ragged_trees(*flat, num_rows)
    sgl_kernel.build_tree_kernel_efficient(*uniform, *results)
    assert torch.equal(links[1].flatten(), built.first_child.long()), "the trees differ"

    trees = (built.first_child, built.next_sibling, built.starts)
    targets = torch.full_like(built.tokens, -1)
    coins = torch.full((num_rows,), 0.999, device="cuda")
    probs = torch.full((num_rows, options.vocabulary), 1 / options.vocabulary, device="cuda")
    sampled = (built.tokens, *trees, coins, coins[:requests], probs, DEPTH + 1)
    scores = flat[1].view(requests, -1)

    def select_and_build(_: None) -> None:
        selected = torch.topk(scores, rows - 1, dim=1).indices.sort(dim=1).values
        sgl_kernel.build_tree_kernel_efficient(uniform[0], selected, uniform[2], *results)

    calls: dict[str, Callable[[None], object]] = {
        "select, build uniform": select_and_build,
        "build uniform": lambda _: sgl_kernel.build_tree_kernel_efficient(*uniform, *results),
        "build ragged": lambda _: sgl_kernel.build_ragged_trees(*flat, num_rows),
        "verify ragged": lambda _: sgl_kernel.verify_ragged_trees(
            built.tokens, targets, *trees, DEPTH + 1
        ),
        "sample ragged": lambda _: sgl_kernel.sample_ragged_trees(*sampled),
    }
    shape = (requests, rows, 0)
    return [_timed(name, shape, call, options) for name, call in calls.items()]


def _timed(
    name: str,
    shape: tuple[int, int, int],
    call: Callable[[None], object],
    options: argparse.Namespace,
    num_bytes: int = 0,
) -> Timing:
    """`shape`: requests, rows and moved of the result."""
    device_us = device_time_us(call, [None], options.repeats)
    return Timing(
        name,
        *shape,
        device_us=round(device_us, 2),
        host_us=round(host_time_us(call, None, options.repeats), 2),
        gigabytes_per_s=round(num_bytes / device_us / 1e3, 1),
    )


def print_table(timings: list[Timing]) -> None:
    names = f"{'op':<22}{'requests':>9}{'rows':>6}{'moved':>6}"
    print(f"{names}{'device us':>11}{'host us':>9}{'GB/s':>8}")
    for timing in timings:
        print(
            f"{timing.op:<22}{timing.requests:>9}{timing.rows:>6}{timing.moved:>6}"
            f"{timing.device_us:>11.2f}{timing.host_us:>9.2f}{timing.gigabytes_per_s:>8.0f}"
        )


if __name__ == "__main__":
    main()
