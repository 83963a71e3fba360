"""Cases of how pairs of rows and experts are ordered, for Triton's interpreter.

As a program it runs them on a CPU and prints a line of JSON for each; TRITON_INTERPRET=1 must be in
the environment, as for `layer_ops_cases.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from unittest.mock import patch

import torch

from interpreted import asked
from sglang.srt.layers.ops import expert_products
from sglang.srt.layers.ops.chosen_experts import choose_experts
from sglang.srt.layers.ops.expert_products import Pairs, Tile, choose_pairs, product
from sglang.srt.layers.triton_launch import dependent_launch

CPU = torch.device("cpu")


def _launch(num_programs: int) -> dict[str, int]:
    return dependent_launch(CPU, num_programs)


def pairs_case(
    num_rows: int, num_experts: int, num_chosen: int, block_m: int, normalizes: bool
) -> Callable[[], float]:
    """Makes a case that looks up the experts of each pair in its block; only the even experts are
    chosen, as far as there are enough. Its error is that of the weights."""

    def run() -> float:
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(num_rows, num_experts, generator=generator).argsort(-1) / 8
        if num_chosen <= num_experts // 2:
            scores[:, 1::2] -= num_experts
        x = torch.zeros(num_rows, 1)
        pairs = choose_pairs(x, scores, num_chosen, normalizes, block_m, _launch)
        expected = choose_experts(scores, num_chosen, normalizes)
        found = torch.full_like(pairs.order, -1)
        for expert, first, count in pairs.blocks[:, pairs.blocks[2] > 0].T.tolist():
            assert count <= block_m, "A block has more pairs than rows."
            own = pairs.order[first : first + count]
            assert bool((own.diff() > 0).all()), "Pairs of an expert are not in their order."
            assert bool((found[own] == -1).all()), "A pair is in two blocks."
            found[own] = expert
        assert torch.equal(found.view_as(expected.experts).long(), expected.experts)
        counts = found.bincount(minlength=num_experts)
        needed = int((-(-counts // block_m)).sum())
        assert int((pairs.blocks[2] > 0).sum()) == needed, "A block is not full."
        return float((pairs.weights - expected.weights).abs().max())

    return run


def equal_scores() -> float:
    """Chooses the first ones of equal scores, which all are odds that `choose_experts` chooses."""
    scores = torch.randint(0, 3, (20, 9), generator=torch.Generator().manual_seed(0)).float()
    pairs = choose_pairs(torch.zeros(20, 1), scores, 4, True, 16, _launch)
    found = torch.empty(80, dtype=torch.int64)
    for expert, first, count in pairs.blocks[:, pairs.blocks[2] > 0].T.tolist():
        found[pairs.order[first : first + count].long()] = expert
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :4]
    assert torch.equal(found.view(20, 4), expected)
    return float((pairs.weights - choose_experts(scores, 4, True).weights).abs().max())


def no_numbers() -> float:
    """Chooses some experts, each once, where scores are no numbers."""
    scores = torch.full((3, 6), float("nan"))
    pairs = choose_pairs(torch.zeros(3, 1), scores, 2, True, 16, _launch)
    used = pairs.blocks[:, pairs.blocks[2] > 0]
    assert sorted(pairs.order.tolist()) == [*range(6)]
    assert bool(((used[0] >= 0) & (used[0] < 6)).all())
    assert bool(pairs.weights.isnan().all())
    return 0.0


def unwritten_pairs() -> float:
    """Reads and writes nothing out of bounds for pairs that no kernel has made."""
    generator = torch.Generator().manual_seed(0)
    for least, most in ((-(1 << 31), (1 << 31) - 1), (-5, 30)):
        blocks, order = (
            torch.randint(least, most, shape, generator=generator).int() for shape in ((3, 9), (8,))
        )
        pairs = Pairs(torch.zeros(4, 2), order, blocks)
        for is_gated, rows in ((True, 4), (False, 8)):
            weight = torch.zeros(5, 32, 16)
            product(torch.zeros(rows, 16), weight, pairs, 16, Tile(16, 16, 4, 1), _launch, is_gated)
    return 0.0


CASES: dict[str, Callable[[], float]] = {
    "one row": pairs_case(1, 40, 8, 16, True),
    "one expert a row": pairs_case(37, 6, 1, 16, False),
    "all experts": pairs_case(9, 5, 5, 16, True),
    "more pairs than are read at once": patch.multiple(expert_products, FEW_PAIRS=64, CHUNK=128)(
        pairs_case(40, 40, 8, 32, False)
    ),
    "equal scores": equal_scores,
    "no numbers": no_numbers,
    "unwritten pairs": unwritten_pairs,
}


def main(_: str) -> None:
    torch.set_num_threads(1)
    for name, case in asked(CASES).items():
        print(json.dumps([name, case()]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
