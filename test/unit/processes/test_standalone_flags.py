"""The flags of STANDALONE: what a server is made of, which draft models are refused by name, and
whether it starts."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_drafter_start import args_for, started, tokens_of

from draft_heads import write_eagle, write_eagle3
from sglang.srt.draft_model_config import check_same_tokens, first_difference
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.model_config import DEMO_MODELS_DIR, ModelPathError
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.speculative.drafter_configs import StandaloneConfig
from speculation_flags_cases import refusal, resolved
from utils import make_random_llama, make_random_model

FLAGS = {"algorithm": "STANDALONE"}
TOKENIZER = DEMO_MODELS_DIR / "tiny-code" / "tokenizer.json"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("draft"), 1, num_hidden_layers=1)


def changed(draft: Path, folder: Path, **entries: Any) -> Path:
    """A copy of a folder with other entries in config.json."""
    shutil.copytree(draft, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return folder


def test_the_draft_model_and_what_it_needs_follow_from_the_flags(target: Path, draft: Path) -> None:
    config = resolved(target, **FLAGS, draft_model_path=str(draft))
    assert config.drafter is not None
    options = config.drafter.options
    assert isinstance(options, StandaloneConfig)
    needs, execution = config.needs, config.execution
    assert (needs.max_drafts, needs.max_rows, needs.max_slots, needs.token_shift) == (3, 4, 7, 0)
    assert needs.tiers == (0, 1, 2, 3)
    assert set(needs.rounds) == {0, 1, 2, 3}
    assert needs.capture == execution.capture == HiddenCapture()
    [model] = drafter_models(config.drafter, execution)
    assert model.model.path == draft
    assert model.reads_one_row
    assert not execution.reads_one_row
    assert sorted(model.draft_steps) == [1, 2, 3]
    assert model.row_width == execution.row_width


def test_draft_steps_are_as_many_as_drafts_or_one_less(target: Path, draft: Path) -> None:
    config = resolved(target, **FLAGS, draft_model_path=str(draft), load_aware="off", num_steps=5)
    assert config.drafter is not None
    [model] = drafter_models(config.drafter, config.execution)
    assert sorted(model.draft_steps) == [4, 5]


def test_draft_models_that_cannot_be_used_are_refused_before_weights_are_loaded(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    def said(folder: Path | str, **flags: Any) -> str:
        return refusal(target, **FLAGS, draft_model_path=str(folder), **flags)

    assert "--speculative-draft-model-path 'no/such' is not a directory" in said("no/such")
    assert "`demo-draft`" in said("no/such")
    wrong = changed(draft, tmp_path / "size", vocab_size=99)
    assert "vocab_size is 99, but that of the target is 320" in said(wrong)
    head = changed(draft, tmp_path / "head", architectures=["LlamaForCausalLMEagle"])
    assert (
        "is a head, no model; use --speculative-algorithm EAGLE, EAGLE3, NEXTN or DFLASH"
        in said(head)
    )
    nested = changed(draft, tmp_path / "nested", speculators_model_type="eagle3")
    assert "speculators_model_type says that this is a head" in said(nested)
    assert "draft_vocab_size says that this is a head" in said(write_eagle3(tmp_path / "eagle3"))
    assert (
        "--speculative-token-map needs --speculative-algorithm EAGLE, EAGLE3, NEXTN or DFLASH; "
        in said(draft, token_map="map.json")
    )
    other = changed(draft, tmp_path / "other", architectures=["OtherForCausalLM"])
    assert "no file of ours computes 'OtherForCausalLM' (known: LlamaForCausalLM" in said(other)
    broken = changed(draft, tmp_path / "broken")
    (broken / "config.json").write_text("[")
    assert "config.json" in said(broken)


@pytest.mark.parametrize("kind", ["head", "weights"])
def test_others_are_refused_in_one_line_when_weights_are_loaded(
    target: Path, draft: Path, tmp_path: Path, kind: str
) -> None:
    """Published heads call themselves plain models."""
    if kind == "head":
        folder, reason = write_eagle(tmp_path / "head"), "has a weight .*does not know"
    else:
        folder = changed(draft, tmp_path / "empty")
        (folder / "model.safetensors").unlink()
        reason = "safetensors"
    config = resolved(target, **FLAGS, draft_model_path=str(folder))
    models = drafter_models(config.drafter, config.execution)
    with pytest.raises(ModelPathError, match=reason) as error:
        make_runners(config.execution, *models)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_a_shorter_context_is_a_warning(
    target: Path, draft: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs acceptance and no token."""
    caplog.set_level(logging.WARNING)
    resolved(target, **FLAGS, draft_model_path=str(draft))
    assert "--context-length" not in caplog.text
    short = changed(draft, tmp_path / "short", max_position_embeddings=32)
    resolved(target, **FLAGS, draft_model_path=str(short))
    assert "made for 32 tokens" in caplog.text
    assert "--context-length 32 would keep requests within" in caplog.text


# --- tokens --------------------------------------------------------------------------------------


def with_tokenizer(folder: Path, renamed: dict[str, str]) -> Path:
    """The demo model's tokenizer with other names for some tokens."""
    folder.mkdir()
    content = json.loads(TOKENIZER.read_text())
    vocabulary = content["model"]["vocab"]
    for old, new in renamed.items():
        vocabulary[new] = vocabulary.pop(old)
    content["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_a_token_with_another_id_is_named(tmp_path: Path) -> None:
    target = with_tokenizer(tmp_path / "target", {})
    vocabulary = json.loads(TOKENIZER.read_text())["model"]["vocab"]
    by_id = {number: token for token, number in vocabulary.items()}
    check_same_tokens(target, target, "--flag")
    one, other = by_id[1000], by_id[2000]
    swapped = with_tokenizer(tmp_path / "swapped", {one: "?1", other: "?2"})
    content = json.loads((swapped / "tokenizer.json").read_text())
    names = content["model"]["vocab"]
    names[one], names[other] = names.pop("?2"), names.pop("?1")
    (swapped / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelPathError) as error:
        check_same_tokens(swapped, target, "--flag")
    assert str(error.value).startswith(f"--flag {str(swapped)!r} has other tokens")
    assert f"{one!r} is 2000 there and 1000 in the model" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_first_difference_is_that_of_the_targets_least_id() -> None:
    target = {"a": 0, "b": 1, "c": 2, "d": 3}
    assert first_difference(dict(target), target) is None
    assert first_difference(target | {"e": 4}, target) == "'e' is 4 there and missing in the model"
    found = first_difference({"a": 0, "x": 1, "c": 3, "d": 2}, target)
    assert found == "'b' is missing there and 1 in the model"
    assert first_difference({}, {"a": 0}) == "'a' is missing there and 0 in the model"


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    target = with_tokenizer(tmp_path / "target", {})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(ModelPathError, match=r"^--flag: .*broken"):
        check_same_tokens(tmp_path / "broken", target, "--flag")


def test_without_a_tokenizer_only_sizes_are_compared_and_a_warning_says_so(
    target: Path, draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    resolved(target, **FLAGS, draft_model_path=str(draft))
    assert f"{draft} has no tokenizer, so only the sizes" in caplog.text


# --- the start of a server -----------------------------------------------------------------------


@pytest.mark.parametrize("tile_spec", [False, True])
def test_a_server_measures_prices_and_serves_the_models_tokens(
    tmp_path: Path, tile_spec: bool
) -> None:
    """The draft model may be of another family and have another KV."""
    target = make_random_model("llama", tmp_path / "target")
    draft = make_random_model("qwen3", tmp_path / "draft", 1, num_key_value_heads=1, head_dim=32)
    prompt = list(range(5, 25))
    with started(args_for(target), None) as (scheduler, _, addresses):
        right = tokens_of(scheduler, addresses, prompt)
    flags: dict[str, Any] = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(draft),
        "tile_spec": tile_spec,
    }
    if tile_spec:
        flags["tile_spec_cache_dir"] = str(tmp_path / "cache")
    with started(args_for(target, **flags), None) as (scheduler, _, addresses):
        assert tokens_of(scheduler, addresses, prompt) == right
        state = scheduler.control.internal_state()
        assert state["speculative_num_steps"] <= 3
    assert len(right) == 30
    assert bool(list((tmp_path / "cache").rglob("*.json"))) == tile_spec
