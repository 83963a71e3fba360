"""The conformance tables of attention backends, and what compares one with `TorchNativeBackend`, or
where rows are trees, with attention over the keys that each row is written out to see.

As a program it runs the float32 tables on a CPU and prints a line of JSON per case; a backend of
Triton kernels then needs TRITON_INTERPRET=1 in its environment, set before Triton is imported:

    export PYTHONPATH=python:sgl-kernel/python:test
    TRITON_INTERPRET=1 python test/support/attention_cases.py triton
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from block_attention import BLOCKS, block_error
from draft_chain import draft_chain_error
from interpreted import asked
from sglang.srt.layers.attention.base_attn_backend import PLAIN, AttentionBackend, ScoreForm
from sglang.srt.layers.attention.torch_native_backend import TorchNativeBackend
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.layers.forward_options import MAX_TREE_ROWS
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
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
        trees: requests whose rows are a tree, or several, with parents drawn at random.
        graph_width: the step is planned as a graph's that has room for prompts beside requests of
            up to so many rows.
        graph_spare: requests and rows of padding in such a graph.
        grown: positions of KV from before the step that are part of a request's tree, at most.
        bounds: the step is packed, and the host knows only that each request feeds up to so many
            rows.
        padding: rows after the last one that is fed, in a packed step.
        kv_starts: of each request the first token whose KV is there, before the step; empty: all
            is there.
        scores: the form of the scores of all layers.
    """

    shape: Sequence[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    bound_slack: int = 0
    is_sliced: bool = False
    trees: tuple[int, ...] = ()
    graph_width: int | None = None
    graph_spare: tuple[int, int] = (2, 9)
    grown: int | None = None
    bounds: Sequence[int] | None = None
    padding: int = 0
    kv_starts: Sequence[int] = ()
    scores: ScoreForm = PLAIN


MIXED = ((5, 7), (30, 1), (0, 3), (9, 23), (0, 1), (61, 2))

# In the interpreter requests of up to 8 rows are narrow and others of up to 16 wide, with two query
# heads per KV head; with four they are of up to 4 and 8.
GROUPS = (
    (40, 1),
    (9, 12),
    (0, 30),
    (61, 2),
    (120, 15),
    (3, 1),
    (17, 8),
    (5, 9),
    (33, 16),
    (70, 17),
)
THREE_GROUPS = AttentionCase(shape=GROUPS[:5], head_dim=16)

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
    "a decode that fills one split and a longer one": AttentionCase(shape=[(140, 1), (15, 1)]),
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
    "a scale and a soft cap": AttentionCase(
        shape=MIXED, windows=(None, 20), head_dim=16, scores=ScoreForm(0.6, 2.0)
    ),
    "a soft cap, KV in splits": AttentionCase(
        shape=[(150, 1), (120, 15)], windows=(None, 70), scores=ScoreForm(softcap=1.5)
    ),
    "a prompt of many rows": AttentionCase(shape=[(19, 75), (30, 1)], head_dim=16),
    "a graph's few prompt rows over much KV, in splits": AttentionCase(
        shape=[(290, 20), (40, 1)],
        windows=(None, 150),
        head_dim=16,
        graph_width=2,
        kv_starts=[3, 0],
    ),
    "narrow, wide and many": THREE_GROUPS,
    "narrow and wide, both in splits": AttentionCase(shape=[(120, 15), (150, 1)]),
    "narrow and wide, one in splits": AttentionCase(
        shape=[(120, 15), *[(9, 1)] * 6, (99, 1), (0, 20)], head_dim=16
    ),
    "groups and their edges, a window per layer": AttentionCase(
        shape=GROUPS, windows=(None, 20), head_dim=16, bound_slack=70
    ),
    "groups, four query heads per KV head": AttentionCase(
        shape=GROUPS, num_kv_heads=1, head_dim=16
    ),
    "a graph of rows of 1 and prompts": AttentionCase(
        shape=[(40, 1), (0, 30), (150, 1), (3, 2)], head_dim=16, graph_width=1
    ),
    "a graph of narrow, wide and many": replace(THREE_GROUPS, graph_width=15),
    "a graph of wide and many alone": AttentionCase(
        shape=[(150, 15), (0, 30), (9, 9)], head_dim=16, graph_width=15
    ),
    "a graph of narrow and many alone": AttentionCase(
        shape=[(150, 1), (0, 30), (9, 8)], head_dim=16, graph_width=15
    ),
    "a graph as full as can be of wide items": AttentionCase(
        shape=[(i * 31 % 90, 9) for i in range(6)],
        head_dim=16,
        graph_width=15,
        graph_spare=(0, 0),
    ),
    "a graph that cuts wide requests": AttentionCase(
        shape=GROUPS[:7], num_kv_heads=1, head_dim=16, graph_width=15, windows=(None, 20)
    ),
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

WITH_TREES = ((9, 1), (15, 9), (33, 64), (40, 1), (0, 12), (4, 1), (17, 70))
TREE_CASES = {
    "one tree": AttentionCase(shape=[(0, 8)], trees=(0,)),
    "one tree, its KV in splits": AttentionCase(shape=[(150, 7)], trees=(0,)),
    "a tree in splits beside a prompt": AttentionCase(shape=[(150, 8), (0, 70)], trees=(0,)),
    "uniform trees": AttentionCase(shape=[(5, 7), (40, 7), (16, 7)], trees=(0, 1, 2)),
    "a soft cap and a tree": AttentionCase(
        shape=[(20, 8)], trees=(0,), head_dim=16, scores=ScoreForm(0.5, 1.0)
    ),
    "a window and a tree in splits": AttentionCase(shape=[(150, 8)], trees=(0,), windows=(70, 3)),
    "trees as a graph plans them": AttentionCase(
        shape=WITH_TREES, trees=(1, 2, 4, 5), head_dim=16, graph_width=12
    ),
    "trees, loose bounds": AttentionCase(
        shape=WITH_TREES[:3], trees=(1, 2), head_dim=16, bound_slack=70
    ),
    "trees, three query heads per KV head": AttentionCase(
        shape=WITH_TREES[:3], trees=(1, 2), num_heads=6, head_dim=16
    ),
} | {
    f"{name}, pages of {page_size}": AttentionCase(
        shape=shape, trees=trees, head_dim=16, page_size=page_size, windows=(None, 20)
    )
    for name, shape, trees in (
        ("trees of 1 to 16", ((0, 1), (5, 16), (40, 7), (31, 12), (16, 2)), (0, 1, 2, 3, 4)),
        ("trees of 17 to 64", ((0, 17), (15, 33), (0, 64)), (0, 1, 2)),
        ("trees beside decodes and a prompt", WITH_TREES, (1, 2, 4, 5)),
    )
    for page_size in ((1, 16) if len(shape) < len(WITH_TREES) else (16,))
}

# Trees that began in earlier steps, as those of a drafter that feeds a few rows at a time.
GROWN_CASES = {
    "two rows of a step onto earlier ones": AttentionCase(
        shape=[(20, 2), (9, 2), (40, 2)],
        trees=(0, 1, 2),
        grown=6,
        head_dim=16,
        windows=(2, 5),
    ),
    "an earlier tree in splits": AttentionCase(
        shape=[(99, 6)], trees=(0,), grown=30, windows=(None, 4), head_dim=16
    ),
    "trees as deep as can be": AttentionCase(
        shape=[(70, 2), (63, 1), (56, 8)], trees=(0, 1, 2), grown=56, head_dim=16, windows=(None, 3)
    ),
    "earlier trees beside a prompt and decodes": AttentionCase(
        shape=[(9, 56), (30, 4), (40, 1), (0, 3)],
        trees=(1, 3),
        grown=5,
        head_dim=16,
        page_size=1,
        windows=(None, 20),
    ),
    "earlier trees as a graph plans them": AttentionCase(
        shape=[(150, 4), (30, 4), (0, 20), (90, 12)],
        trees=(0, 1, 3),
        grown=9,
        head_dim=16,
        graph_width=12,
    ),
}

PACKED = ((0, 30), (5, 20), (40, 1), (9, 12), (120, 15), (3, 0), (17, 1), (33, 5), (8, 0))
PACKED_BOUNDS = (30, 20, 4, 15, 15, 9, 8, 33, 1)
PACKED_CASES = {
    "packed, bounds are exact": AttentionCase(
        shape=MIXED, bounds=[q_len for _, q_len in MIXED], head_dim=16
    ),
    "packed, all groups": AttentionCase(
        shape=PACKED, bounds=PACKED_BOUNDS, padding=7, head_dim=16, windows=(None, 20)
    ),
    "packed, pages of 1": AttentionCase(
        shape=PACKED[2:], bounds=PACKED_BOUNDS[2:], padding=1, head_dim=16, page_size=1
    ),
    "packed, bounds of one length": AttentionCase(
        shape=[(5, 3), (30, 0), (16, 7), (0, 1), (0, 0)], bounds=[7] * 5, padding=9, head_dim=16
    ),
    "packed, one request in splits": AttentionCase(
        shape=[(99, 2)], bounds=[7], padding=3, windows=(None, 50), head_dim=16
    ),
    "packed, splits beside one without rows": AttentionCase(
        shape=[(60, 0), (150, 5), (99, 1)], bounds=[1, 15, 15], padding=2, head_dim=16
    ),
    "packed, a graph of all groups": AttentionCase(
        shape=PACKED, bounds=PACKED_BOUNDS, padding=3, head_dim=16, graph_width=15
    ),
    "packed, more bounds than the graph has rows": AttentionCase(
        shape=[(i * 31 % 90, (1, 2, 0, 3)[i % 4]) for i in range(5)],
        bounds=[15] * 5,
        head_dim=16,
        graph_width=15,
        graph_spare=(1, 0),
    ),
    "packed, a graph that cuts requests": AttentionCase(
        shape=PACKED[2:5],
        bounds=PACKED_BOUNDS[2:5],
        num_kv_heads=1,
        head_dim=16,
        graph_width=15,
        windows=(None, 20),
    ),
    "packed, trees": AttentionCase(
        shape=[(0, 20), (15, 9), (33, 12), (40, 1), (4, 0)],
        bounds=[20, 12, 12, 12, 12],
        trees=(1, 2, 3),
        padding=4,
        head_dim=16,
        windows=(None, 3, 20),
    ),
    "packed, earlier trees in splits": AttentionCase(
        shape=[(150, 3), (20, 0), (31, 8)],
        bounds=[8] * 3,
        trees=(0, 2),
        grown=6,
        padding=2,
        head_dim=16,
        windows=(None, 4),
    ),
    "packed, earlier trees as a graph plans them": AttentionCase(
        shape=[(150, 3), (20, 0), (31, 8)],
        bounds=[8] * 3,
        trees=(0, 2),
        grown=6,
        head_dim=16,
        graph_width=8,
    ),
}
# KV of the first tokens is not there.
HOLE_CASES = {
    "holes before one decode in splits": AttentionCase(shape=[(150, 1)], kv_starts=[37]),
    "nothing but its own row": AttentionCase(shape=[(40, 1), (9, 3)], kv_starts=[40, 9]),
    "holes before uniform rows": AttentionCase(
        shape=[(5, 7), (40, 7), (16, 7)], kv_starts=[0, 33, 16], page_size=1
    ),
    "holes, loose bounds, a window per layer": AttentionCase(
        shape=MIXED, kv_starts=[5, 13, 0, 2, 0, 60], bound_slack=70, windows=(None, 20, 5)
    ),
    "holes in all groups": AttentionCase(
        shape=GROUPS, kv_starts=[before // 2 for before, _ in GROUPS], head_dim=16
    ),
    "holes in a graph of all groups": replace(
        THREE_GROUPS, kv_starts=[7, 9, 0, 50, 101], graph_width=15
    ),
    "holes in a packed step": AttentionCase(
        shape=PACKED,
        bounds=PACKED_BOUNDS,
        kv_starts=[before // 3 for before, _ in PACKED],
        padding=7,
        head_dim=16,
        windows=(None, 20),
    ),
    "holes before trees": AttentionCase(
        shape=[(15, 9), (33, 12), (40, 1), (150, 7)],
        trees=(0, 1, 3),
        grown=6,
        kv_starts=[4, 27, 11, 90],
        head_dim=16,
        windows=(None, 20),
    ),
}
MORE_CASES = TREE_CASES | GROWN_CASES | PACKED_CASES | HOLE_CASES
# Steps without trees in which masks that hide nothing must change nothing.
WITH_IDLE_MASKS = (
    *("page edges, pages of 16", "one decode, its KV in splits", "uniform q = 7"),
    "a window per layer",
)
IDLE_MASKS = ("all bits", "chains")
# Steps that must not change where the device alone knows the rows and the host's bounds are exact.
WHOLE_PACKED = (
    *("decodes", "uniform q = 7", "one decode, its KV in splits", "prompts beside decodes"),
    *("a window per layer", "narrow and wide, both in splits"),
)
MASKED = {f"{name}, {masks}": (name, masks) for name in WITH_IDLE_MASKS for masks in IDLE_MASKS}
PACKED_WHOLE = {f"{name}, packed": name for name in WHOLE_PACKED}


class PlacedCase:
    """The memory of a case and its inputs, all on a device; unused memory is NaN.

    Attributes:
        batch: the step.
        num_fed: rows that requests feed; padding follows.
        pool: what the backend under test reads and writes.
        q: per layer [T, num_heads, head_dim].
        tree_starts: of each request, where its tree begins; anywhere where it has none.
        parents: of the entries of each tree, by request; -1 for one without.
    """

    def __init__(self, case: AttentionCase, device: str, dtype: torch.dtype, seed: int) -> None:
        self.case, self.device = case, device
        self._generator = torch.Generator().manual_seed(seed)
        self._random = random.Random(seed)
        lens = [before + q_len for before, q_len in case.shape]
        num_pages = sum(-(-length // case.page_size) for length in lens) + 3
        num_rows = len(lens) + 2
        longest = max([*lens, *(before + bound for (before, _), bound in self._pairs())])
        self.table = ReqToTokenPool(num_rows, longest + case.bound_slack + 3, device)
        self.rows = self._random.sample(range(num_rows), len(lens))
        self.pool = self._make_pool(num_pages, dtype)
        self._place(lens, num_pages)
        if case.kv_starts:
            self._leave_out(case.kv_starts)
        self.num_fed = sum(q_len for _, q_len in case.shape)
        num_tokens = self.num_fed + case.padding
        self.q = []
        for _ in case.windows:
            values = self._values(num_tokens, case.num_heads + 2).to(device, dtype)[:, 1:-1]
            values[self.num_fed :] = float("nan")
            self.q.append(values if case.is_sliced else values.contiguous())
        self.tree_starts = [max(0, before - 9) for before, _ in case.shape]
        self.parents: dict[int, list[int]] = {}
        for request in case.trees:
            before, q_len = case.shape[request]
            self.tree_starts[request] = max(0, before - (case.grown or 0))
            size = before + q_len - self.tree_starts[request]
            self.parents[request] = [self._random.randrange(-1, entry) for entry in range(size)]
        if case.trees:
            self._plant()
        if case.bounds is not None:
            self._pack(case.bounds)
        if (width := case.graph_width) is not None:
            more_requests, more_tokens = case.graph_spare
            key = GraphKey("mixed", len(lens) + more_requests, width, num_tokens + more_tokens)
            self.batch = replace(self.batch, graph_key=key)

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
            self.table.write([[row] * length, list(range(length)), slots])
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

    def _leave_out(self, kv_starts: Sequence[int]) -> None:
        """KV before these tokens is NaN, and backends are told."""
        table = self.table.req_to_token
        self.pool.kv_starts = torch.zeros(len(table), dtype=torch.int64, device=self.device)
        self.pool.hides_kv = True
        for row, start in zip(self.rows, kv_starts, strict=True):
            self.pool.kv_starts[row] = start
            for kv in self.pool.kv:
                kv[table[row, :start].long()] = float("nan")

    def _plant(self) -> None:
        """Gives the batch the masks of its trees, and rows the positions of their depths."""
        masks, positions = [], []
        for request, (_, q_len) in enumerate(self.case.shape):
            start = self.tree_starts[request]
            for row in range(q_len):
                seen = self._seen(request, row)
                is_tree = request in self.parents
                own = sum(1 << (place - start) for place, _ in seen if place >= start)
                masks.append(signed(own) if is_tree else -1)
                positions.append(seen[-1][1])
        starts = None if self.case.grown is None else self.tree_starts
        self.batch = replace(
            self.batch,
            ancestors=torch.tensor(masks, device=self.device),
            positions=torch.tensor(positions, device=self.device),
            tree_starts=None if starts is None else torch.tensor(starts, device=self.device),
        )

    def _pack(self, bounds: Sequence[int]) -> None:
        """The host no longer knows how many rows each request feeds, and padding follows them."""
        shape, batch, padding = self.case.shape, self.batch, (0, self.case.padding)
        starts = list(itertools.accumulate((q_len for _, q_len in shape), initial=0))
        ancestors = batch.ancestors
        self.batch = replace(
            batch,
            input_ids=F.pad(batch.input_ids, padding),
            positions=F.pad(batch.positions, padding),
            slots=F.pad(batch.slots, padding),
            ancestors=None if ancestors is None else F.pad(ancestors, padding, value=-1),
            q_lens=list(bounds),
            q_starts=torch.tensor(starts, device=self.device),
            kv_len_upper_bounds=[before + bound for (before, _), bound in self._pairs()],
        )

    def as_the_host_would_know_it(self) -> ForwardBatch:
        """The step, if the host knew how many rows each request feeds; without padding."""
        batch, rows = self.batch, slice(self.num_fed)
        return replace(
            batch,
            input_ids=batch.input_ids[rows],
            positions=batch.positions[rows],
            slots=batch.slots[rows],
            ancestors=None if batch.ancestors is None else batch.ancestors[rows],
            q_lens=[q_len for _, q_len in self.case.shape],
            q_starts=None,
        )

    def _pairs(self) -> Iterable[tuple[tuple[int, int], int]]:
        """Each request and the most rows that it may feed."""
        exact = [q_len for _, q_len in self.case.shape]
        return zip(self.case.shape, self.case.bounds or exact, strict=True)

    def _seen(self, request: int, row: int) -> list[tuple[int, int]]:
        """Place and depth of each entry that a row sees, window aside; the last is its own."""
        before, start = self.case.shape[request][0], self.tree_starts[request]
        if request not in self.parents:
            return [(place, place) for place in range(before + row + 1)]
        path, entry = [], before + row - start
        while entry >= 0:
            path.append(start + entry)
            entry = self.parents[request][entry]
        return [(place, depth) for depth, place in enumerate([*range(start), *reversed(path)])]

    def expected(self) -> list[torch.Tensor]:
        """Per layer [num_fed, num_heads * head_dim]: with trees, with holes and of packed steps
        `written_out`, in float64, else of the oracle, in float32."""
        if self.case.trees or self.case.kv_starts or self.case.bounds is not None:
            return [self.written_out(layer) for layer in range(len(self.q))]
        return self._of_oracle()

    def written_out(self, layer: int) -> torch.Tensor:
        """[num_fed, num_heads * head_dim] float64: softmax attention, each row over the keys that
        it sees."""
        case, window = self.case, self.case.windows[layer]
        kv = self.pool.kv[layer].double()
        q = self.q[layer].double().unflatten(1, (case.num_kv_heads, -1))
        out: list[torch.Tensor] = []
        starts = itertools.accumulate((q_len for _, q_len in case.shape), initial=0)
        for request, (start, (_, q_len)) in enumerate(zip(starts, case.shape, strict=False)):
            is_seen = self._is_seen(request, window)
            slots = self.table.req_to_token[self.rows[request]][: is_seen.shape[1]]
            fed = kv[slots].masked_fill(
                ~is_seen.any(0)[:, None, None], 0
            )  # what none sees may be NaN
            k, v = fed.chunk(2, dim=1)
            scores = torch.einsum("qhgd,nhd->hgqn", q[start : start + q_len], k)
            scores = scores * (case.scores.scale or case.head_dim**-0.5)
            if (cap := case.scores.softcap) is not None:
                scores = cap * torch.tanh(scores / cap)
            scores = scores.masked_fill(~is_seen, -torch.inf)
            out.append(torch.einsum("hgqn,nhd->qhgd", scores.softmax(-1), v).flatten(1))
        return torch.cat(out)

    def _is_seen(self, request: int, window: int | None) -> torch.Tensor:
        """Bool [rows of the request, places]."""
        before, q_len = self.case.shape[request]
        place = torch.arange(before + q_len, device=self.device)
        own = place[before:, None]
        if request not in self.parents:
            depth, is_seen = place.expand(q_len, -1), place <= own
        else:
            depth = torch.full((q_len, before + q_len), -1, device=self.device)
            for row in range(q_len):
                places, depths = zip(*self._seen(request, row), strict=True)
                depth[row, list(places)] = torch.tensor(depths, device=self.device)
            is_seen = depth >= 0
        if window is not None:
            is_seen = is_seen & (depth > depth.gather(1, own) - window)
        return is_seen & (place >= (self.case.kv_starts[request] if self.case.kv_starts else 0))

    def _of_oracle(self) -> list[torch.Tensor]:
        """`TorchNativeBackend`'s, of the same values, in a pool of its own."""
        num_pages = self.pool.kv[0].shape[0] // self.case.page_size - 1
        pool = self._make_pool(num_pages, torch.float32)
        for wide, kv in zip(pool.kv, self.pool.kv, strict=True):
            wide.copy_(kv)
        case = self.case
        oracle = TorchNativeBackend(self.table, pool, case.num_heads, case.windows, case.scores)
        oracle.plan(self.batch)
        return [oracle.forward(layer, q.float()) for layer, q in enumerate(self.q)]

    def backend(self, name: str) -> AttentionBackend:
        """A backend over this memory."""
        make = ATTENTION_BACKENDS.load(name)
        backend: AttentionBackend = make(
            self.table, self.pool, self.case.num_heads, self.case.windows, self.case.scores
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
    if name != "torch_native":  # as rows of padding may leave it
        for kv in placed.pool.kv:
            kv[: case.page_size] = float("nan")
    backend = placed.backend(name)
    backend.plan(placed.batch)
    worst = 0.0
    for layer, right in enumerate(expected):
        out = backend.forward(layer, placed.q[layer])
        assert out.shape == (len(placed.q[layer]), right.shape[1]), out.shape
        assert out.dtype == dtype, out.dtype
        out = out[: placed.num_fed]
        difference = (out.float() - right).abs().max().item()
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def change_by_idle_masks(
    name: str, case: AttentionCase, masks: str, device: str, dtype: torch.dtype
) -> float:
    """The most that `masks`, of IDLE_MASKS, change in what backend `name` computes."""
    placed = PlacedCase(case, device, dtype, seed=0)
    ancestors = [
        signed((2 << row) - 1) if masks == "chains" and q_len <= MAX_TREE_ROWS else -1
        for _, q_len in case.shape
        for row in range(q_len)
    ]
    outs = []
    for values in (None, torch.tensor(ancestors, device=device)):
        backend = placed.backend(name)
        backend.plan(replace(placed.batch, ancestors=values))
        outs.append(torch.stack([backend.forward(layer, q) for layer, q in enumerate(placed.q)]))
    return (outs[0].float() - outs[1].float()).abs().max().item()


def change_by_packing(name: str, case: AttentionCase, device: str, dtype: torch.dtype) -> float:
    """The most that it changes in what backend `name` computes if the step is packed and feeds all
    rows."""
    bounds = [q_len for _, q_len in case.shape]
    placed = PlacedCase(replace(case, bounds=bounds), device, dtype, seed=0)
    outs = []
    for batch in (placed.batch, placed.as_the_host_would_know_it()):
        backend = placed.backend(name)
        backend.plan(batch)
        layers = [backend.forward(layer, q) for layer, q in enumerate(placed.q)]
        outs.append(torch.stack(layers).float())
    return (outs[0] - outs[1]).abs().max().item()


def random_packed(seed: int) -> AttentionCase:
    """A packed step: maybe prompts first, then requests that feed any number of rows up to a bound,
    trees among them."""
    chooser = random.Random(seed)
    prompts = [(chooser.randint(0, 40), q_len) for q_len in (70, 9)[: chooser.randint(0, 2)]]
    others = [chooser.randint(1, chooser.choice([1, 8, 16])) for _ in range(chooser.randint(1, 6))]
    fed = [chooser.randint(0, bound) for bound in others]
    shape = prompts + [(chooser.choice([0, 1, 15, 40]), q_len) for q_len in fed]
    has_trees = chooser.random() < 0.6
    return AttentionCase(
        shape=shape,
        head_dim=16,
        page_size=chooser.choice([1, 16]),
        windows=(None, chooser.randint(1, 30)),
        trees=tuple(range(len(prompts), len(shape)))[chooser.randint(0, 1) :] * has_trees,
        grown=chooser.choice([None, 0, 5, 40]),
        bounds=[q_len for _, q_len in prompts] + others,
        padding=chooser.randint(0, 9),
    )


# Of Triton's kernels: (tokens with KV, tokens fed) of a request whose row ends with them.
OUTSIDE_CASES = {
    f"{kind} past its row, {'guarded' if is_guarded else 'not guarded'}": (shape, is_guarded)
    for kind, shape in (("a decode", (60, 1)), ("splits", (150, 1)), ("a prompt", (20, 35)))
    for is_guarded in (True, False)
}


def outside_case(name: str, shape: tuple[int, int], is_guarded: bool, device: str) -> str:
    """Tells what is wrong when a length on the device says more than the row of the page table has:
    what lies behind the row points to NaN, and a guarded table tells of it."""
    placed = PlacedCase(AttentionCase(shape=[shape]), device, torch.float32, seed=0)
    row, width, excess = placed.rows[0], sum(shape), 40
    table = ReqToTokenPool(row + 3, width, device, is_guarded)
    table.req_to_token.fill_(int(placed.table.req_to_token[row, -1]))
    table.req_to_token[row] = placed.table.req_to_token[row, :width]
    backend = ATTENTION_BACKENDS.load(name)(table, placed.pool, placed.case.num_heads, (None,))
    backend.plan(replace(placed.batch, kv_lens=placed.batch.kv_lens + excess))
    if not backend.forward(0, placed.q[0]).isfinite().all():
        return "it read past the row"
    told = outside_met(table)
    columns = [f"met column {column} of" for column in range(width, width + excess)]
    is_right = any(column in told for column in columns) if is_guarded else not told
    return "" if is_right else f"the table told {told!r}"


def gather_case(
    shape: Sequence[tuple[int, int]], device: str, kv_starts: Sequence[int] = ()
) -> str:
    """Tells what is wrong when the KV of requests is gathered: each one's must lie side by side,
    from its first one that is there, zeros after it up to a whole tile, and everything else must be
    left alone."""
    from sglang.srt.layers.attention.triton_ops.gather_kernel import gather_kv
    from sglang.srt.layers.attention.triton_ops.kernels import Paged

    case = AttentionCase(shape=shape, head_dim=16, kv_starts=kv_starts)
    placed = PlacedCase(case, device, torch.float32, seed=0)
    kv, table, alignment = placed.pool.kv[0], placed.table.req_to_token, 64
    firsts = kv_starts or [0] * len(shape)
    lens = [end - first for end, first in zip(placed.batch.kv_lens.tolist(), firsts, strict=True)]
    order = list(reversed(range(len(shape))))
    starts, end = [], alignment  # the first rows belong to nobody
    for request in order:
        starts.append(end)
        end += -(-lens[request] // alignment) * alignment
    out = torch.full((end + 5, *kv.shape[1:]), -1.0, device=device)
    expected = out.clone()
    for request, start in zip(order, starts, strict=True):
        length = lens[request]
        expected[start : start + -(-length // alignment) * alignment] = 0.0
        own = table[placed.rows[request], firsts[request] :][:length]
        expected[start : start + length] = kv[own.long()]
    places = [
        (request, start, -(-lens[request] // alignment) * alignment)
        for request, start in zip(order, starts, strict=True)
    ]
    numbers = torch.tensor([*places, (-1, 0, 0)], dtype=torch.int32, device=device)
    paged = Paged(
        table=table,
        rows=placed.batch.rows,
        kv_lens=placed.batch.kv_lens,
        kv_starts=placed.pool.kv_starts,
    )
    gather_kv(kv, out, numbers, paged, max(lens), alignment)
    if not torch.equal(out, expected):
        return "other values lie there"
    wrong = replace(paged, kv_lens=paged.kv_lens + 1000)
    gather_kv(kv, out, numbers, wrong, max(lens), alignment)
    is_own = torch.zeros(len(out), dtype=torch.bool, device=device)
    for _, start, room in places:
        is_own[start : start + room] = True
    is_kept = torch.equal(out[~is_own], expected[~is_own])
    return "" if is_kept else "a length that says too much wrote to rows of others"


GATHERED = ((5, 60), (63, 1), (0, 64), (100, 29), (0, 1))
GATHER_CASES: dict[str, tuple[Sequence[tuple[int, int]], Sequence[int]]] = {
    "gathering one request": (((0, 70),), ()),
    "gathering requests": (GATHERED, ()),
    "gathering requests behind holes": (GATHERED, (5, 20, 0, 99, 0)),
}


def outside_met(table: ReqToTokenPool) -> str:
    """Returns what the table says of columns outside of their row; nothing if no kernel met one."""
    try:
        for _ in range(2):  # on a GPU a look takes two calls, since it never waits
            if table.req_to_token.is_cuda:
                torch.cuda.synchronize()
            table.raise_if_outside()
    except RuntimeError as error:
        return str(error)
    return ""


def signed(mask: int) -> int:
    """64 bits as torch.int64 has them."""
    return mask - (1 << 64) if mask >> 63 else mask


def with_requests(case: AttentionCase, count: int) -> AttentionCase:
    """The case with its requests repeated until there are `count`."""
    shape = [case.shape[index % len(case.shape)] for index in range(count)]
    return replace(case, shape=shape)


def main(name: str) -> None:
    torch.set_num_threads(1)
    capabilities = ATTENTION_BACKENDS.load(name).capabilities()
    if problems := capabilities.problems("cpu", torch.float32, 16):
        sys.exit(f"{name} {'; '.join(problems)}")
    for case_name, case in asked(CASES | MORE_CASES).items():
        error: float | str
        try:
            error = max_error(name, case, "cpu", torch.float32)
        except AssertionError as failure:
            error = str(failure) or "an assertion failed"
        print(json.dumps([case_name, error]), flush=True)
    if name == "triton":
        for case_name, (shape, is_guarded) in asked(OUTSIDE_CASES).items():
            print(json.dumps([case_name, outside_case(name, shape, is_guarded, "cpu")]), flush=True)
        for case_name, (requests, starts) in asked(GATHER_CASES).items():
            print(json.dumps([case_name, gather_case(requests, "cpu", starts)]), flush=True)
    if capabilities.tree_masks:
        print(json.dumps(["draft steps", draft_chain_error(name, "cpu", page_size=1)]), flush=True)
    for key, (size, max_folded) in BLOCKS.items():
        if max_folded > 1 and not capabilities.folds_rows:
            continue
        error = block_error(name, "cpu", size, max_folded)
        print(json.dumps([f"blocks, {key}", error]), flush=True)
    for key, (case_name, masks) in asked(MASKED).items():
        error = change_by_idle_masks(name, CASES[case_name], masks, "cpu", torch.float32)
        print(json.dumps([key, error]), flush=True)
    for key, case_name in asked(PACKED_WHOLE).items():
        change = change_by_packing(name, CASES[case_name], "cpu", torch.float32)
        print(json.dumps([key, change]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
