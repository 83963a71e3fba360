"""The conformance table of step operations, and what compares them with torch's, bit for bit.

As a program it runs the table on a CPU and prints a line of JSON per case: what differs, nothing if
all is well. Triton kernels then need TRITON_INTERPRET=1 in the environment, set before Triton is
imported:

    export PYTHONPATH=python:sgl-kernel/python:test
    TRITON_INTERPRET=1 python test/support/step_ops_cases.py triton
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from attention_cases import outside_met
from interpreted import asked
from sgl_kernel import ConfirmedDrafts, reference
from sglang.srt.layers.forward_batch import (
    DECODE,
    DRAFT_STEPS,
    MIXED,
    RAGGED,
    UNIFORM,
    ForwardBatch,
    GraphKey,
)
from sglang.srt.mem_cache.kv_ledger import PageTableWrites
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.registry import OPERATIONS, load
from sglang.srt.speculative.drafter import ChosenTokens
from sglang.srt.speculative.mask_ops import MaskOps
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import (
    READ_START,
    AcceptedTokens,
    PackedSize,
    RowLayout,
    StaticInputs,
    StepCounts,
    StepOps,
)
from sglang.srt.step.worker import BatchRequest, ScheduleBatch

VOCAB_SIZE = 3  # small, so that drafts are often right
MASK = 7
WIDTH = 700  # of the page table
NUM_SPARE_ROWS = 3
NUM_WRITES = (0, 1, 200)  # to the page table, in a step
PROMPTS = ("chunk", "prompt", "end")  # its last chunk, with masks after it and without
STATE = ("committed", "tokens", "num_tokens", "pending_lens")
Case = Callable[[str, str], list[str]]


class Side:
    """Device rows and a page table, and the operations under test."""

    def __init__(
        self,
        name: str,
        device: str,
        num_rows: int,
        max_pending: int,
        seed: int,
        is_packed: bool = False,
        has_trees: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        self.device = torch.device(device)
        self.pool = ReqToTokenPool(num_rows, WIDTH, device)
        self.state = RequestRows(self.pool, max_pending, VOCAB_SIZE, has_trees, is_packed)
        thresholds = (numbers(0, 3, num_rows) / 2).to(device)
        self.ops: StepOps = load(OPERATIONS[name].step)(self.device)
        self.ops.warm_up(self.state, self.pool)
        self.masks: MaskOps = load(OPERATIONS[name].masks)(self.state, thresholds)
        self.state.committed[:num_rows] = numbers(0, WIDTH - 400, num_rows).to(device)
        tokens = numbers(0, VOCAB_SIZE, num_rows, WIDTH)
        self.state.tokens[:num_rows] = tokens.to(device, torch.int32)
        self.state.pending_lens[:num_rows] = numbers(1, max_pending + 1, num_rows).to(device)
        self.state.num_tokens[:num_rows] = numbers(0, WIDTH, num_rows).to(device)
        slots = numbers(0, 1 << 20, num_rows, WIDTH).to(device, torch.int32)
        self.pool.req_to_token[:num_rows] = slots
        if self.state.confidence is not None:
            table = self.state.confidence
            table.copy_(numbers(0, 9, *table.shape) / 8)
        if self.state.trees is not None:
            nodes = torch.arange(1, max_pending)
            parents = numbers(0, 1 << 20, num_rows, max_pending - 1) % nodes
            every = torch.arange(num_rows, device=self.device)
            self.state.trees.write(every, parents.to(self.device, torch.int32))

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: vars(self.state)[name] for name in STATE}
        found["table"] = self.pool.req_to_token
        if self.state.confidence is not None:
            found["confidence"] = self.state.confidence
        return {name: tensor.cpu().clone() for name, tensor in found.items()}


def table_writes(rows: list[int], columns: list[int], slots: list[int]) -> PageTableWrites:
    return PageTableWrites(np.array([rows, columns, slots], dtype=np.int64))


@dataclass
class Step:
    """A random step, request by request."""

    rows: list[int]
    q_lens: list[int] = field(default_factory=list)
    num_prompt: list[int] = field(default_factory=list)
    emits: list[bool] = field(default_factory=list)
    num_predicted: list[int] = field(default_factory=list)
    num_read: list[int] = field(default_factory=list)
    max_accepted: list[int] = field(default_factory=list)
    emits_only_confirmed: list[bool] = field(default_factory=list)

    def add(self, kind: str, pending_len: int, max_pending: int, chooser: random.Random) -> None:
        num_prompt = chooser.choice([1, 2, 130, 300]) if kind in PROMPTS else 0
        only_confirmed = kind in ("plain", "tree", "fewer", "capped", "end")
        only_confirmed |= kind != "static" and chooser.random() < 0.5
        emits = kind != "chunk"
        looks_ahead = kind in ("static", "mtp", "prompt") and max_pending > 1
        k = chooser.randint(1, max_pending) if looks_ahead else int(emits)
        bound = 1 if num_prompt else chooser.randint(pending_len, max_pending)
        if kind == "fewer":  # rows than are pending
            bound = chooser.randint(1, pending_len)
        q_len = (num_prompt or bound) + max(k - 1, 0)
        self.q_lens.append(q_len)
        self.num_prompt.append(num_prompt)
        self.emits.append(emits)
        self.num_predicted.append(k)
        self.num_read.append(q_len if only_confirmed and not num_prompt else k)
        self.max_accepted.append(2 if kind == "capped" else bound if only_confirmed else k)
        self.emits_only_confirmed.append(only_confirmed)

    def batch(self, chooser: random.Random, num_writes: int = 1) -> ScheduleBatch:
        places = chooser.sample(range(len(self.rows) * WIDTH), num_writes)
        return ScheduleBatch(
            [
                BatchRequest(row, q_len, num_prompt, emits, WIDTH - q_len)
                for row, q_len, num_prompt, emits in zip(
                    self.rows, self.q_lens, self.num_prompt, self.emits, strict=True
                )
            ],
            table_writes=table_writes(
                [self.rows[place // WIDTH] for place in places],
                [place % WIDTH for place in places],
                [chooser.randrange(1 << 20) for _ in places],
            ),
            all_greedy=True,
        )

    def packed(self, counts: StepCounts, share: float) -> StepCounts:
        """With this share of the rows, but those that must be fed."""
        least = sum(
            q_len if prompt else 1
            for q_len, prompt in zip(self.q_lens, self.num_prompt, strict=True)
        )
        num_rows = max(least, round(share * sum(self.q_lens)))
        num_reads = min(num_rows, sum(self.num_read))
        return dataclasses.replace(counts, packed=PackedSize(num_rows, num_reads))

    def counts(self, is_plain: bool) -> StepCounts:
        return StepCounts(
            self.q_lens, self.num_read, self.num_predicted, self.emits_only_confirmed, is_plain
        )


def differing(ours: object, right: object) -> list[str]:
    """Names of fields that differ in value, shape or type."""
    found = []
    for entry in fields(right):  # type: ignore[arg-type]
        mine, his = (getattr(side, entry.name) for side in (ours, right))
        if his is None:
            found += [] if mine is None else [entry.name]
        elif not isinstance(his, torch.Tensor):
            found += differing(mine, his)
        elif mine.dtype != his.dtype or not torch.equal(mine.cpu(), his):
            found.append(entry.name)
    return found


def written_elsewhere(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], rows: list[int]
) -> list[str]:
    others = torch.tensor(sorted(set(range(len(before["table"]))) - set(rows)))
    return [
        f"other rows of {name}"
        for name, tensor in before.items()
        if not torch.equal(tensor[others], after[name][others])
    ]


def wrong_sequences(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], step: Step, has_trees: bool
) -> list[str]:
    """Tells what is wrong in the token table: where a step emits, the known end is that of the
    pending tokens, and they alone were written, and of trees the confirmed path; where it emits
    nothing, there is no change."""
    found = []
    for row, emits in zip(step.rows, step.emits, strict=True):
        first, end = int(after["committed"][row]), int(after["num_tokens"][row])
        right_end = first + int(after["pending_lens"][row])
        if end != (right_end if emits else int(before["num_tokens"][row])):
            found.append("the known end")
        if has_trees:
            first = int(before["committed"][row]) + 1
        changed = (before["tokens"][row] != after["tokens"][row]).nonzero().flatten().tolist()
        if not set(changed) <= set(range(first, end) if emits else ()):
            found.append("tokens of others")
    return found


def step_case(
    kinds: list[str],
    num_reqs: int,
    max_pending: int,
    plain: bool = False,
    packed_share: float | None = None,
    has_trees: bool = False,
) -> Case:
    """A step of requests of random kinds: laid out, then accepted or, if `plain`, committed.

    Of few requests there are several steps: each number of writes to the page table, with and
    without probabilities where tokens are accepted; both together on a GPU alone, since no kernel
    sees both. Many are a sample already: one step for each.

    Args:
        packed_share: the step is packed and has this share of the rows that it could need, if it
            needs no more in any case.
    """
    seeds = range(3 if plain else 6) if num_reqs < 10 else (2,) if plain else (2, 5)

    def run_once(name: str, device: str, seed: int) -> list[str]:
        chooser = random.Random(seed)
        num_rows = num_reqs + NUM_SPARE_ROWS
        is_packed = packed_share is not None
        ours, right = (
            Side(side, place, num_rows, max_pending, seed, is_packed, has_trees)
            for side, place in ((name, device), ("torch", "cpu"))
        )
        step = Step(chooser.sample(range(num_rows), num_reqs))
        for row in step.rows:
            kind = chooser.choice(kinds)
            if plain or kind in PROMPTS:
                ours.state.pending_lens[row] = right.state.pending_lens[row] = 1
            pending_len = int(right.state.pending_lens[row])
            step.add(kind, pending_len, 1 if plain else max_pending, chooser)
        batch, before = step.batch(chooser, NUM_WRITES[seed % 3]), right.tensors()
        is_plain = plain or sum(step.num_read) == 0
        counts = step.counts(is_plain)
        if packed_share is not None and not is_plain:
            counts = step.packed(counts, packed_share)
        layouts = [
            side.ops.lay_out(batch, counts, side.state, side.pool, MASK) for side in (ours, right)
        ]
        pairs = list(zip((ours, right), layouts, strict=True))
        found = differing(*layouts)
        if is_plain:
            mine, his = (commit(side, layout) for side, layout in pairs)
            found += [] if torch.equal(mine.cpu(), his) else ["next_token_ids"]
        else:
            accepted, expected = (accept(side, layout, step, seed < 3) for side, layout in pairs)
            found += differing(accepted, expected)
            if int(expected.accept_lens.max()) > expected.next_token_ids.shape[1]:
                found.append("more than may be accepted")
        after = ours.tensors()
        found += [name for name, tensor in right.tensors().items() if not tensor.equal(after[name])]
        found += wrong_sequences(before, after, step, has_trees)
        return found + written_elsewhere(before, after, step.rows)

    def run(name: str, device: str) -> list[str]:
        few = [0, 1, 5] if device == "cpu" and len(seeds) == 6 else seeds
        return [f"seed {seed}: {what}" for seed in few for what in run_once(name, device, seed)]

    return run


def padding_case(num_reqs: int, num_padding: int, width: int) -> Case:
    """Steps in which each request feeds `width` pending rows (plain steps if that is 1), and
    further ones, all in the row for padding, as many: what requests get is what they get without
    padding, and the watermark of the padding stays 0."""

    def run(name: str, device: str) -> list[str]:
        found = []
        ours, right = (
            Side(side, place, num_reqs + 1, width, 3)
            for side, place in ((name, device), ("torch", "cpu"))
        )
        for number in range(3):
            rows = random.Random(number).sample(range(num_reqs + 1), num_reqs)
            layouts, accepted = [], []
            for side, padding in ((ours, num_padding), (right, 0)):
                side.state.pending_lens[rows] = width
                step = Step(rows + [side.pool.padding_row] * padding)
                for _ in step.rows:
                    step.add("tree", width, width, random.Random(0))
                batch = step.batch(random.Random(0), 0)
                counts = step.counts(width == 1)
                layout = side.ops.lay_out(batch, counts, side.state, side.pool, MASK)
                layouts.append([values[: num_reqs * width].cpu() for values in _tokens_of(layout)])
                if width == 1:
                    given = [commit(side, layout)]
                else:
                    taken = accept(side, layout, step, has_probs=False)
                    given = [taken.accept_lens, taken.kept_lens, taken.next_token_ids]
                accepted.append([values[:num_reqs].cpu() for values in given])
            found += [] if all(map(torch.equal, *layouts)) else ["layout"]
            found += [] if all(map(torch.equal, *accepted)) else ["accepted"]
            mine, his = ours.tensors(), right.tensors()
            found += [key for key in mine if not torch.equal(mine[key][:-1], his[key][:-1])]
            found += ["watermark"] if mine["committed"][-1] != 0 else []
        return found

    return run


def _tokens_of(layout: RowLayout) -> tuple[torch.Tensor, ...]:
    return layout.input_ids, layout.positions, layout.slots


def drawn(layout: RowLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and probabilities [S] that depend on the rows read."""
    index = layout.reads.index
    return (index * 7 + index // 3) % VOCAB_SIZE, (index * 5 % 8).float() / 8


def commit(side: Side, layout: RowLayout) -> torch.Tensor:
    return side.ops.commit(layout, drawn(layout)[0], side.state)


def accept(side: Side, layout: RowLayout, step: Step, has_probs: bool) -> AcceptedTokens:
    """As the worker does; drafts are confirmed by torch on each side."""
    tokens, probs = drawn(layout)
    chosen = ChosenTokens(layout, tokens, probs if has_probs else None)
    max_accepted, lookahead = max(1, *step.max_accepted), layout.lookahead
    assert lookahead is not None
    unconfirmed = None
    if not all(step.emits_only_confirmed):
        unconfirmed = side.masks.num_confident(chosen)
    confirmed = reference.confirm_drafts(
        layout.input_ids,
        tokens,
        lookahead.parents,
        lookahead.q_starts,
        lookahead.num_pending,
        max(max_accepted, side.state.max_pending),
        layout.per_request[READ_START],
    )
    accepted = side.ops.commit_run(layout, tokens, confirmed, unconfirmed, max_accepted, side.state)
    side.masks.propose(chosen, accepted)
    return accepted


def fill_case(
    key: GraphKey,
    q_lens: list[int],
    num_reads: int | None = None,
    fed: list[int] | None = None,
    trees: int = 0,
) -> Case:
    """A step is copied into poisoned inputs of a graph; what is beyond the graph must stay.

    Args:
        fed: of a packed step with 3 rows of padding, the rows that each request feeds.
        trees: of the step's rows: none, with `ancestors`, with `tree_starts` too.
    """

    def run(name: str, device: str) -> list[str]:
        count = sum(q_lens) if fed is None else sum(fed) + 3
        values = torch.arange(3 * count + 2 * len(q_lens)) + 100
        results = []
        for side, place in ((name, device), ("torch", "cpu")):
            ops: StepOps = load(OPERATIONS[side].step)(torch.device(place))
            ids, positions, slots, rows, kv_lens = (
                part.clone().to(place) for part in values.split([count] * 3 + [len(q_lens)] * 2)
            )
            reads = None if num_reads is None else torch.arange(num_reads, device=place) * 3 + 1
            hidden = None
            if key.hidden_width:  # every second row of a wider tensor
                both = torch.arange(2.0 * count * key.hidden_width, device=place) + 1
                hidden = both.view(count, 2, key.hidden_width)[:, 0]
            batch = ForwardBatch(
                ids,
                positions,
                slots,
                rows,
                q_lens,
                kv_lens,
                [WIDTH] * len(q_lens),
                read_index=reads,
                ancestors=ids * 7 if trees > 0 else None,
                tree_starts=kv_lens - 5 if trees > 1 else None,
                q_starts=None if fed is None else as_starts(fed).to(place),
                hidden=hidden,
            )
            tokens = torch.full((3, key.num_tokens + 5), -7, device=place)
            requests = torch.full((3, key.num_reqs + 5), -7, device=place)
            static = StaticInputs(
                tokens,
                requests,
                requests[0].clone(),
                tokens[0].clone(),
                requests[0].clone(),
                torch.full((key.num_tokens * key.hidden_width + 5,), -7.0, device=place),
            )
            index = ops.fill(static, key, batch)
            parts = {"tokens": tokens, "requests": requests, "q_starts": static.q_starts}
            parts |= {"ancestors": static.ancestors, "tree_starts": static.tree_starts}
            parts |= {"hidden": static.hidden}
            parts |= {} if index is None else {"index": index}
            results.append({what: part.cpu() for what, part in parts.items()})
        mine, his = results
        assert mine.keys() == his.keys()
        return (
            [what for what in mine if not same(mine[what], his[what])]
            + wrong_trees(key, q_lens if fed is None else fed, his, trees)
            + wrong_hidden(key, count, num_reads, his)
        )

    return run


def wrong_hidden(
    key: GraphKey, count: int, num_reads: int | None, filled: dict[str, torch.Tensor]
) -> list[str]:
    """Names the inputs of graphs with hidden states that are not what a loop over rows gives."""
    width = key.hidden_width
    right = torch.zeros(key.num_tokens, width)
    places = filled.get("index", torch.arange(count)).tolist()
    for row, place in enumerate(places):
        right[place] = torch.arange(width) + 1 + 2 * row * width
    found = filled["hidden"]
    wrong = [] if found[:-5].equal(right.flatten()) else ["hidden by hand"]
    if not found[-5:].equal(torch.full((5,), -7.0)):
        wrong.append("behind the hidden states")
    if key.reads_one_row and num_reads is not None:
        reads = [places[3 * read + 1] for read in range(num_reads)]
        if filled["requests"][2, :num_reads].tolist() != reads:
            wrong.append("reads by hand")
    return wrong


def as_starts(lens: list[int]) -> torch.Tensor:
    """[R + 1]."""
    return torch.tensor([0, *itertools.accumulate(lens)])


def same(mine: torch.Tensor, his: torch.Tensor) -> bool:
    return mine.equal(his) and mine.dtype == his.dtype


def wrong_trees(
    key: GraphKey, fed: list[int], filled: dict[str, torch.Tensor], trees: int
) -> list[str]:
    """Names the inputs of packed graphs and of trees that are not what a loop over requests
    gives."""
    untouched, size = [-7] * 5, key.num_reqs
    starts, tree_starts, ancestors = [-7] * (size + 5), [-7] * (size + 5), [-7] * key.num_tokens
    if key.is_packed:
        ends = as_starts(fed).tolist()
        starts[: size + 1] = [*ends, *ends[-1:] * (size - len(fed))]
    if key.has_tree:
        lens, ids = filled["requests"][1].tolist(), filled["tokens"][0].tolist()
        for request in range(size):
            rows = fed[request] if request < len(fed) else 0
            replayed = key.width if key.is_uniform else rows
            is_given = trees > 1 and request < len(fed)
            tree_starts[request] = lens[request] - replayed + (rows - 5 if is_given else 0)
        ancestors = [number * 7 if number and trees else -1 for number in ids[: key.num_tokens]]
    right = {"q_starts": starts, "tree_starts": tree_starts, "ancestors": ancestors + untouched}
    return [f"{what} by hand" for what in right if filled[what].tolist() != right[what]]


def drafts_case(num_reqs: int, max_pending: int, is_asked: bool, has_trees: bool = False) -> Case:
    """Drafts that are written, all of each request or some, each with a probability or without; as
    columns of a wider tensor, and fewer than there is room for."""

    def run(name: str, device: str) -> list[str]:
        found = []
        for seed in range(4):
            ours, right = (
                Side(
                    side, place, num_reqs + 1, max_pending, seed, 0 if is_asked else None, has_trees
                )
                for side, place in ((name, device), ("torch", "cpu"))
            )
            generator = torch.Generator().manual_seed(seed)
            width = max_pending - 1 - (seed == 3 and max_pending > 2)
            rows = torch.randperm(num_reqs + 1, generator=generator)[:num_reqs]
            tokens = torch.randint(0, 99, (num_reqs, width + 2), generator=generator)[:, :width]
            counts = torch.randint(0, width + 1, (num_reqs,), generator=generator)
            told = torch.rand((num_reqs, width + 1), generator=generator)[:, :width]
            parents = torch.zeros((num_reqs, width), dtype=torch.int32)
            before = right.tensors()
            for side in (ours, right):
                side.ops.write_drafts(
                    side.state,
                    rows.to(side.device),
                    tokens.to(side.device),
                    counts.to(side.device) if seed % 2 else None,
                    parents.to(side.device) if has_trees and seed > 1 else None,
                    told.to(side.device) if seed != 1 else None,
                )
            mine, his = ours.tensors(), right.tensors()
            found += [f"seed {seed}: {key}" for key in mine if not mine[key].equal(his[key])]
            if ours.state.trees is not None and right.state.trees is not None:
                same_trees = ours.state.trees.parents.cpu().equal(right.state.trees.parents)
                found += [] if same_trees else [f"seed {seed}: trees"]
            found += written_elsewhere(before, mine, rows.tolist())
        return found

    return run


def outside_case(column: int, is_guarded: bool, by_write: bool) -> Case:
    """A step whose numbers name a column outside of its row, in an entry of the page table to write
    or in the watermark on the device: nothing of another row is read or written, and a guarded
    table tells of it."""

    def run(name: str, device: str) -> list[str]:
        side = Side(name, device, 3, 1, seed=0)
        side.pool.outside = torch.zeros(1, dtype=torch.int64, device=device) if is_guarded else None
        side.state.pending_lens.fill_(1)
        side.state.committed[1] = 5 if by_write else column
        side.state.tokens.fill_(2)
        table, tokens = side.pool.req_to_token.cpu().clone(), side.state.tokens.cpu()
        columns = [3, column] if by_write else [3]
        step = Step([1])
        step.add("plain", 1, 1, random.Random(0))
        batch = step.batch(random.Random(0))
        writes = table_writes([1] * len(columns), columns, [77] * len(columns))
        batch = dataclasses.replace(batch, table_writes=writes)
        layout = side.ops.lay_out(batch, step.counts(True), side.state, side.pool, MASK)
        table[1, 3] = 77
        right_slot = int(table[1, 5]) if by_write else 0
        told = outside_met(side.pool)
        checks = {
            "table": torch.equal(side.pool.req_to_token.cpu(), table),
            "tokens": layout.input_ids.tolist() == [int(tokens[1, 5]) if by_write else 0],
            "slots": layout.slots.tolist() == [right_slot],
            "report": (f"met column {column} of" in told) if is_guarded else not told,
        }
        return [what for what, fine in checks.items() if not fine]

    return run


def outside_end_case(committed: int, is_guarded: bool, num_drawn: int) -> Case:
    """A step that ends at the end of its row of the token table, and commits one token or accepts
    more: what is past the row is not written, and a guarded table tells of it."""

    def run(name: str, device: str) -> list[str]:
        side = Side(name, device, 3, num_drawn, seed=0)
        side.pool.outside = torch.zeros(1, dtype=torch.int64, device=device) if is_guarded else None
        side.state.pending_lens.fill_(1)
        side.state.committed[1] = committed
        side.state.tokens.fill_(9)
        drawn = torch.arange(num_drawn, device=device)
        step = Step([1], [1], [0], [True], [num_drawn], [num_drawn], [num_drawn], [False])
        batch = dataclasses.replace(step.batch(random.Random(0)), table_writes=PageTableWrites())
        if num_drawn == 1:
            layout = side.ops.lay_out(batch, step.counts(True), side.state, side.pool, MASK)
            side.ops.commit(layout, drawn, side.state)
        else:
            layout = side.ops.lay_out(batch, step.counts(False), side.state, side.pool, MASK)
            path = torch.arange(num_drawn, dtype=torch.int32, device=device)[None]
            zero = torch.zeros(1, dtype=torch.int64, device=device)
            confirmed = ConfirmedDrafts(zero, path, zero)
            count = zero + num_drawn
            side.ops.commit_run(layout, drawn, confirmed, count, num_drawn, side.state)
        num_inside = WIDTH - committed - 1
        right = torch.full_like(side.state.tokens, 9, device="cpu")
        right[1, committed + 1 :] = torch.arange(num_inside)
        told, columns = outside_met(side.pool), range(WIDTH, WIDTH + num_drawn - num_inside)
        is_told = any(f"met column {column} of" in told for column in columns)
        checks = {
            "tokens": torch.equal(side.state.tokens.cpu(), right),
            "report": is_told if is_guarded else not told,
        }
        return [what for what, fine in checks.items() if not fine]

    return run


ALL = ["plain", "static", "mtp", "prompt", "chunk"]
PACKED = ["tree", "end", "chunk"]
RAGGED_8, MIXED_8 = GraphKey(RAGGED, 8, 15, 64), GraphKey(MIXED, 8, 15, 320)
CASES: dict[str, Case] = {
    **{f"plain decode, {n}": step_case(["plain"], n, 1, plain=True) for n in (1, 2, 17, 40)},
    "plain decode among look-ahead rows": step_case(["plain"], 9, 8, plain=True),
    "a prompt": step_case(["prompt"], 1, 1, plain=True),
    "a chunk": step_case(["chunk"], 1, 1, plain=True),
    "chunks": step_case(["chunk"], 3, 8, plain=True),
    "prompts, chunks and decode": step_case(["plain", "prompt", "chunk"], 12, 1, plain=True),
    "static k": step_case(["static"], 5, 8),
    "one that looks ahead": step_case(["mtp"], 1, 8),
    "two pending at most": step_case(["mtp"], 6, 2),
    "three pending at most": step_case(["mtp", "static"], 6, 3),
    "no room to look ahead": step_case(["mtp", "plain"], 6, 1),
    "verified and not": step_case(["mtp", "static"], 7, 4),
    "many that look ahead": step_case(["mtp", "plain"], 40, 8),
    "all kinds": step_case(ALL, 13, 8),
    "all kinds, up to 16": step_case(ALL, 4, 16),
    "packed, with room": step_case(PACKED, 9, 8, packed_share=1.0),
    "packed and cut": step_case(["tree"], 9, 8, packed_share=0.5),
    "packed, all kinds": step_case(PACKED, 13, 4, packed_share=0.8),
    "fewer rows than are pending": step_case(["fewer", "mtp", "prompt"], 9, 8),
    "fewer rows than a tree has": step_case(["fewer", "tree"], 9, 8, has_trees=True),
    "packed, fewer than are pending": step_case(["fewer", "tree"], 9, 8, packed_share=0.9),
    "packed, one request": step_case(["tree"], 1, 8, packed_share=0.6),
    "no more is accepted than may be": step_case(["capped"], 9, 8),
    "padding behind a request": padding_case(1, 3, 4),
    "padding behind decodes": padding_case(5, 3, 1),
    "padding behind requests": padding_case(5, 2, 3),
    "trees": step_case(["tree"], 7, 8, has_trees=True),
    "trees beside prompts": step_case(["tree", "prompt", "chunk"], 9, 16, has_trees=True),
    "packed trees": step_case(["tree"], 7, 8, packed_share=0.5, has_trees=True),
    "packed trees, with room": step_case(["tree"], 7, 8, packed_share=1.0, has_trees=True),
    "packed trees beside prompts": step_case(PACKED, 9, 16, packed_share=0.7, has_trees=True),
    "drafts": drafts_case(5, 8, is_asked=False),
    "drafts and how sure they are": drafts_case(9, 8, is_asked=True),
    "one draft of a request": drafts_case(1, 2, is_asked=True),
    "trees of drafts": drafts_case(3, 5, is_asked=True, has_trees=True),
    "a graph of its size": fill_case(GraphKey(DECODE, 4, 1, 4), [1] * 4),
    "a larger graph": fill_case(GraphKey(DECODE, 24, 1, 24), [1] * 17),
    "a graph of prompts": fill_case(GraphKey(MIXED, 8, 1, 320), [200, 1, 7], num_reads=2),
    "a chunk that nothing is read of": fill_case(GraphKey(MIXED, 8, 1, 320), [200], num_reads=0),
    "more is read than there are requests": fill_case(GraphKey(RAGGED, 2, 8, 16), [8, 8], 11),
    "a ragged graph": fill_case(GraphKey(RAGGED, 8, 15, 64), [15, 1, 7, 3, 3]),
    "a mixed graph": fill_case(GraphKey(MIXED, 8, 15, 320), [200, 1, 7]),
    "a uniform graph": fill_case(GraphKey(UNIFORM, 4, 7, 28), [7, 7]),
    "a uniform graph, spread": fill_case(GraphKey(UNIFORM, 16, 15, 240), [15, 1, 7, 3, 14]),
    "one row, spread": fill_case(GraphKey(UNIFORM, 1, 15, 15), [2]),
    "a graph whose requests are a whole block": fill_case(GraphKey(RAGGED, 128, 2, 128), [1] * 120),
    "a packed step": fill_case(RAGGED_8, [15, 15, 15, 9], 2, fed=[3, 0, 15, 1]),
    "a packed step with a prompt": fill_case(MIXED_8, [200, 15, 15], 3, fed=[200, 7, 0]),
    "a packed step that fills its graph": fill_case(
        GraphKey(RAGGED, 4, 15, 16), [15] * 4, fed=[5, 1, 3, 4]
    ),
    **{
        f"hidden states of {width}, {name}": fill_case(
            dataclasses.replace(key, hidden_width=width, reads_one_row=key.tag != DECODE),
            q_lens,
            num_reads,
            fed,
        )
        for width in (7, 1500)
        for name, key, q_lens, num_reads, fed in (
            ("a larger graph", GraphKey(DECODE, 8, 1, 8), [1] * 5, None, None),
            ("draft steps", GraphKey(DRAFT_STEPS, 4, 1, 4, num_steps=3), [1] * 4, None, None),
            ("mixed", GraphKey(MIXED, 4, 3, 32), [17, 1, 2], 2, None),
            ("packed", GraphKey(RAGGED, 4, 15, 32), [15] * 3, 3, [3, 0, 15]),
            ("spread", GraphKey(UNIFORM, 4, 7, 28), [7, 1, 4], 3, None),
        )
    },
    **{
        f"{name}, trees {trees}": fill_case(
            dataclasses.replace(key, has_tree=True), q_lens, 1, fed, trees
        )
        for trees in range(3)
        for name, key, q_lens, fed in (
            ("ragged", RAGGED_8, [15, 1, 7, 3, 3], None),
            ("mixed", MIXED_8, [200, 1, 7], None),
            ("uniform", GraphKey(UNIFORM, 16, 15, 240), [15, 1, 7, 3, 14], None),
            ("packed", RAGGED_8, [15] * 4, [3, 0, 15, 1]),
        )
    },
}

# Of kernels alone: torch itself raises at such a column.
GUARDS = {"guarded": True, "not guarded": False}
OUTSIDE_CASES: dict[str, Case] = {
    **{
        f"column {column}, {place}, {guard}": outside_case(column, GUARDS[guard], by_write)
        for column in (-1, WIDTH, WIDTH + 5)
        for place, by_write in (("written", True), ("read", False))
        for guard in GUARDS
    },
    **{
        f"{num} drawn at {committed}, {guard}": outside_end_case(committed, GUARDS[guard], num)
        for num, committed in ((1, WIDTH - 1), (8, WIDTH - 1), (8, WIDTH - 4))
        for guard in GUARDS
    },
}


def main(name: str) -> None:
    torch.set_num_threads(1)
    for case_name, case in asked(CASES | (OUTSIDE_CASES if name == "triton" else {})).items():
        print(json.dumps([case_name, "; ".join(case(name, "cpu"))]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
