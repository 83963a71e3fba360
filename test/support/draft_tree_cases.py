"""Trees that a head drafts by an attention backend, against the same by `TorchNativeBackend`.

python test/support/draft_tree_cases.py triton      # under Triton's interpreter
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from draft_heads import EAGLE, EAGLE3
from head_rounds import HIDDEN_SIZE, WRITERS, make_head
from interpreted import asked
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_executor.draft_tree_passes import DraftedTrees
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.step.draft_shapes import TreeShape
from utils import VOCAB_SIZE, make_random_llama

ROWS = [4, 1, 7]
CASES = {
    f"{kind}, {shape.topk} by {shape.depth}": (kind, shape)
    for kind in (EAGLE, EAGLE3)
    for shape in (TreeShape(2, 4, 7), TreeShape(5, 3, 20))
}


def write_folders(folder: Path) -> Path:
    """`target`, and a head by the name of each kind."""
    make_random_llama(folder / "target", num_hidden_layers=8, tie_word_embeddings=False)
    for kind, write in WRITERS.items():
        write(folder / kind)
    return folder


def first_step(runner: ModelRunner, rows: list[int], seed: int = 0) -> ForwardBatch:
    """Makes the first draft step of requests with some random KV of their own, the same for each
    runner."""
    generator, kv = torch.Generator().manual_seed(seed), runner.kv_pool.kv[0]
    kv.copy_(torch.randn(kv.shape, generator=generator))
    device, table = kv.device, runner.req_to_token_pool.req_to_token
    before = [5 + 3 * row for row in rows]
    positions, tokens = torch.tensor(before), torch.randint(0, VOCAB_SIZE, (len(rows),))
    hidden = torch.randn(len(rows), HIDDEN_SIZE, generator=generator)
    return ForwardBatch(
        input_ids=tokens.to(device),
        positions=positions.to(device),
        slots=table[torch.tensor(rows), positions].long(),
        rows=torch.tensor(rows, device=device),
        q_lens=[1] * len(rows),
        kv_lens=(positions + 1).to(device),
        kv_len_upper_bounds=[count + 1 for count in before],
        hidden=hidden.to(device, kv.dtype),
    )


def copied(trees: DraftedTrees) -> DraftedTrees:
    """Copies drafted trees, so that the next pass does not overwrite them."""
    return DraftedTrees(*(values.clone() for values in trees))


def main(name: str) -> None:
    """A line for each case: the largest error of scores and of KV, 1 where the trees differ."""
    with tempfile.TemporaryDirectory() as place:
        folders = write_folders(Path(place))
        for case, (kind, shape) in asked(CASES).items():
            found = []
            for backend in (name, "torch_native"):
                runner = make_head(
                    *(folders / "target", folders / kind, kind, 16, [shape]),
                    device="cpu",
                    dtype="float32",
                    attention_backend=backend,
                )
                trees = runner.draft_trees(first_step(runner, ROWS), shape)
                kv = runner.kv_pool.kv[0][trees.slots.flatten()]
                found.append((trees, kv))
            (mine, my_kv), (right, kv) = found
            same = torch.equal(mine.token_ids, right.token_ids)
            same &= torch.equal(mine.parents, right.parents)
            gaps = (mine.scores - right.scores).abs().max(), (my_kv - kv).abs().max()
            print(json.dumps([case, float(max(gaps)) if same else 1.0]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
