"""What torch's profiler saw on a device: microseconds by kind of kernel, and the gaps between."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

KV_GATHER, ATTENTION, PRODUCTS = "KV gather", "attention", "matrix products"
PROMPT_KERNELS = "_prompt_"  # names of the kernels of prefill attention begin so
ATTENTION_WORDS = ("_split_kernel", "_combine_kernel", "_extend_kernel", "Decode", "Prefill")
LIBRARY_ATTENTION_WORDS = ("sdpa", "fmha", "flash_", "flash::")  # of cuDNN, torch, FlashAttention
KINDS = (  # the first whose words appear in a kernel's name
    (KV_GATHER, ("gather_kv",)),
    (ATTENTION, (*ATTENTION_WORDS, *LIBRARY_ATTENTION_WORDS)),
    ("norm", ("rms_norm",)),
    ("rope and KV write", ("_rotate_and_store",)),
    ("activation", ("_silu_and_mul",)),
    ("sampling", ("argmax", "sgl_kernel", "logsumexp")),
    (PRODUCTS, ("_few_rows", "gemm", "nvjet", "cutlass", "gemv", "splitK", "matmul")),
    ("copies", ("Memcpy", "Memset")),
)
MAX_KERNELS, MAX_GAPS = 24, 8  # that are named in a result


class Event(NamedTuple):
    """A kernel or copy; start and end in microseconds."""

    start: float
    end: float
    name: str


def kind_of(name: str) -> str:
    """What a kernel is for."""
    for kind, words in KINDS:
        if any(word.lower() in name.lower() for word in words):
            return kind
    return ATTENTION if name.startswith(PROMPT_KERNELS) else "other"


def events_of(profiler: Any, device_type: str = "cuda") -> list[Event]:
    """All kernels and copies of a GPU; of a CPU all operations, outer ones and those within."""
    types = torch.autograd.DeviceType
    wanted = types.CUDA if device_type == "cuda" else types.CPU
    return sorted(
        Event(event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == wanted
    )


def sums(events: Iterable[Event], num_steps: int) -> dict[str, Any]:
    """Microseconds per step by kind, by kernel, and idle between kernels.

    Args:
        events: at least one, in the order of their starts.
    """
    events = list(events)
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    gaps: dict[str, list[float]] = defaultdict(list)
    idle, busy_until, last_name = 0.0, events[0].start, events[0].name
    for start, end, name in events:
        # A kernel launched early waits beside the one before it: its time begins when that ends.
        alone = max(0.0, end - max(start, busy_until))
        kinds[kind_of(name)] += alone
        kernels[name].append(alone)
        if start > busy_until:
            idle += start - busy_until
            gaps[f"{last_name[:50]} > {name[:50]}"].append(start - busy_until)
        busy_until, last_name = max(busy_until, end), name
    whole = busy_until - events[0].start
    largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:MAX_KERNELS]
    widest = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:MAX_GAPS]
    return {
        "profiled_us": whole / num_steps,
        "idle_us": idle / num_steps,
        "kernels_per_step": len(events) / num_steps,
        "kinds_us": {kind: total / num_steps for kind, total in sorted(kinds.items())},
        "gaps": [
            {
                "between": pair,
                "per_step": len(all_us) / num_steps,
                "us_per_step": sum(all_us) / num_steps,
            }
            for pair, all_us in widest
        ],
        "kernels": [
            {
                "name": name[:90],
                "per_step": len(times) / num_steps,
                "median_us": statistics.median(times),
                "us_per_step": sum(times) / num_steps,
            }
            for name, times in largest
        ],
    }


def print_times(row: dict[str, Any]) -> None:
    """What `sums` found, for the terminal."""
    print(f"  idle {row['idle_us']:.0f} us, {row['kernels_per_step']:.0f} kernels, by kind:")
    print("  " + ", ".join(f"{kind} {us:.0f}" for kind, us in row["kinds_us"].items()))
    for gap in row["gaps"]:
        print(f"  gaps {gap['us_per_step']:6.1f} us {gap['per_step']:6.1f} x  {gap['between']}")
    for kernel in row["kernels"]:
        print(
            f"  {kernel['us_per_step']:8.1f} us {kernel['per_step']:6.1f} x"
            f" {kernel['median_us']:7.2f}  {kernel['name']}"
        )
