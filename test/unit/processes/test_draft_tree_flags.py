"""The flags of trees of drafts: what a server is made of, and what is refused by name."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draft_heads import write_eagle, write_eagle3
from drafter_checks import make_drafter_runners
from sglang.srt.environ import Environ
from sglang.srt.layers.attention.torch_native_backend import TorchNativeBackend
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.runtime_config import RuntimeConfig, with_drafter
from sglang.srt.processes.worker_factory import drafter_models, make_worker
from sglang.srt.step.draft_shapes import TreeShape
from speculation_flags_cases import refusal, resolved
from utils import Setup

WRITERS = {"EAGLE": write_eagle, "EAGLE3": write_eagle3}


def tree_config(target: Path, head: Path, algorithm: str = "EAGLE", **flags: Any) -> RuntimeConfig:
    folder = str(WRITERS[algorithm](head))
    return resolved(target, algorithm=algorithm, draft_model_path=folder, **flags)


def change_torch_native(monkeypatch: pytest.MonkeyPatch, **capabilities: Any) -> None:
    changed = replace(TorchNativeBackend.capabilities(), **capabilities)
    monkeypatch.setattr(TorchNativeBackend, "capabilities", classmethod(lambda cls: changed))


@pytest.mark.parametrize("algorithm", WRITERS)
def test_trees_and_what_they_need_follow_from_the_flags(
    target: Path, tmp_path: Path, algorithm: str
) -> None:
    flags = {"eagle_topk": 4, "num_steps": 3, "num_draft_tokens": 16}
    config = tree_config(target, tmp_path, algorithm, **flags)
    assert config.drafter is not None
    shape = TreeShape(topk=4, depth=3, num_drafts=15)
    assert config.drafter.options.rounds.tree == shape
    needs, execution, scheduler = config.needs, config.execution, config.scheduler
    assert (needs.has_trees, needs.max_drafts, needs.max_rows) == (True, 15, 16)
    assert (needs.max_confirmed, needs.max_slots, needs.needs_prices) == (3, 16, False)
    assert needs.rounds.keys() == {15}
    assert (execution.max_decode_rows, execution.captures_trees) == (16, True)
    assert (scheduler.num_draft_steps, scheduler.num_tree_tokens) == (3, 16)
    [head] = drafter_models(config.drafter, execution)
    assert set(head.draft_steps) == {shape}
    assert not head.captures_trees


@pytest.mark.parametrize(
    ("flags", "shape", "slots"),
    [
        ({"eagle_topk": 4}, TreeShape(4, 5, 7), 1 + 5 + 16),
        ({"eagle_topk": 2, "num_steps": 1}, TreeShape(2, 1, 2), 3),
        ({"eagle_topk": 2, "num_steps": 2}, TreeShape(2, 2, 6), 7),
        ({"eagle_topk": 8, "num_steps": 9, "num_draft_tokens": 64}, TreeShape(8, 9, 63), 74),
        ({"eagle_topk": 10, "num_steps": 7, "num_draft_tokens": 3}, TreeShape(10, 7, 2), 63),
        ({"eagle_topk": 64, "num_steps": 1, "num_draft_tokens": 64}, TreeShape(64, 1, 63), 64),
        ({"eagle_topk": 4, "load_aware": "off"}, TreeShape(4, 5, 7), 1 + 5 + 16),
    ],
)
def test_what_is_left_out_has_defaults(
    target: Path, tmp_path: Path, flags: dict[str, int], shape: TreeShape, slots: int
) -> None:
    """Slots: for all rows verified, and for draft steps behind the rows that may be kept."""
    config = tree_config(target, tmp_path, **flags)
    assert config.drafter is not None
    assert config.drafter.options.rounds.tree == shape
    assert config.needs.max_slots == slots


@pytest.mark.parametrize("flags", [{}, {"eagle_topk": 1}, {"eagle_topk": 1, "num_steps": 5}])
def test_chains_are_no_trees(target: Path, tmp_path: Path, flags: dict[str, int]) -> None:
    config = tree_config(target, tmp_path, **flags)
    assert config.drafter is not None
    assert config.drafter.options.rounds.tree is None
    assert not config.needs.has_trees
    assert config.scheduler.num_tree_tokens == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"eagle_topk": 0}, "--speculative-eagle-topk 0 must be a whole number from 1 to 64"),
        (
            {"eagle_topk": 4, "num_steps": 0},
            "--speculative-num-steps 0 must be a whole number from 1 to 63",
        ),
        (
            {"eagle_topk": 8, "num_steps": 10},
            "lower --speculative-num-steps 10 to 9, or use",
        ),
        (
            {"eagle_topk": 65, "num_steps": 1},
            "--speculative-eagle-topk 65 must be a whole number from 1 to 64",
        ),
        (
            {"eagle_topk": 4, "num_steps": 1, "num_draft_tokens": 6},
            "tokens 6 must be 2 to 5",
        ),
        (
            {"eagle_topk": 4, "num_draft_tokens": 65},
            "num-draft-tokens 65 must be a whole number from 2 to 64",
        ),
        (
            {"eagle_topk": 4, "num_draft_tokens": 1},
            "num-draft-tokens 1 must be a whole number from 2 to 64",
        ),
        ({"eagle_topk": 4, "load_aware": "on"}, "--speculative-load-aware on .* leave it out, or"),
    ],
)
def test_trees_that_cannot_be_had_are_refused(
    target: Path, flags: dict[str, Any], said: str
) -> None:
    text = refusal(target, algorithm="EAGLE", draft_model_path="x", **flags)
    assert all(part in text for part in said.split(" .* ")), text


def test_a_head_of_few_tokens_has_no_wide_trees(target: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text("[1, 5, 7]")
    head = str(write_eagle(tmp_path / "head"))
    flags = {"algorithm": "EAGLE", "draft_model_path": head}
    flags["token_map"] = str(tmp_path / "map.json")
    said = refusal(target, **flags, eagle_topk=4)
    assert said == "--speculative-eagle-topk 4: the head drafts 3 different tokens alone; lower it."
    resolved(target, **flags, eagle_topk=3)


def test_tile_spec_cuts_trees(target: Path, tmp_path: Path) -> None:
    """And measures what they cost."""
    config = tree_config(target, tmp_path, eagle_topk=4)
    assert (config.needs.needs_prices, config.needs.keeps_confidence) == (False, False)
    config = tree_config(target, tmp_path, eagle_topk=4, tile_spec=True)
    assert config.drafter is not None
    rounds = config.drafter.options.rounds
    assert rounds.tile_spec_cache == config.needs.price_cache == Path("tile_spec/cache")
    assert (rounds.tier_policy, rounds.tree) == ("fixed", TreeShape(4, 5, 7))
    assert config.needs.needs_prices
    assert (config.needs.keeps_confidence, config.needs.has_trees) == (True, True)


@pytest.mark.parametrize("strategy", [None, "throughput"])
def test_adaptive_steps_are_of_chains_and_trees_stay_as_they_are(
    target: Path, tmp_path: Path, strategy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    flags = {"eagle_topk": 4, "adaptive": True, "adaptive_strategy": strategy}
    config = tree_config(target, tmp_path, **flags)
    assert config.drafter is not None
    rounds = config.drafter.options.rounds
    assert (rounds.tier_policy, rounds.adaptive, rounds.tree) == ("fixed", None, TreeShape(4, 5, 7))
    [warning] = [text for text in caplog.messages if "adaptive" in text]
    assert "with --speculative-eagle-topk 4 every step drafts trees of the same size" in warning


def test_a_backend_without_masks_is_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_torch_native(monkeypatch, tree_masks=False)
    head = str(write_eagle(tmp_path))
    flags = {"algorithm": "EAGLE", "draft_model_path": head}
    said = refusal(target, is_early=False, **flags, eagle_topk=2)
    assert "--attention-backend torch_native has no masks" in said
    resolved(target, **flags)


def test_acceptance_of_trees_cannot_be_simulated(target: Path, tmp_path: Path) -> None:
    environ = Environ(simulated_accept_len=2.0)
    config = tree_config(target, tmp_path, eagle_topk=2, environ=environ)
    runners, _ = make_drafter_runners(target, Setup(), config.drafter)
    with pytest.raises(ValueError, match=r"SGLANG_SIMULATE_ACC_LEN=2 .* of drafts in chains"):
        make_worker(runners, config.drafter, simulated_accept_len=2.0)


def test_masks_larger_than_the_backend_takes_are_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of all rows of a step, prompts too, and of all keys of each row's request."""
    config = tree_config(target, tmp_path, eagle_topk=2)
    drafter, execution = config.drafter, config.execution
    assert drafter is not None
    num_rows = (
        execution.max_prompt_rows + execution.max_running_requests * execution.max_decode_rows
    )
    most = num_rows * execution.context_len

    def without() -> RuntimeConfig:
        """Knows no capabilities yet."""
        return replace(config, drafter=None, execution=replace(execution))

    change_torch_native(monkeypatch, max_mask_entries=most)
    assert with_drafter(without(), drafter).drafter == drafter
    change_torch_native(monkeypatch, max_mask_entries=most - 1)
    with pytest.raises(ConfigError, match=r"torch_native: masks .* lower --chunked-prefill-size"):
        with_drafter(without(), drafter)


def test_flashinfers_masks_are_bounded(target: Path, tmp_path: Path) -> None:
    config = tree_config(target, tmp_path, eagle_topk=2)
    drafter, without = config.drafter, replace(config, drafter=None)
    assert drafter is not None
    long = replace(without.execution, attention_backend="flashinfer", context_len=1 << 20)
    for execution in (replace(long, context_len=4096), replace(long, attention_backend="triton")):
        assert with_drafter(replace(without, execution=execution), drafter).drafter == drafter
    with pytest.raises(ConfigError, match="flashinfer: masks of trees"):
        with_drafter(replace(without, execution=long), drafter)
