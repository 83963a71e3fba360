"""Trees found by a set of operations, against the same by torch: random children with ties.

python test/support/tree_search_cases.py triton      # under Triton's interpreter
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from interpreted import asked
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_executor.draft_tree_passes import TorchTreeSearch, TreeSearch
from sglang.srt.registry import OPERATIONS, load
from sglang.srt.step.draft_shapes import TreeShape

VOCAB, DRAFT_VOCAB, NUM_ROWS, WIDTH = 9000, 700, 150, 160
FIELDS = ("input_ids", "positions", "slots", "rows", "kv_lens", "ancestors", "tree_starts")
SHAPES = (
    TreeShape(1, 4, 4),
    TreeShape(2, 7, 16),
    TreeShape(4, 4, 31),
    TreeShape(8, 3, 63),
    TreeShape(8, 9, 63),
)
RARE = (TreeShape(3, 1, 2), TreeShape(10, 3, 59), TreeShape(16, 5, 20))
CASES = {
    f"{shape.topk} by {shape.depth}, {count} requests, {kind}": (shape, count, kind)
    for shape in (*SHAPES, *RARE)
    for count, kind in ((1, "few values"), (2, "any values"), (7, "few values"), (3, "no numbers"))
    if count < 3 or shape.num_found < 200  # of wide trees the interpreter takes long
}


def first_step(count: int, width: int, generator: torch.Generator, device: str) -> ForwardBatch:
    """Makes the first step of requests at different places, of which some are padding."""

    def drawn(most: int) -> torch.Tensor:
        return torch.randint(1, most, (count,), generator=generator).to(device)

    positions = drawn(90)
    return ForwardBatch(
        input_ids=drawn(VOCAB),
        positions=positions,
        slots=drawn(1000) * (drawn(6) > 1),
        rows=drawn(NUM_ROWS),
        q_lens=[1] * count,
        kv_lens=positions + 1,
        kv_len_upper_bounds=[99] * count,
        hidden=torch.randn(count, width, generator=generator).to(device),
    )


def children(
    rows: int, topk: int, kind: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and log-probabilities [rows, topk], the best first. Few values are new for each
    step, so that products of more than two are equal for no other reason than equal factors."""
    ids = torch.rand(rows, DRAFT_VOCAB, generator=generator).topk(topk, 1).indices
    if kind == "any values":
        values = -3 * torch.rand(rows, topk, generator=generator)
    else:
        some = torch.tensor([0.0, -torch.inf, *(-3 * torch.rand(2, generator=generator))])
        weights = torch.tensor([1.0, 1.0, 4.0, 4.0])
        picks = weights.multinomial(rows * topk, replacement=True, generator=generator)
        values = some[picks].view(rows, topk)
    values = values.sort(1, descending=True).values
    if kind == "no numbers":
        values[torch.rand(rows, generator=generator) < 0.3] = torch.nan
    return ids, values


def arguments_of(
    shape: TreeShape, count: int, device: str, width: int = 40, seed: int = 0
) -> tuple[TreeShape, torch.Tensor, torch.Tensor | None, ForwardBatch]:
    """Makes the arguments of a `TreeSearch`; one request's head has the target's ids."""
    generator = torch.Generator().manual_seed(seed)
    first = first_step(count, width, generator, device)
    table = torch.randint(1, 9999, (NUM_ROWS, WIDTH), generator=generator, dtype=torch.int32)
    target_ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].to(device)
    return shape, table.to(device), target_ids if count > 1 else None, first


def wrong_parts(
    search: Callable[..., TreeSearch], shape: TreeShape, count: int, kind: str, device: str
) -> list[str]:
    """Names the parts that differ from trees that torch finds of the same children."""
    generator = torch.Generator().manual_seed(count + 10 * shape.num_found)
    width = 1500 if count == 2 else 40
    arguments = arguments_of(shape, count, device, width, seed=count)
    ours, right = search(*arguments), TorchTreeSearch(*arguments)
    wrong, num_steps, hidden = [], 0, arguments[-1].hidden
    assert hidden is not None
    while True:
        ids, logprobs = children(len(hidden), shape.topk, kind, generator)
        given = ids.to(device), logprobs.to(device), hidden
        step, right_step = ours.grow(*given), right.grow(*given)
        if step is None or right_step is None:
            assert step is right_step
            break
        wrong += [
            f"{name} of step {num_steps}"
            for name in (*FIELDS, "hidden")
            if not torch.equal(getattr(step, name), getattr(right_step, name))
        ]
        assert step.q_lens == right_step.q_lens
        assert step.kv_len_upper_bounds == right_step.kv_len_upper_bounds
        num_steps += 1
        hidden = torch.randn(len(step.input_ids), width, generator=generator).to(device)
    assert num_steps == shape.num_steps
    mine, his = ours.trees(), right.trees()
    for name in ("token_ids", "parents", "fed_ids", "ancestors", "slots"):
        if not torch.equal(getattr(mine, name), getattr(his, name)):
            wrong.append(name)
    if not torch.allclose(mine.scores, his.scores, rtol=2e-5, atol=0):
        wrong.append("scores")
    return wrong


def main(name: str) -> None:
    torch.set_num_threads(1)
    search = load(OPERATIONS[name].trees)
    for case, (shape, count, kind) in asked(CASES).items():
        wrong = wrong_parts(search, shape, count, kind, "cpu")
        print(json.dumps([case, "; ".join(wrong)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
