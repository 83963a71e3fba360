"""The conformance table of attention backends, and what compares one with `TorchNativeBackend`.

As a program it runs the float32 table on a CPU and prints a line of JSON per case; a backend of
Triton kernels then needs TRITON_INTERPRET=1 in its environment, set before Triton is imported:

    export PYTHONPATH=python:sgl-kernel/python:test
    TRITON_INTERPRET=1 python test/attention_cases.py triton
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.registry import ATTENTION_BACKENDS

# Of outputs of inputs with variance 1, against float32: the output's own rounding and, for the
# 16-bit types, that of the softmax weights.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """A step of requests at random pages.

    Attributes:
        shape: (tokens with KV before the step, tokens fed) of each request.
        windows: sliding window of each layer.
        bound_slack: the host's bounds of lengths are looser by up to this.
        is_sliced: q is a slice of a tensor of more heads.
    """

    shape: Sequence[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    bound_slack: int = 0
    is_sliced: bool = False


MIXED = ((5, 7), (30, 1), (0, 3), (9, 23), (0, 1), (61, 2))

CASES = {
    "one token in all": AttentionCase(shape=[(0, 1)]),
    "one prompt": AttentionCase(shape=[(0, 35)]),
    "prompts, empty prefix": AttentionCase(shape=[(0, 5), (0, 17), (0, 1), (0, 16)]),
    "page edges, pages of 16": AttentionCase(
        shape=[(15, 1), (16, 1), (17, 1), (14, 2), (15, 2), (0, 16), (16, 16), (0, 15)]
    ),
    "page edges, pages of 1": AttentionCase(
        shape=[(15, 1), (16, 1), (17, 1), (14, 2), (15, 2), (0, 16), (16, 16)], page_size=1
    ),
    "one decode, its KV in splits": AttentionCase(shape=[(150, 1)]),
    "a decode of one split and a longer one": AttentionCase(shape=[(140, 1), (0, 1)]),
    "decodes": AttentionCase(shape=[(1, 1), (40, 1), (7, 1), (15, 1)]),
    "many decodes": AttentionCase(shape=[(i * 7 % 40, 1) for i in range(12)], head_dim=16),
    "uniform q = 3": AttentionCase(shape=[(5, 3), (30, 3), (16, 3)]),
    "uniform q = 7": AttentionCase(shape=[(5, 7), (40, 7)]),
    "uniform q = 15": AttentionCase(shape=[(33, 15), (2, 15)]),
    "prompts beside decodes": AttentionCase(shape=[(16, 24), (9, 1), (0, 10), (50, 1), (3, 24)]),
    "loose bounds": AttentionCase(shape=MIXED, bound_slack=70),
    "slices": AttentionCase(shape=MIXED, is_sliced=True),
    "three query heads per KV head": AttentionCase(shape=MIXED, num_heads=6),
    "heads of 80": AttentionCase(shape=MIXED[:3], head_dim=80),
    "a window of 1": AttentionCase(shape=MIXED, windows=(1,), head_dim=16),
    "a window of 16": AttentionCase(shape=MIXED, windows=(16,), head_dim=16),
    "a window per layer": AttentionCase(shape=MIXED, windows=(None, 20, 5), head_dim=16),
    "a window and a long decode": AttentionCase(shape=[(150, 1), (120, 2)], windows=(70,)),
} | {
    f"GQA {num_heads}:{num_kv_heads}, head_dim {head_dim}, pages of {page_size}": AttentionCase(
        shape=MIXED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
    )
    for num_heads, num_kv_heads in ((4, 1), (4, 2), (2, 2))
    for head_dim, page_size in ((64, 16), (128, 1))
}


class PlacedCase:
    """The memory of a case and its inputs, all on a device; unused memory is NaN.

    Attributes:
        batch: the step.
        pool: what the backend under test reads and writes.
        q: per layer [T, num_heads, head_dim].
    """

    def __init__(self, case: AttentionCase, device: str, dtype: torch.dtype, seed: int) -> None:
        self.case, self.device = case, device
        self._generator = torch.Generator().manual_seed(seed)
        self._random = random.Random(seed)
        lens = [before + q_len for before, q_len in case.shape]
        num_pages = sum(-(-length // case.page_size) for length in lens) + 3
        num_rows = len(lens) + 2
        self.table = ReqToTokenPool(num_rows, max(lens) + case.bound_slack + 3, device)
        self.rows = self._random.sample(range(num_rows), len(lens))
        self.pool = self._make_pool(num_pages, dtype)
        self._place(lens, num_pages)
        num_tokens = sum(q_len for _, q_len in case.shape)
        self.q = []
        for _ in case.windows:
            values = self._values(num_tokens, case.num_heads + 2).to(device, dtype)[:, 1:-1]
            self.q.append(values if case.is_sliced else values.contiguous())

    def _make_pool(self, num_pages: int, dtype: torch.dtype) -> MHATokenToKVPool:
        case, size = self.case, self.case.page_size
        return MHATokenToKVPool(
            num_pages * size,
            size,
            len(case.windows),
            case.num_kv_heads,
            case.head_dim,
            dtype,
            self.device,
        )

    def _values(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, self.case.head_dim, generator=self._generator)

    def _place(self, lens: list[int], num_pages: int) -> None:
        """Gives each request random pages, and KV to its tokens from before the step."""
        size = self.case.page_size
        pages = list(range(1, num_pages + 1))
        self._random.shuffle(pages)
        self.table.req_to_token.fill_(pages.pop() * size)
        for kv in self.pool.kv:
            kv[size:] = float("nan")
        fed_slots: list[int] = []
        positions: list[int] = []
        for row, length, (before, _) in zip(self.rows, lens, self.case.shape, strict=True):
            own = [pages.pop() for _ in range(-(-length // size))]
            slots = [page * size + offset for page in own for offset in range(size)][:length]
            self.table.write([row] * length, list(range(length)), slots)
            for kv in self.pool.kv:
                kv[slots] = self._values(length, kv.shape[1]).to(kv)
            fed_slots += slots[before:]
            positions += range(before, length)
        on_device = {"dtype": torch.int64, "device": self.device}
        slack = self.case.bound_slack
        self.batch = ForwardBatch(
            input_ids=torch.zeros(len(positions), dtype=torch.int64, device=self.device),
            positions=torch.tensor(positions, **on_device),
            slots=torch.tensor(fed_slots, **on_device),
            rows=torch.tensor(self.rows, **on_device),
            q_lens=[q_len for _, q_len in self.case.shape],
            kv_lens=torch.tensor(lens, **on_device),
            kv_len_upper_bounds=[length + self._random.randint(0, slack) for length in lens],
        )

    def expected(self) -> list[torch.Tensor]:
        """Per layer [T, num_heads * head_dim] float32: the oracle's, of the same values, in a pool
        of its own."""
        num_pages = self.pool.kv[0].shape[0] // self.case.page_size - 1
        pool = self._make_pool(num_pages, torch.float32)
        for wide, kv in zip(pool.kv, self.pool.kv, strict=True):
            wide.copy_(kv)
        oracle = TorchNativeBackend(self.table, pool, self.case.num_heads, self.case.windows)
        oracle.plan(self.batch)
        return [oracle.forward(layer, q.float()) for layer, q in enumerate(self.q)]

    def backend(self, name: str) -> AttentionBackend:
        """A backend over this memory."""
        make = ATTENTION_BACKENDS.load(name)
        backend: AttentionBackend = make(
            self.table, self.pool, self.case.num_heads, self.case.windows
        )
        return backend


def max_error(
    name: str, case: AttentionCase, device: str, dtype: torch.dtype, seed: int = 0
) -> float:
    """The largest difference of backend `name` from the oracle, over all layers.

    Raises:
        AssertionError: if the shape or dtype of its output is wrong.
    """
    placed = PlacedCase(case, device, dtype, seed)
    expected = placed.expected()
    backend = placed.backend(name)
    backend.plan(placed.batch)
    worst = 0.0
    for layer, right in enumerate(expected):
        out = backend.forward(layer, placed.q[layer])
        assert out.shape == right.shape, (out.shape, right.shape)
        assert out.dtype == dtype, out.dtype
        difference = (out.float() - right).abs().max().item()
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def with_requests(case: AttentionCase, count: int) -> AttentionCase:
    """The case with its requests repeated until there are `count`."""
    shape = [case.shape[index % len(case.shape)] for index in range(count)]
    return replace(case, shape=shape)


def main(name: str) -> None:
    torch.set_num_threads(1)
    problems = ATTENTION_BACKENDS.load(name).capabilities().problems("cpu", torch.float32, 16)
    if problems:
        sys.exit(f"{name} {'; '.join(problems)}")
    for case_name, case in CASES.items():
        error: float | str
        try:
            error = max_error(name, case, "cpu", torch.float32)
        except AssertionError as failure:
            error = str(failure) or "an assertion failed"
        print(json.dumps([case_name, error]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
