"""Rows of confirmed paths found by a set of operations, against a loop over lists.

python test/support/path_rows_cases.py triton      # under Triton's interpreter
"""

from __future__ import annotations

import json
import random
import sys
from itertools import accumulate

import torch

from interpreted import asked
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.registry import OPERATIONS, load
from sglang.srt.speculative.kept_paths import FindPathRows, KeptPaths, PathRows
from sglang.srt.step.step_ops import NUM_COUNTS, NUM_PROMPT, Q_LEN, Q_START

NUM_ROWS, WIDTH, PADDING = 130, 900, 3
CASES = {
    f"{count} requests, {kind}": (count, kind)
    for count in (1, 2, 7, 64, 65, 128)
    for kind in ("trees", "prompts too", "packed")
}


def case_of(
    count: int, kind: str, chooser: random.Random, device: str = "cpu"
) -> tuple[KeptPaths, torch.Tensor, PathRows]:
    """Paths, a page table and what is right."""
    most, width = chooser.choice([(1, 1), (4, 4), (5, 9)])
    limit = chooser.choice([3, most, 16])
    prompts = [
        chooser.choice([0, chooser.randint(1, 300)]) if kind == "prompts too" else 0
        for _ in range(count)
    ]
    at_most = [prompt or limit for prompt in prompts]
    q_lens = [chooser.randint(1, n) for n in at_most] if kind == "packed" else at_most
    kept = [prompt or min(n, most) for prompt, n in zip(prompts, at_most, strict=True)]
    starts = list(accumulate(q_lens, initial=0))[:count]
    lens = [chooser.randint(0, 400) for _ in q_lens]
    total = sum(q_lens) + PADDING
    positions = [chooser.randrange(WIDTH) for _ in range(total)]
    for start, before in zip(starts, lens, strict=True):
        positions[start] = before
    input_ids = [chooser.randrange(9999) for _ in range(total)]
    rows = [chooser.randrange(NUM_ROWS) for _ in q_lens]
    path = [
        [0, *(chooser.choice([-1, chooser.randrange(n)]) for _ in range(width - 1))] for n in q_lens
    ]
    generator = torch.Generator().manual_seed(chooser.randrange(1 << 30))
    table = torch.randint(1, 9999, (NUM_ROWS, WIDTH), generator=generator, dtype=torch.int32)

    def numbers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device)

    per_request = torch.full((NUM_COUNTS, count), -5, device=device)
    per_request[Q_LEN], per_request[Q_START] = numbers(q_lens), numbers(starts)
    per_request[NUM_PROMPT] = numbers(prompts)
    kv_lens = [before + n for before, n in zip(lens, q_lens, strict=True)]
    inputs = ForwardBatch(
        input_ids=numbers(input_ids),
        positions=numbers(positions),
        slots=numbers(input_ids),
        rows=numbers(rows),
        q_lens=at_most,
        kv_lens=numbers(kv_lens),
        kv_len_upper_bounds=kv_lens,
    )
    found: list[tuple[int, int, int, int]] = []
    for request, count_kept in enumerate(kept):
        for offset in range(count_kept):
            node = offset if prompts[request] else max(path[request][min(offset, width - 1)], 0)
            source, position = starts[request] + node, lens[request] + offset
            slot = int(table[rows[request], position])
            found.append((input_ids[source], position, slot, source))
    ends = list(accumulate(kept))
    right = PathRows(
        *(torch.tensor(column) for column in zip(*found, strict=True)),
        kv_lens=torch.tensor([a + b for a, b in zip(lens, kept, strict=True)]),
        starts=torch.tensor([end - n for end, n in zip(ends, kept, strict=True)]),
        ends=torch.tensor(ends),
    )
    known = numbers(kept) if kind == "packed" else None
    paths = torch.tensor(path, dtype=torch.int32, device=device)
    kept_paths = KeptPaths(inputs, per_request, paths, most, kept, known)
    return kept_paths, table.to(device), right


def wrong_parts(find: FindPathRows, count: int, kind: str, device: str) -> list[str]:
    """Names the parts of the result that differ from lists."""
    chooser, wrong = random.Random(f"{count} {kind}"), []
    for _ in range(4 if count < 10 else 2):
        kept_paths, table, right = case_of(count, kind, chooser, device)
        found = find(kept_paths, table)
        for name in PathRows._fields:
            mine, his = getattr(found, name), getattr(right, name)
            if mine.dtype != torch.int64 or not torch.equal(mine.cpu(), his):
                wrong.append(name)
    return wrong


def main(name: str) -> None:
    torch.set_num_threads(1)
    find = load(OPERATIONS[name].paths)
    for case, (count, kind) in asked(CASES).items():
        print(json.dumps([case, "; ".join(wrong_parts(find, count, kind, "cpu"))]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
