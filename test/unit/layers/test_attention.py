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
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.mem_cache.allocator import PageAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.registry import ATTENTION_BACKENDS

torch.set_num_threads(1)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
TARGETS = [
    (name, device)
    for name in ATTENTION_BACKENDS.names
    for device in DEVICES
    if device in ATTENTION_BACKENDS.load(name).capabilities().devices
]
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


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Causal attention of one request, whose last rows are queried, written out head by head.

    Args:
        q: [q_len, num_heads, head_dim].
        k, v: [kv_len, num_kv_heads, head_dim].

    Returns:
        [q_len, num_heads * head_dim] float64.
    """
    q_len, num_heads, head_dim = q.shape
    share = num_heads // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    for row in range(q_len):
        end = len(k) - q_len + row + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        for head in range(num_heads):
            scores = k[seen, head // share] @ q[row, head] / head_dim**0.5
            weights = torch.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ v[seen, head // share]
    return out.flatten(1)


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
    windows: tuple[int | None, int | None] = (None, None)
    prefixes: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        name, device = self.target
        backend = ATTENTION_BACKENDS.load(name)
        if problems := backend.capabilities().problems(device, self.dtype, self.page_size):
            pytest.skip(f"{name} {'; '.join(problems)}")
        self.generator = torch.Generator().manual_seed(self.seed)
        self._place_requests(device)
        self.backend: AttentionBackend = backend(
            self.table, self.pool, self.num_heads, self.windows
        )
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
            self.table.write([[row] * length, list(range(length)), slots])
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
        positions: list[int] = []
        slots: list[int] = []
        kv_lens, bounds = [], []
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
        )

    def tokens_of(self, chosen: Sequence[int]) -> list[int]:
        """Indices among the T tokens of all requests."""
        starts = [sum(self.q_lens[:index]) for index in range(len(self.shape))]
        return [starts[index] + offset for index in chosen for offset in range(self.q_lens[index])]

    def run(self, chosen: Sequence[int] | None = None) -> torch.Tensor:
        device = self.target[1]
        tokens = self.tokens_of(range(len(self.shape)) if chosen is None else chosen)
        batch = self.batch(chosen)
        self.backend.plan(batch)
        q, k, v = (rows[tokens].to(device) for rows in (self.q, self.k, self.v))
        self.pool.k[1][batch.slots], self.pool.v[1][batch.slots] = k, v
        return self.backend.forward(1, q).cpu().clone()

    def expected(self) -> torch.Tensor:
        """[T, num_heads * head_dim] float64."""
        rows, start = [], 0
        for (_, q_len), (keys, values) in zip(self.shape, self.prefixes, strict=True):
            new = slice(start, start + q_len)
            k, v = torch.cat((keys, self.k[new])), torch.cat((values, self.v[new]))
            rows.append(softmax_attention(self.q[new], k, v, self.windows[1]))
            start += q_len
        return torch.cat(rows)

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


@pytest.mark.parametrize("limit", [1, 50, 400])
@pytest.mark.parametrize("name", ["128 of any kind", "128 decodes"])
def test_masks_stay_within_the_memory_limit_or_serve_one_request(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    case = Case(shape=SHAPES[name])
    masks: list[torch.Size] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        masks.append(attn_mask.shape)
        return attend(q, k, v, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(torch_native_backend, "MAX_MASK_ENTRIES", limit)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    case.run()
    assert sum(shape[0] for shape in masks) == 128
    share = case.num_heads // case.num_kv_heads
    assert all(shape[0] == 1 or shape.numel() <= limit * share for shape in masks)


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


NUM_LAYERS, NUM_ROWS, WIDTH = 2, 4, 400


@dataclass(eq=False)
class Running:
    """A request: its row, its pages, and K and V of its kept tokens, per layer."""

    row: int
    pages: list[int]
    kv: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def length(self) -> int:
        return len(self.kv[0][0])


class Steps:
    """A seeded sequence of steps of one backend: requests come (some with a cached prefix), feed,
    keep a part of what they fed, and go; pages and rows are used again at once."""

    def __init__(
        self,
        target: tuple[str, str],
        page_size: int,
        seed: int,
        windows: tuple[int | None, ...] = (None,) * NUM_LAYERS,
    ) -> None:
        name, self.device = target
        self.windows = windows
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.page_size = page_size
        self.bound_slacks = [0, 0, 6]
        backend = ATTENTION_BACKENDS.load(name)
        if problems := backend.capabilities().problems(self.device, torch.float32, page_size):
            pytest.skip(f"{name} {'; '.join(problems)}")
        self.table = ReqToTokenPool(NUM_ROWS, WIDTH, self.device)
        num_pages = (NUM_ROWS + 1) * -(-WIDTH // page_size)
        self.pool = MHATokenToKVPool(
            num_pages * page_size, page_size, NUM_LAYERS, 2, 16, torch.float32, self.device
        )
        self.backend: AttentionBackend = backend(self.table, self.pool, 4, self.windows)
        self.allocator = PageAllocator(num_pages, page_size)
        self.free_rows = list(range(NUM_ROWS))
        self.running: list[Running] = []
        self.cached = Running(-1, [], self.kv(0))

    def kv(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(self.values(count, 2), self.values(count, 2)) for _ in range(NUM_LAYERS)]

    def values(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, 16, generator=self.generator)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if not self.running or (self.free_rows and self.random.random() < 0.1):
                self.start()
            elif self.random.random() < 0.07 or max(r.length for r in self.running) > WIDTH - 40:
                self.end()
            if self.running:
                self.step(*self.any_batch())

    def start(self) -> None:
        """A newcomer with the first pages of the request that ended last, or with none."""
        num_pages = self.random.choice([0, len(self.cached.pages)])
        length = num_pages * self.page_size
        kv = [(keys[:length], values[:length]) for keys, values in self.cached.kv]
        request = Running(self.free_rows.pop(), [], kv)
        self.give_pages(request, self.cached.pages[:num_pages])
        self.running.insert(self.random.randint(0, len(self.running)), request)

    def end(self) -> None:
        """Keeps full pages as the cached ones if nobody uses those, frees the rest."""
        request = self.running.pop(self.random.randrange(len(self.running)))
        self.free_rows.append(request.row)
        in_use = {page for other in self.running for page in other.pages}
        shared = [page for page in request.pages if page in self.cached.pages]
        if in_use.isdisjoint(self.cached.pages) and self.random.random() < 0.5:
            self.allocator.free(page for page in self.cached.pages if page not in shared)
            num_kept = request.length // self.page_size
            self.cached = Running(-1, request.pages[:num_kept], request.kv)
            self.allocator.free(reversed(request.pages[num_kept:]))
        else:
            self.allocator.free(page for page in reversed(request.pages) if page not in shared)

    def give_pages(self, request: Running, pages: list[int]) -> None:
        size = self.page_size
        first = len(request.pages) * size
        slots = [page * size + offset for page in pages for offset in range(size)]
        columns = list(range(first, first + len(slots)))
        self.table.write([[request.row] * len(slots), columns, slots])
        request.pages.extend(pages)

    def any_batch(self) -> tuple[list[Running], list[int]]:
        """Most often all requests, at one token or width each."""
        batch = self.running
        if self.random.random() < 0.1:
            batch = self.random.sample(batch, self.random.randint(1, len(batch)))
        width = self.random.choice([1, 1, 1, 3, 7])
        q_lens = [width] * len(batch)
        if self.random.random() < 0.2:
            q_lens = [self.random.choice([1, 2, 20]) for _ in batch]
        return batch, q_lens

    def step(self, batch: list[Running], q_lens: list[int]) -> None:
        """Feeds new tokens, and keeps some of each request's."""
        fed = [self.kv(q_len) for q_len in q_lens]
        for request, q_len in zip(batch, q_lens, strict=True):
            num_new = -(-(request.length + q_len) // self.page_size) - len(request.pages)
            pages = self.allocator.allocate(max(0, num_new))
            assert pages is not None
            self.give_pages(request, pages)
        self.forward(batch, q_lens, fed)
        for request, q_len, new in zip(batch, q_lens, fed, strict=True):
            num_kept = self.random.randint(1, q_len)
            request.kv = [
                (torch.cat((keys, k[:num_kept])), torch.cat((values, v[:num_kept])))
                for (keys, values), (k, v) in zip(request.kv, new, strict=True)
            ]

    def forward(
        self,
        batch: list[Running],
        q_lens: list[int],
        fed: list[list[tuple[torch.Tensor, torch.Tensor]]],
    ) -> None:
        """One step through all layers, each compared."""
        positions = [
            request.length + offset
            for request, q_len in zip(batch, q_lens, strict=True)
            for offset in range(q_len)
        ]
        rows = [r.row for r, q_len in zip(batch, q_lens, strict=True) for _ in range(q_len)]
        kv_lens = [request.length + q_len for request, q_len in zip(batch, q_lens, strict=True)]
        slack = self.random.choice(self.bound_slacks)
        slots = self.table.req_to_token[rows, positions].long()
        self.backend.plan(
            ForwardBatch(
                input_ids=torch.zeros(len(positions), dtype=torch.int64, device=self.device),
                positions=torch.tensor(positions, device=self.device),
                slots=slots,
                rows=torch.tensor([request.row for request in batch], device=self.device),
                q_lens=q_lens,
                kv_lens=torch.tensor(kv_lens, device=self.device),
                kv_len_upper_bounds=[length + slack for length in kv_lens],
            )
        )
        for layer in range(NUM_LAYERS):
            q = self.values(len(positions), 4)
            k, v = (torch.cat([new[layer][part] for new in fed]) for part in (0, 1))
            device = self.device
            self.pool.k[layer][slots], self.pool.v[layer][slots] = k.to(device), v.to(device)
            out = self.backend.forward(layer, q.to(device)).cpu()
            parts = zip(batch, q.split(q_lens), fed, strict=True)
            expected = []
            for request, rows_q, new in parts:
                keys, values = map(torch.cat, zip(request.kv[layer], new[layer]))
                expected.append(softmax_attention(rows_q, keys, values, self.windows[layer]))
            torch.testing.assert_close(out.double(), torch.cat(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.long_matrix
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_steps_of_changing_batches_see_exactly_the_kept_tokens(
    target: tuple[str, str], page_size: int, seed: int
) -> None:
    """Whatever a backend keeps between steps."""
    Steps(target, page_size, seed).run(60)


@pytest.mark.parametrize("windows", [(5, None), (None, 20), (1, 40), (7, 7)], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_steps_of_changing_batches_with_a_window_per_layer(
    target: tuple[str, str], windows: tuple[int | None, ...]
) -> None:
    Steps(target, page_size=4, seed=1, windows=windows).run(60)


@pytest.mark.long_matrix
@pytest.mark.parametrize("window", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_a_sliding_window_hides_what_lies_before_it(
    target: tuple[str, str], shape: Shape, window: int
) -> None:
    Case(target=target, shape=shape, windows=(None, window), bound_slack=5).check()


@pytest.mark.parametrize("limit", [1, 50, 400])
def test_windows_in_groups_split_for_memory(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(torch_native_backend, "MAX_MASK_ENTRIES", limit)
    Case(shape=SHAPES["128 of any kind"], windows=(None, 9)).check()


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_a_window_as_long_as_the_sequence_is_full_attention(target: tuple[str, str]) -> None:
    full = Case(target=target, shape=[(9, 11)]).run()
    assert torch.equal(Case(target=target, shape=[(9, 11)], windows=(3, 20)).run(), full)
    assert not torch.allclose(Case(target=target, shape=[(9, 11)], windows=(3, 19)).run(), full)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_a_long_decode_of_one_batch_sees_all_its_tokens(target: tuple[str, str]) -> None:
    """Hundreds of steps, past any spare room that a backend may keep for an unchanged batch."""
    steps = Steps(target, page_size=16, seed=0)
    steps.bound_slacks = [0]
    for prompt_len in (5, 33, 1):
        steps.start()
        steps.step(steps.running, [1] * (len(steps.running) - 1) + [prompt_len])
    for _ in range(200):
        steps.step(steps.running, [1, 1, 1])
