"""Times the ops of speculation against torch on one GPU: medians of CUDA graph replays.

    python sgl-kernel/benchmark/bench_speculation.py --out results.json

`confirm`: chains or trees whose drafts are all confirmed along one branch, the longest walk.
`move`: the KV of that branch in all layers of a target and one layer of a draft model, bfloat16;
0 moved is a step whose kept rows lie at the front already. Timed as timing.py says.
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
    names = f"{'op':<20}{'requests':>9}{'rows':>6}{'moved':>6}"
    print(f"{names}{'device us':>11}{'host us':>9}{'GB/s':>8}")
    for timing in timings:
        print(
            f"{timing.op:<20}{timing.requests:>9}{timing.rows:>6}{timing.moved:>6}"
            f"{timing.device_us:>11.2f}{timing.host_us:>9.2f}{timing.gigabytes_per_s:>8.0f}"
        )


if __name__ == "__main__":
    main()
