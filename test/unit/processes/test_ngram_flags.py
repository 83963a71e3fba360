"""The flags of NGRAM: what a server is made of, and what is refused by name."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.environ import Environ
from sglang.srt.layers.attention.torch_native_backend import TorchNativeBackend
from sglang.srt.model_config import resolve_model_path
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.speculative.drafter_configs import NgramConfig, NgramLimits, PairConfig
from sglang.srt.speculative.drafter_options import AcceptThresholds
from sglang.srt.speculative.ngram_worker import num_branches
from speculation_flags_cases import refusal, resolved

BREADTH = "--speculative-ngram-max-bfs-breadth"
CORPUS = "--speculative-ngram-external-corpus-path"


def config_of(target: Path, environ: Environ | None = None, **flags: Any) -> NgramConfig:
    config = resolved(target, environ, algorithm="ngram", **flags)
    assert config.drafter is not None
    assert config.drafter.name == "ngram"
    options = config.drafter.options
    assert isinstance(options, NgramConfig)
    return options


def test_a_chain_of_eleven_drafts_by_load_is_the_default(target: Path) -> None:
    config = resolved(target, algorithm="NGRAM", mtp_mask_token_id=5)
    needs, execution = config.needs, config.execution
    assert (needs.max_drafts, needs.max_rows, needs.max_slots) == (11, 12, 12)
    assert needs.needs_prices
    assert needs.suppressed_token_ids == (5,)
    assert not needs.has_trees
    assert set(needs.rounds) == set(needs.tiers) == {0, 1, 2, 3, 5, 9, 11}
    assert not drafter_models(config.drafter, execution)
    assert execution.max_decode_rows == 12
    options = config_of(target)
    assert options.limits == NgramLimits(1, 18)
    assert options.capacity is None
    assert options.rounds.step_width.lookahead_rows == 0


@pytest.mark.parametrize(
    ("flags", "simulated", "max_drafts", "policy"),
    [
        ({"num_draft_tokens": 5}, None, 4, "matched"),
        ({"num_steps": 3}, None, 3, "matched"),
        ({"num_steps": 3, "num_draft_tokens": 8}, None, 7, "matched"),
        ({"load_aware": "off"}, None, 11, "fixed"),
        ({}, 2.5, 11, "fixed"),
        ({"ngram_max_bfs_breadth": 3}, None, 11, "matched"),
        ({"ngram_max_bfs_breadth": 3, "load_aware": "on"}, None, 11, "matched"),
        ({"ngram_max_bfs_breadth": 3, "load_aware": "off"}, None, 11, "fixed"),
    ],
)
def test_how_many_tokens_are_drafted(
    target: Path, flags: dict[str, Any], simulated: float | None, max_drafts: int, policy: str
) -> None:
    options = config_of(target, Environ(simulated_accept_len=simulated), **flags)
    assert options.rounds.num_steps == options.rounds.num_free == max_drafts
    assert options.rounds.tier_policy == policy


def test_a_tree_has_any_number_of_nodes_up_to_those_of_a_chain(target: Path) -> None:
    config = resolved(target, algorithm="NGRAM", ngram_max_bfs_breadth=4)
    needs = config.needs
    assert needs.has_trees
    assert needs.needs_prices
    assert (needs.max_drafts, needs.max_slots) == (11, 12)
    assert set(needs.rounds) == set(needs.tiers) == {0, 1, 2, 3, 5, 9, 11}
    assert (config.scheduler.num_draft_steps, config.scheduler.num_tree_tokens) == (11, 0)


def test_trees_take_tile_spec_and_accept_thresholds(target: Path) -> None:
    thresholds = {"accept_threshold_single": 0.4, "accept_threshold_acc": 0.7}
    flags = {"algorithm": "NGRAM", "ngram_max_bfs_breadth": 4, "tile_spec": True}
    config = resolved(target, **flags, **thresholds)
    assert config.drafter is not None
    assert config.drafter.thresholds == AcceptThresholds(0.4, 0.7)
    assert config.drafter.options.rounds.tile_spec_cache is not None
    assert config.needs.has_trees
    assert config.needs.keeps_confidence


def test_limits_follow_from_flags(target: Path) -> None:
    options = config_of(target, ngram_max_trie_depth=6, ngram_capacity=777)
    assert options.limits == NgramLimits(1, 6)
    assert options.capacity == 777
    assert config_of(target, ngram_match_type="BFS").limits == NgramLimits(1, 18)
    assert config_of(target, ngram_match_type="PROB").limits == NgramLimits(1, 18, True)


def test_branches_lie_between_two_numbers(target: Path) -> None:
    assert (config_of(target).min_breadth, config_of(target).breadth) == (1, 1)
    options = config_of(target, ngram_max_bfs_breadth=4)
    assert (options.min_breadth, options.breadth) == (1, 4)
    options = config_of(target, ngram_min_bfs_breadth=3, ngram_max_bfs_breadth=4)
    assert (options.min_breadth, options.breadth) == (3, 4)


def test_adaptive_steps_are_of_draft_models(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    options = config_of(target, adaptive=True, adaptive_strategy="ema")
    assert options.rounds.tier_policy == "matched"
    assert (
        caplog.text.count("--speculative-adaptive has no effect here: with NGRAM the number") == 1
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"eagle_topk": 4}, f"NGRAM drafts trees by {BREADTH}"),
        (
            {"num_draft_tokens": 1},
            "--speculative-num-draft-tokens 1 must be a whole number from 2 to 64",
        ),
        (
            {"num_draft_tokens": 65},
            "--speculative-num-draft-tokens 65 must be a whole number from 2 to 64",
        ),
        ({"num_steps": 0}, "--speculative-num-steps 0 must be a whole number from 1 to 63"),
        (
            {"ngram_max_trie_depth": 0},
            "--speculative-ngram-max-trie-depth 0 must be a whole number from 1 to 64",
        ),
        ({"ngram_max_bfs_breadth": 0}, f"{BREADTH} 0 must be a whole number from 1 to 63"),
        (
            {"ngram_min_bfs_breadth": 0},
            "--speculative-ngram-min-bfs-breadth 0 must be a whole number from 1 to 63",
        ),
        ({"ngram_min_bfs_breadth": 1.5}, "min-bfs-breadth 1.5 must be a whole number from 1 to 63"),
        ({"ngram_max_trie_depth": 1.5}, "max-trie-depth 1.5 must be a whole number from 1 to 64"),
        (
            {"ngram_min_bfs_breadth": 3, "ngram_max_bfs_breadth": 2},
            f"-min-bfs-breadth 3 is more than {BREADTH} 2; lower it, or raise the other",
        ),
        ({"ngram_min_bfs_breadth": 2}, f"-min-bfs-breadth 2 is more than {BREADTH} 1"),
        ({"ngram_external_sam_budget": 3}, f"sam-budget needs {CORPUS}"),
        ({"ngram_external_corpus_max_tokens": 9}, f"corpus-max-tokens needs {CORPUS}"),
        ({"ngram_capacity": 1}, "--speculative-ngram-capacity 1 must be a whole number from 2 to"),
        ({"adaptive_strategy": "ema"}, "--speculative-adaptive-strategy needs --speculative-ad"),
        ({"adaptive_config": "aggressive"}, "leave it out: NGRAM follows --speculative-load-aware"),
    ],
)
def test_flags_that_cannot_be_met_are_named(target: Path, flags: dict[str, Any], said: str) -> None:
    assert said in refusal(target, **{"algorithm": "NGRAM", **flags})


@pytest.mark.parametrize(("shortest", "longest"), [(1, 18), (1, 2), (1, 64), (2, 3), (1, 1)])
@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 10), (3, 4), (5, 5), (1, 63)])
def test_longer_matches_have_fewer_branches(
    shortest: int, longest: int, least: int, most: int
) -> None:
    lens = list(range(shortest, longest + 1))
    limits = NgramLimits(shortest, longest)
    counts = num_branches(torch.tensor(lens), least, most, limits).tolist()
    assert counts[0] == most
    assert longest == shortest or counts[-1] == least
    assert counts == sorted(counts, reverse=True)
    for length, count in zip(lens, counts, strict=True):
        wished = most - Fraction((most - least) * (length - shortest), max(1, longest - shortest))
        assert abs(count - wished) <= Fraction(1, 2)
    assert num_branches(torch.tensor([0]), least, most, limits).tolist() == [most]


def test_a_benchmark_says_how_many_drafts_are_verified(target: Path) -> None:
    options = config_of(target, Environ(tile_spec_drafts=1.5))
    assert options.rounds.tile_spec_drafts == 1.5
    assert config_of(target).rounds.tile_spec_drafts is None


def test_attention_without_trees_is_refused_with_the_flag_that_helps(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = replace(TorchNativeBackend.capabilities(), tree_masks=False)
    monkeypatch.setattr(TorchNativeBackend, "capabilities", lambda: without)
    text = refusal(target, is_early=False, algorithm="NGRAM", ngram_max_bfs_breadth=2)
    assert f"{BREADTH} 1" in text
    assert resolved(target, algorithm="NGRAM", ngram_max_bfs_breadth=1).drafter is not None


@pytest.mark.parametrize("names", ["EAGLE3,NGRAM", "ngram, eagle3", "STANDALONE,NGRAM"])
def test_a_drafter_with_a_model_beside_n_grams(names: str) -> None:
    """All is planned as for that drafter alone; flags of both are taken, and requests may name
    either."""
    of_draft = "STANDALONE" in names
    alone = {
        "algorithm": "STANDALONE" if of_draft else "EAGLE3",
        "draft_model_path": "demo-draft" if of_draft else "demo-eagle3",
        "num_steps": 4,
        "accept_threshold_acc": 0.5,
    }
    demo = Path(resolve_model_path("demo"))
    both = {**alone, "algorithm": names, "ngram_capacity": 777, "ngram_max_trie_depth": 6}
    config, other = resolved(demo, **both), resolved(demo, **alone)
    drafter = config.drafter
    assert drafter is not None
    model, kind = ("standalone",) * 2 if of_draft else ("eagle3", "eagle")
    assert drafter.names == {model: model, kind: model, "ngram": "ngram"}
    assert drafter.thresholds == AcceptThresholds(1.0, 0.5)
    options = drafter.options
    assert isinstance(options, PairConfig)
    assert other.drafter is not None
    assert options.drafter.options == other.drafter.options
    assert options.ngrams.limits == NgramLimits(1, 6)
    assert options.ngrams.capacity == 777
    assert config.needs == replace(other.needs, keeps_confidence=True)
    models = drafter_models(drafter, config.execution)
    assert models == drafter_models(other.drafter, other.execution)
