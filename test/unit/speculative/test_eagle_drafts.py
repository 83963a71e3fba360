"""The drafts of a head are what it says of the true sequence, by an oracle without a cache: behind
chunks, cached prefixes, retractions, drafts that were confirmed and drafts that were not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compared_drafter import NUM_STEPS, compared, compared_drafters, write_noisy_models
from draft_heads import BLOCK_SIZE, DFLASH, EAGLE, EAGLE3, FILE, P_EAGLE
from drafted_serving import Drafted, params_of, prompts
from eagle_models import CONTEXT
from fake_flashinfer import serve_with_fake
from jumping_tier import JUMPING, RESTING, jumping_tiers
from request_choices import NGRAMS, OFF, choose_in_turn
from sglang.srt.sampling.sampling_params import Speculative
from sglang.srt.step.draft_shapes import TreeShape
from tile_spec_rounds import RandomBudgets
from utils import Setup

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    with compared_drafters(), jumping_tiers():
        yield write_noisy_models(tmp_path_factory.mktemp("eagle"))


def serve_twice(harness: Drafted) -> None:
    """All prompts, then longer ones."""
    for index, prompt in enumerate(prompts()):
        harness.submit(prompt, **params_of(index))
        if index % 3 == 2:
            harness.step()
    harness.run()
    for index, prompt in enumerate(prompts()):
        harness.submit([*prompt, 5, 7], **params_of(index))
    harness.run()
    harness.check()


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "page_size", "chunk", "retract_interval", "use_radix_cache", "policy"),
    [
        (EAGLE, 1, 6, 0, True, "fixed"),
        (EAGLE3, 1, 6, 0, True, "fixed"),
        (EAGLE3, 16, 2048, 3, True, "fixed"),
        (EAGLE, 16, 6, 0, False, "fixed"),
        (EAGLE, 1, 6, 0, True, JUMPING),
        (EAGLE3, 1, 6, 0, True, JUMPING),
        (EAGLE3, 1, 6, 0, True, RESTING),
        (EAGLE, 16, 2048, 3, True, RESTING),
        (P_EAGLE, 1, 6, 0, True, "fixed"),
        (P_EAGLE, 16, 2048, 3, True, RESTING),
        (DFLASH, 1, 6, 0, True, RESTING),
        (DFLASH, 16, 2048, 3, True, "fixed"),
    ],
)
def test_drafts_are_what_the_head_says_of_the_true_sequence(
    paths: dict[str, Path],
    kind: str,
    page_size: int,
    chunk: int,
    retract_interval: int,
    use_radix_cache: bool,
    policy: str,
) -> None:
    """Also behind steps in which nothing was drafted, and behind tokens that the head was not
    fed: then it is what the head says of what comes after them."""
    setup = Setup(
        num_pages=1024 // page_size,
        page_size=page_size,
        chunked_prefill_size=chunk,
        retract_interval=retract_interval,
        use_radix_cache=use_radix_cache,
        context_len=CONTEXT,
        max_decode_rows=1 + NUM_STEPS + BLOCK_SIZE,
    )
    harness, drafter = compared(paths, kind, setup, policy)
    serve_twice(harness)
    seen = drafter.seen
    assert seen["compared"] > (100 if policy == "fixed" else 50), seen
    assert seen["confirmed"] > 20, seen
    assert seen["rejected"] > 20, seen
    assert (seen["plain"] > 15) == (policy != "fixed"), seen
    for what, least in (("behind tokens left out", 30), ("behind cached ones left out", 4)):
        assert (seen[what] > least) == (policy == RESTING), seen
    assert seen["ties"] <= seen["compared"] // 50, seen
    assert (seen["chunks"] > 10) == (chunk == 6), seen
    assert (seen["behind cached"] > 20) == use_radix_cache, seen
    assert (seen["publishers' tokens"] > 0) == (use_radix_cache and kind != DFLASH), seen
    if retract_interval:
        assert any(each.num_retractions for each in harness.outputs.values())


def test_tokens_whose_keys_are_zero_are_not_taken_for_left_out(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """As keys of 8 bits may be, which small numbers become."""
    head = tmp_path / "head"
    shutil.copytree(paths[EAGLE3], head)
    weights = load_file(head / FILE)
    [name] = [name for name in weights if name.endswith("k_proj.weight")]
    weights[name].zero_()
    save_file(weights, head / FILE)
    setup = Setup(
        num_pages=1024,
        page_size=1,
        chunked_prefill_size=6,
        retract_interval=0,
        use_radix_cache=True,
        context_len=CONTEXT,
        max_decode_rows=2 * NUM_STEPS,
    )
    harness, drafter = compared({**paths, EAGLE3: head}, EAGLE3, setup, RESTING)
    serve_twice(harness)
    seen = drafter.seen
    assert seen["behind cached"] > 20, seen
    assert seen["behind cached ones left out"] > 4, seen


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
@pytest.mark.parametrize(
    ("shape", "page_size", "chunk", "retract_interval", "use_radix_cache"),
    [
        (TreeShape(topk=3, depth=3, num_drafts=8), 1, 6, 0, True),
        (TreeShape(topk=2, depth=4, num_drafts=6), 16, 2048, 3, False),
    ],
)
def test_trees_are_what_beams_over_the_true_sequence_find(
    paths: dict[str, Path],
    kind: str,
    shape: TreeShape,
    page_size: int,
    chunk: int,
    retract_interval: int,
    use_radix_cache: bool,
) -> None:
    """Nodes, parents and scores."""
    setup = Setup(
        num_pages=1024 // page_size,
        page_size=page_size,
        chunked_prefill_size=chunk,
        retract_interval=retract_interval,
        use_radix_cache=use_radix_cache,
        context_len=CONTEXT,
        max_decode_rows=1 + shape.num_drafts + shape.num_slots,
    )
    harness, drafter = compared(paths, kind, setup, tree=shape)
    serve_twice(harness)
    seen = drafter.seen
    assert seen["short"] == 0, seen
    assert seen["compared"] > 80, seen
    assert seen["branches"] > 50, seen
    assert seen["deep"] > 0, seen
    assert min(seen[name] for name in ("confirmed", "rejected")) > 20, seen
    assert seen["ties"] <= seen["compared"] // 50, seen


TAKE_NONE = (OFF, Speculative(), Speculative(max_drafts=2), Speculative())
TAKE_NO_MODELS = (
    NGRAMS,
    Speculative(),
    OFF,
    Speculative(max_drafts=2),
    Speculative(drafter="eagle"),
)


@pytest.mark.parametrize(
    ("kind", "page_size", "choices", "over"),
    [
        (DFLASH, 1, TAKE_NONE, "torch"),
        (EAGLE3, 1, TAKE_NO_MODELS, "steps that are cut"),
        ("trees", 16, TAKE_NONE, "FlashInfer"),
        *(
            pytest.param(*case, marks=pytest.mark.long_matrix)
            for case in (
                (EAGLE3, 1, TAKE_NONE, "torch"),
                ("trees", 16, TAKE_NONE, "torch"),
                (EAGLE3, 1, TAKE_NO_MODELS, "torch"),
                (DFLASH, 16, TAKE_NO_MODELS, "torch"),
                (EAGLE3, 16, TAKE_NO_MODELS, "FlashInfer"),
                (DFLASH, 16, TAKE_NO_MODELS, "FlashInfer"),
            )
        ),
    ],
)
def test_so_they_are_beside_and_behind_requests_that_take_no_drafts_of_it(
    paths: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    page_size: int,
    choices: tuple[Speculative, ...],
    over: str,
) -> None:
    """The head is fed none of the rows of those who take no drafts, or those of n-grams, in steps
    that are cut too. It has no KV of theirs, so who shares a prefix of theirs is drafted for by
    what comes after it."""
    tree = TreeShape(topk=2, depth=3, num_drafts=6) if kind == "trees" else None
    setup = Setup(
        num_pages=1024 // page_size,
        page_size=page_size,
        chunked_prefill_size=40,
        use_radix_cache=True,
        context_len=CONTEXT,
        max_decode_rows=16,
    )
    options = {
        "has_ngrams": NGRAMS in choices,
        "prices": tmp_path if over == "steps that are cut" else None,
    }
    wrappers = serve_with_fake(monkeypatch) if over == "FlashInfer" else []
    with RandomBudgets(0).chosen():
        harness, drafter = compared(paths, EAGLE3 if tree else kind, setup, tree=tree, **options)
        choose_in_turn(harness, choices)
        serve_twice(harness)
    seen = drafter.seen
    assert seen["compared"] > 60, seen
    assert seen["confirmed"] > 10, seen
    assert seen["behind cached ones left out"] > 4, seen
    assert any(wrapper.num_plans for wrapper in wrappers) == (over == "FlashInfer")
    assert (seen["short"] > 10) == (tree is not None), seen
    assert seen["ties"] <= seen["compared"] // 50, seen
