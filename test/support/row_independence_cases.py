"""Compares the bits of a row's result alone with those in company, for the kernels of
--enable-deterministic-inference. Each case returns how many rows differ.

As a program it runs all cases in Triton's interpreter, a line of JSON each:

    TRITON_INTERPRET=1 python test/support/row_independence_cases.py row_independent
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl

from interpreted import asked
from sglang.srt.layers.attention.triton_ops.parts_kernel import num_parts, part_of, part_start
from sglang.srt.layers.forward_batch import DECODE, MIXED, RAGGED, ForwardBatch, GraphKey
from sglang.srt.layers.layer_runtime import LayerOps
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.registry import ATTENTION_BACKENDS, OPERATIONS, ROW_INDEPENDENT, load

Part = tuple[int, int, int]  # request, tokens with KV before the step, tokens fed


def num_different(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Counts rows [N, size] whose bits differ."""
    kind = {2: torch.int16, 4: torch.int32}[found.itemsize]
    differs = found.contiguous().view(kind) != expected.contiguous().view(kind)
    return int(differs.flatten(1).any(1).sum())


# ---------------------------------------------------------------- operations


@dataclass(frozen=True)
class RowOperation:
    """An operation of a layer whose rows are computed by themselves.

    Attributes:
        size: of a row of its input.
        make: of a device and a type, makes the operation: rows [T, size] to rows.
    """

    size: int
    make: Callable[[str, torch.dtype], Callable[[torch.Tensor], torch.Tensor]]


def ops_of(device: str) -> LayerOps:
    """Makes the operations of the mode."""
    ops: LayerOps = load(OPERATIONS[ROW_INDEPENDENT].layers)(torch.device(device))
    return ops


def random_values(device: str, dtype: torch.dtype, seed: int, *shape: int) -> torch.Tensor:
    """Draws normal numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=dtype)


def product(out_features: int, in_features: int, has_bias: bool = False) -> RowOperation:
    def make(device: str, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        ops = ops_of(device)
        weight = random_values(device, dtype, 1, out_features, in_features)
        bias = random_values(device, dtype, 2, out_features) if has_bias else None
        return lambda x: ops.linear(x, weight, bias)

    return RowOperation(in_features, make)


def gated(size: int, in_features: int, has_bias: bool = False) -> RowOperation:
    def make(device: str, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        ops = ops_of(device)
        weight = random_values(device, dtype, 1, 2 * size, in_features) / in_features**0.5
        bias = random_values(device, dtype, 2, 2 * size) if has_bias else None
        return lambda x: ops.gated_linear(x, weight, bias)

    return RowOperation(in_features, make)


def norm(size: int) -> RowOperation:
    def make(device: str, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        ops, weight = ops_of(device), random_values(device, dtype, 1, size)
        return lambda x: torch.cat(ops.add_rms_norm(x, x * 0.5, weight, 1e-5), 1)

    return RowOperation(size, make)


def activation(size: int) -> RowOperation:
    return RowOperation(2 * size, lambda device, dtype: ops_of(device).silu_and_mul)


def experts(num_experts: int, num_chosen: int, hidden_size: int, size: int) -> RowOperation:
    def make(device: str, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        ops = ops_of(device)
        router = random_values(device, dtype, 1, num_experts, hidden_size) / hidden_size**0.5
        gate_up = random_values(device, dtype, 2, num_experts, 2 * size, hidden_size)
        down = random_values(device, dtype, 3, num_experts, hidden_size, size)
        gate_up, down = gate_up / hidden_size**0.5, down / size**0.5
        return lambda x: ops.experts(
            x, ops.linear(x, router, None), gate_up, down, num_chosen, normalizes=True
        )

    return RowOperation(hidden_size, make)


def different_rows(
    operation: RowOperation, device: str, dtype: torch.dtype, counts: Sequence[int], seed: int = 0
) -> int:
    """Counts results of rows in random companies of these numbers that differ from the result in
    the largest company, or alone."""
    x = random_values(device, dtype, seed, max(counts), operation.size)
    run = operation.make(device, dtype)
    whole = run(x)
    assert whole.isfinite().all(), "These numbers tell nothing."
    chooser = torch.Generator().manual_seed(seed)
    found = 0
    for count in counts:
        rows = torch.randperm(len(x), generator=chooser)[:count].to(device)
        found += num_different(run(x[rows]), whole[rows])
    for row in random.Random(seed).sample(range(len(x)), min(8, len(x))):
        found += num_different(run(x[row : row + 1]), whole[row : row + 1])
    return found


# ---------------------------------------------------------------- attention


class Attended:
    """Requests with random KV, any rows of which can be attended in any company.

    Args:
        max_len: tokens of each request.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        num_requests: int,
        max_len: int,
        heads: tuple[int, int, int] = (4, 2, 16),
        window: int | None = None,
        backend: str = ROW_INDEPENDENT,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        num_slots = num_requests * max_len
        self.max_len, self.device = max_len, device
        self.pool = MHATokenToKVPool(num_slots, 1, 1, num_kv_heads, head_dim, dtype, device)
        kv = self.pool.kv[0]
        kv.copy_(random_values(device, dtype, 1, *kv.shape))
        self.table = ReqToTokenPool(num_requests, max_len + 8, device)
        chooser = torch.Generator().manual_seed(2)
        slots = torch.randperm(num_slots, generator=chooser).view(num_requests, max_len)
        self.table.req_to_token[:num_requests, :max_len] = slots.to(device, torch.int32)
        self.q = random_values(device, dtype, 3, num_requests, max_len, num_heads, head_dim)
        kind = ATTENTION_BACKENDS.load(backend)
        self.backend = kind(self.table, self.pool, num_heads, (window,))
        self._alone: dict[tuple[int, int], torch.Tensor] = {}

    def attend(
        self, parts: Sequence[Part], key: GraphKey | None = None, bounds: Sequence[int] = ()
    ) -> torch.Tensor:
        """[T, num_heads * head_dim] of the rows that requests feed; see `ForwardBatch`.

        Args:
            bounds: the step is packed, and the host knows only these numbers of rows.
        """
        q_lens = [count for _, _, count in parts]
        rows = torch.tensor([request for request, _, _ in parts], device=self.device)
        lens = [before + count for _, before, count in parts]
        starts = torch.tensor(list(accumulate(q_lens, initial=0)), device=self.device)
        tokens = torch.zeros(sum(q_lens), dtype=torch.int64, device=self.device)
        self.backend.plan(
            ForwardBatch(
                input_ids=tokens,
                positions=tokens,
                slots=tokens,
                rows=rows,
                q_lens=list(bounds) or q_lens,
                kv_lens=torch.tensor(lens, device=self.device),
                kv_len_upper_bounds=[self.max_len] * len(parts),
                graph_key=key,
                q_starts=starts if bounds else None,
            )
        )
        q = torch.cat([self.q[each, start : start + count] for each, start, count in parts])
        out: torch.Tensor = self.backend.forward(0, q)
        return out

    def alone(self, request: int, position: int) -> torch.Tensor:
        """[1, num_heads * head_dim] of a row in a step of its own."""
        key = request, position
        if key not in self._alone:
            self._alone[key] = self.attend([(request, position, 1)])
        return self._alone[key]

    def num_different(
        self, parts: Sequence[Part], key: GraphKey | None = None, bounds: Sequence[int] = ()
    ) -> int:
        """Counts rows of a step that differ from the same rows alone; of each request that feeds
        more than a few, some are compared."""
        found, out, start = 0, self.attend(parts, key, bounds), 0
        for request, before, count in parts:
            step = max(1, count // 6)
            for index in {*range(0, count, step), count - 1} if count else ():
                row = out[start + index : start + index + 1]
                assert row.isfinite().all(), "A part was read that no program has written."
                found += num_different(row, self.alone(request, before + index))
            start += count
        return found


def steps(
    attended: Attended, num_requests: int, few: int, seed: int
) -> Iterator[tuple[str, list[Part], GraphKey | None, list[int]]]:
    """Random steps, in graphs and without, packed and not.

    Args:
        few: rows of a request that looks ahead, at most.
    """
    chooser = random.Random(seed)
    most = attended.max_len

    def part(request: int, count: int) -> Part:
        return request, chooser.randint(0, most - count), count

    every = list(range(num_requests))
    for count in sorted({1, num_requests // 2, num_requests}):
        requests = chooser.sample(every, count)
        decodes = [part(request, 1) for request in requests]
        yield f"decodes {decodes}", decodes, None, []
        yield f"a graph of {decodes}", decodes, GraphKey(DECODE, count, 1, count), []
        width = chooser.randint(2, few)
        same = [part(request, width) for request in requests]
        yield f"uniform rows {same}", same, None, []
        rows = [part(request, chooser.randint(1, few)) for request in requests]
        yield f"rows {rows}", rows, None, []
        key = GraphKey(RAGGED, count + 1, few, count * few + 3)
        yield f"a graph of {rows}", rows, key, []
        fed = [part(request, chooser.randint(0, few)) for request in requests]
        yield f"a packed graph of {fed}", fed, key, [few] * count
        lengths = [chooser.choice((1, few, few + 1, most // 3, most)) for _ in requests]
        prompts = [part(request, count) for request, count in zip(requests, lengths, strict=True)]
        yield f"prompts {prompts}", prompts, None, []
        key = GraphKey(MIXED, count + 1, few, sum(lengths) + 5)
        yield f"a graph of prompts {prompts}", prompts, key, []


def attention_differences(
    attended: Attended, num_requests: int, few: int, seeds: Sequence[int]
) -> str:
    """Names a step with rows that differ; nothing where there is none."""
    for seed in seeds:
        for name, parts, key, bounds in steps(attended, num_requests, few, seed):
            if count := attended.num_different(parts, key, bounds):
                return f"{count} rows differ in {name}"
    return ""


# ---------------------------------------------------------------- in the interpreter

SMALL = {
    "a product": product(96, 96),
    "a product of odd sizes, with a bias": product(70, 41, has_bias=True),
    "a gated product": gated(48, 64),
    "a gated product with a bias": gated(37, 40, has_bias=True),
    "a norm": norm(48),
    "an activation": activation(40),
    "experts": experts(4, 2, 32, 32),
}
SMALL_COUNTS = (1, 2, 16, 17, 33, 65, 70)
SMALL_ATTENTION: dict[str, int | None] = {"attention": None, "attention in a window": 30}
DEFAULT_BACKEND, PARTS = "attention by default", "parts of positions"


@triton.jit
def _find_parts(parts_ptr, starts_ptr, ends_ptr, FIRST_LEN: tl.constexpr, SIZE: tl.constexpr):
    position = tl.arange(0, SIZE)
    part = part_of(position, FIRST_LEN)
    tl.store(parts_ptr + position, part)
    tl.store(starts_ptr + position, part_start(part, FIRST_LEN))
    tl.store(ends_ptr + position, part_start(part + 1, FIRST_LEN))


def wrong_parts(device: str) -> int:
    """Counts positions whose part on the device is another than the host counts, or is not where
    they lie."""
    size, first_len = 1 << 13, 16
    parts, starts, ends = torch.zeros(3, size, dtype=torch.int32, device=device)
    _find_parts[(1,)](parts, starts, ends, FIRST_LEN=first_len, SIZE=size)
    position = torch.arange(size, device=device)
    counted = [num_parts(length, first_len) - 1 for length in range(1, size + 1)]
    is_right = (parts.cpu() == torch.tensor(counted)).to(device)
    return int((~(is_right & (starts <= position) & (position < ends))).sum())


def main(_: str) -> None:
    """Prints the results of all cases."""
    torch.set_num_threads(1)
    for name, operation in asked(SMALL).items():
        found = different_rows(operation, "cpu", torch.float32, SMALL_COUNTS)
        print(json.dumps([name, float(found)]), flush=True)
    backends = dict.fromkeys(SMALL_ATTENTION, ROW_INDEPENDENT) | {DEFAULT_BACKEND: "triton"}
    for name, backend in asked(backends).items():
        window = SMALL_ATTENTION.get(name)
        attended = Attended("cpu", torch.float32, 3, 60, window=window, backend=backend)
        print(json.dumps([name, attention_differences(attended, 3, 8, (0,))]), flush=True)
    print(json.dumps([PARTS, float(wrong_parts("cpu"))]), flush=True)


def dot(a: Any, b: Any, matmul: Any = np.matmul, **options: Any) -> Any:
    """Stands for `numpy.matmul`: computes each row of a alone. What a CPU's library computes of all
    together may depend on a row's place, unlike a GPU's instructions."""
    return matmul(a[..., :, None, :], b[..., None, :, :], **options)[..., 0, :]


if __name__ == "__main__":
    with mock.patch.object(np, "matmul", dot):  # by which the interpreter computes `tl.dot`
        main(sys.argv[1])
