"""Every attention backend against softmax attention written out per request, in float64.

A new backend joins by its entry in the registry; what it cannot do on the device at hand
(`AttentionCapabilities.problems`) is skipped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.registry import ATTENTION_BACKENDS

torch.set_num_threads(1)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
TARGETS = [(name, device) for name in ATTENTION_BACKENDS.names for device in DEVICES]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

# (tokens with KV before the step, tokens fed) of each request
Shape = Sequence[tuple[int, int]]
SHAPES: dict[str, Shape] = {
    "one token in all": [(0, 1)],
    "one prompt": [(0, 19)],
    "prompts of one length": [(0, 7)] * 3,
    "ragged prompts": [(0, 5), (0, 17), (0, 1)],
    "one decode": [(33, 1)],
    "decodes": [(1, 1), (40, 1), (7, 1), (15, 1)],
    "decodes of one length": [(12, 1)] * 5,
    "page edges": [(15, 1), (16, 1), (17, 1), (14, 2), (15, 2), (0, 16), (16, 16), (0, 15)],
    "uniform look-ahead": [(5, 3), (30, 3), (16, 3)],
    "mixed look-ahead": [(5, 7), (30, 1), (2, 3), (9, 7), (0, 1), (61, 2)],
    "chunks beside decodes": [(16, 24), (9, 1), (0, 10), (50, 1), (3, 24)],
    "128 decodes": [(index * 7 % 60, 1) for index in range(128)],
    "128 of any kind": [(index * 11 % 50, 1 + index % 5) for index in range(128)],
}


@dataclass(kw_only=True)
class Case:
    """A backend, its memory full of poison, and requests with random KV at random pages."""

    target: tuple[str, str] = ("torch_native", "cpu")
    shape: Shape
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    page_size: int = 1
    bound_slack: int = 0
    seed: int = 0
    prefixes: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        name, device = self.target
        backend = ATTENTION_BACKENDS.load(name)
        if problems := backend.capabilities().problems(device, self.dtype, self.page_size):
            pytest.skip(f"{name} {'; '.join(problems)}")
        self.generator = torch.Generator().manual_seed(self.seed)
        self._place_requests(device)
        self.backend: AttentionBackend = backend(self.table, self.pool)
        self.q_lens = [q_len for _, q_len in self.shape]
        num_tokens = sum(self.q_lens)
        self.q = self._random(num_tokens, self.num_heads)
        self.k = self._random(num_tokens, self.num_kv_heads)
        self.v = self._random(num_tokens, self.num_kv_heads)

    def _random(self, count: int, heads: int) -> torch.Tensor:
        values = torch.randn(count, heads, self.head_dim, generator=self.generator)
        return values.to(self.dtype)

    def _place_requests(self, device: str) -> None:
        """Pages in random order with strange ones between; unused memory and table entries are
        poison, but for the dummy page."""
        size = self.page_size
        lens = [before + q_len for before, q_len in self.shape]
        page_counts = [-(-length // size) for length in lens]
        num_pages = sum(page_counts) + 9
        pages = list(range(1, num_pages + 1))
        random.Random(self.seed).shuffle(pages)
        width = max(lens) + self.bound_slack + 8
        num_rows = len(self.shape) + 3
        self.table = ReqToTokenPool(num_rows, width, device)
        strange = pages.pop() * size
        self.table.req_to_token.fill_(strange)
        self.pool = MHATokenToKVPool(
            num_pages * size, size, 2, self.num_kv_heads, self.head_dim, self.dtype, device
        )
        for memory in (*self.pool.k, *self.pool.v):
            memory[size:] = float("nan")
        self.rows = random.Random(self.seed + 1).sample(range(num_rows), len(self.shape))
        self.slots: list[list[int]] = []
        for row, (before, _), length, count in zip(
            self.rows, self.shape, lens, page_counts, strict=True
        ):
            own = [pages.pop() for _ in range(count)]
            slots = [page * size + offset for page in own for offset in range(size)][:length]
            self.table.write([row] * length, list(range(length)), slots)
            self.slots.append(slots)
            keys = self._random(before, self.num_kv_heads)
            values = self._random(before, self.num_kv_heads)
            self.prefixes.append((keys, values))
            self.pool.k[1][slots[:before]] = keys.to(device)
            self.pool.v[1][slots[:before]] = values.to(device)

    def batch(self, chosen: Sequence[int] | None = None) -> ForwardBatch:
        """The step of some requests, or of all."""
        chosen = range(len(self.shape)) if chosen is None else chosen
        device = self.target[1]
        positions, slots, kv_lens, bounds = [], [], [], []
        for index in chosen:
            before, q_len = self.shape[index]
            positions += range(before, before + q_len)
            slots += self.slots[index][before:]
            kv_lens.append(before + q_len)
            bounds.append(before + q_len + index % 3 * self.bound_slack // 2)
        return ForwardBatch(
            input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
            positions=torch.tensor(positions, device=device),
            slots=torch.tensor(slots, device=device),
            rows=torch.tensor([self.rows[index] for index in chosen], device=device),
            q_lens=[self.shape[index][1] for index in chosen],
            kv_lens=torch.tensor(kv_lens, device=device),
            kv_len_upper_bounds=bounds,
            logits_index=None,
        )

    def tokens_of(self, chosen: Sequence[int]) -> list[int]:
        """Indices among the T tokens of all requests."""
        starts = [sum(self.q_lens[:index]) for index in range(len(self.shape))]
        return [starts[index] + offset for index in chosen for offset in range(self.q_lens[index])]

    def run(self, chosen: Sequence[int] | None = None) -> torch.Tensor:
        device = self.target[1]
        tokens = self.tokens_of(range(len(self.shape)) if chosen is None else chosen)
        self.backend.plan(self.batch(chosen))
        q, k, v = (rows[tokens].to(device) for rows in (self.q, self.k, self.v))
        return self.backend.forward(1, q, k, v).cpu().clone()

    def expected(self) -> torch.Tensor:
        """[T, num_heads * head_dim] float64."""
        share = self.num_heads // self.num_kv_heads
        rows, start = [], 0
        for (before, q_len), (keys, values) in zip(self.shape, self.prefixes, strict=True):
            k = torch.cat((keys, self.k[start : start + q_len])).double()
            v = torch.cat((values, self.v[start : start + q_len])).double()
            for offset in range(q_len):
                seen = before + offset + 1
                heads = []
                for head in range(self.num_heads):
                    query = self.q[start + offset, head].double()
                    scores = k[:seen, head // share] @ query / self.head_dim**0.5
                    weights = torch.exp(scores - scores.max())
                    heads.append(weights / weights.sum() @ v[:seen, head // share])
                rows.append(torch.cat(heads))
            start += q_len
        return torch.stack(rows)

    def check(self) -> None:
        out = self.run()
        assert out.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.double(), self.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_any_ragged_batch_equals_softmax_attention_per_request(
    target: tuple[str, str], shape: Shape, page_size: int
) -> None:
    Case(target=target, shape=shape, page_size=page_size).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_every_head_layout_and_type(
    target: tuple[str, str], heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads = heads
    Case(
        target=target,
        shape=SHAPES["mixed look-ahead"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        page_size=16,
    ).check()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_random_ragged_batches(target: tuple[str, str], seed: int) -> None:
    chooser = random.Random(seed)
    shape = [
        (chooser.choice([0, chooser.randint(1, 70)]), chooser.choice([1, 1, 2, 3, 7, 16]))
        for _ in range(chooser.randint(1, 12))
    ]
    Case(
        target=target, shape=shape, page_size=chooser.choice([1, 16]), bound_slack=5, seed=seed
    ).check()


@pytest.mark.parametrize("name", ["decodes", "uniform look-ahead", "mixed look-ahead"])
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_loose_upper_bounds_of_lengths_change_nothing(target: tuple[str, str], name: str) -> None:
    exact = Case(target=target, shape=SHAPES[name]).run()
    loose = Case(target=target, shape=SHAPES[name], bound_slack=20)
    torch.testing.assert_close(loose.run(), exact, rtol=1e-6, atol=1e-6)
    loose.check()


@pytest.mark.parametrize("limit", [1, 50, 400])
@pytest.mark.parametrize("name", ["decodes", "chunks beside decodes", "128 of any kind"])
def test_groups_split_for_memory_change_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(torch_native_backend, "MAX_MASK_ENTRIES", limit)
    Case(shape=SHAPES[name]).check()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_a_step_writes_the_slots_of_its_own_tokens_and_no_other(
    target: tuple[str, str], page_size: int
) -> None:
    case = Case(target=target, shape=SHAPES["mixed look-ahead"], page_size=page_size)
    before = [memory.clone() for memory in (*case.pool.k, *case.pool.v)]
    case.run()
    slots = case.batch().slots
    k_0, k_1, v_0, v_1 = before
    k_1[slots], v_1[slots] = case.k.to(k_1), case.v.to(v_1)
    for memory, expected in zip((*case.pool.k, *case.pool.v), (k_0, k_1, v_0, v_1), strict=True):
        torch.testing.assert_close(memory, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_rows_after_a_token_cannot_change_it(target: tuple[str, str]) -> None:
    """Look-ahead rows come last, so the pending rows before them stay what they were."""
    shape = [(9, 4), (20, 4)]
    plain = Case(target=target, shape=shape).run()
    other = Case(target=target, shape=shape)
    for end in (4, 8):
        for rows in (other.q, other.k, other.v):
            rows[end - 2 : end] = 30.0
    changed = other.run()
    for start in (0, 4):
        torch.testing.assert_close(changed[start : start + 2], plain[start : start + 2])
        assert not torch.allclose(changed[start + 2], plain[start + 2])


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_a_backend_takes_batches_of_any_shape_one_after_the_other(
    target: tuple[str, str],
) -> None:
    """Nothing of a step stays for the next one."""
    case = Case(target=target, shape=SHAPES["128 of any kind"], page_size=16)
    expected = case.expected()
    for chosen in (range(128), [77], range(9, 20), [5, 55], range(100), range(128)):
        out = case.run(chosen).double()
        torch.testing.assert_close(out, expected[case.tokens_of(chosen)], rtol=2e-5, atol=2e-5)
