"""Heads of EAGLE and EAGLE-3 over the paged pool compute what an oracle of theirs does. They use
the target's modules, and follow its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_heads import (
    DRAFT_VOCAB_SIZE,
    EAGLE,
    EAGLE3,
    FILE,
    Oracle,
    write_eagle,
    write_eagle3,
)
from head_feeding import (
    CPU,
    HIDDEN_SIZE,
    WIDTHS,
    Feeding,
    Pair,
    assert_close,
    make_pair,
    run_a_round,
)
from sglang.srt.head_config import load_head_config
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.model_config import ModelPathError
from sglang.srt.model_executor.model_runner import LoadedModel
from sglang.srt.model_executor.runner_group import make_runners
from utils import CONTEXT_LEN, VOCAB_SIZE, Setup, make_execution, make_random_llama

torch.set_num_threads(1)
ROUNDED = 1e-4  # where a processor's order of sums is amplified from step to step
WRITERS: dict[str, Callable[..., Path]] = {EAGLE: write_eagle, EAGLE3: write_eagle3}
BOTH = pytest.mark.parametrize("kind", [EAGLE, EAGLE3])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its head is not its embedding: a head that confuses them gives other logits."""
    folder = tmp_path_factory.mktemp("target")
    return make_random_llama(folder / "model", num_hidden_layers=8, tie_word_embeddings=False)


@pytest.mark.parametrize("page_size", [1, 16])
@BOTH
def test_prompts_chunks_and_draft_steps_equal_the_oracle(
    target: Path, tmp_path: Path, kind: str, page_size: int
) -> None:
    run_a_round(make_pair(target, WRITERS[kind](tmp_path / "head"), kind, page_size), kind)


def test_an_output_that_is_carried_behind_the_norm(target: Path, tmp_path: Path) -> None:
    run_a_round(make_pair(target, write_eagle3(tmp_path / "h", norm_output=True), EAGLE3), EAGLE3)


@BOTH
def test_a_theta_of_its_own_and_positions_beyond_its_own_context(
    target: Path, tmp_path: Path, kind: str
) -> None:
    folder = WRITERS[kind](tmp_path / "head", rope_theta=700.0, max_position_embeddings=8)
    pair = make_pair(target, folder, kind)
    feeding = Feeding(pair)
    feeding.feed({0: feeding.random(150, WIDTHS[kind])})
    assert len(pair.model.rotary.table) >= CONTEXT_LEN


def test_a_missing_theta_is_10000_whatever_the_targets(target: Path, tmp_path: Path) -> None:
    wide = Path(tmp_path / "target")
    wide.mkdir()
    config = json.loads((target / "config.json").read_text())
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    (wide / "config.json").write_text(json.dumps({**config, "rope_parameters": parameters}))
    (wide / FILE).symlink_to(target / FILE)
    pair = make_pair(wide, write_eagle3(tmp_path / "head"), EAGLE3)
    feeding = Feeding(pair)
    feeding.feed({0: feeding.random(60, WIDTHS[EAGLE3])})


def test_a_bias_of_fc_is_added(target: Path, tmp_path: Path) -> None:
    folder = write_eagle(tmp_path / "head")
    tensors = load_file(folder / FILE)
    save_file({**tensors, "fc.bias": torch.linspace(-1, 1, HIDDEN_SIZE)}, folder / FILE)
    run_a_round(make_pair(target, folder, EAGLE), EAGLE)


def test_layers_may_be_called_midlayer_or_layers_0(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", layer="layers.0.", architectures=[EAGLE3])
    run_a_round(make_pair(target, folder, EAGLE3), EAGLE3)


# --- tokens --------------------------------------------------------------------------------------


def test_draft_tokens_are_the_targets_by_d2t(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head")
    model = make_pair(target, folder, EAGLE3).model
    offsets = load_file(folder / FILE)["d2t"].tolist()
    ids = torch.arange(DRAFT_VOCAB_SIZE).view(2, -1)
    expected = [i + offset for i, offset in enumerate(offsets)]
    assert model.to_target_ids(ids).flatten().tolist() == expected
    assert model.to_target_ids(ids).dtype == torch.int64


def test_without_a_draft_vocabulary_the_targets_head_is_used(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", draft_vocab_size=None)
    tensors = load_file(folder / FILE)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    save_file(tensors, folder / FILE)
    pair = make_pair(target, folder, EAGLE3)
    run_a_round(pair, EAGLE3)
    ids = torch.tensor([0, 319])
    assert torch.equal(pair.model.to_target_ids(ids), ids)


def test_a_whole_draft_vocabulary_needs_no_map(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", draft_vocab_size=VOCAB_SIZE)
    tensors = load_file(folder / FILE)
    del tensors["d2t"]
    tensors["lm_head.weight"] = torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    save_file(tensors, folder / FILE)
    pair = make_pair(target, folder, EAGLE3)
    ids = torch.tensor([[0, 319]])
    assert torch.equal(pair.model.to_target_ids(ids), ids)
    run_a_round(pair, EAGLE3)


def test_hot_tokens_are_rows_of_the_targets_head(target: Path, tmp_path: Path) -> None:
    hot = [300, 7, 8, 150, 2]
    (tmp_path / "hot.json").write_text(json.dumps(hot))
    save_file({"ids": torch.tensor(hot)}, tmp_path / "hot.safetensors")
    folder = write_eagle(tmp_path / "head")
    for name in ("hot.json", "hot.safetensors"):
        pair = make_pair(target, folder, EAGLE, token_map=str(tmp_path / name))
        assert pair.model.to_target_ids(torch.arange(5)).tolist() == hot
        run_a_round(pair, EAGLE)


# --- what belongs to the target ------------------------------------------------------------------


def test_nothing_of_the_target_is_copied(target: Path, tmp_path: Path) -> None:
    pair = make_pair(target, write_eagle(tmp_path / "head"), EAGLE)
    head = load_file(tmp_path / "head" / FILE)
    own = sum(tensor.numel() for name, tensor in head.items() if name != "embed_tokens.weight")
    assert pair.runner.num_parameters == own + HIDDEN_SIZE  # the missing bias
    logits = pair.runner.compute_logits(torch.ones(1, HIDDEN_SIZE))
    pair.group.target.model.get_parameter("lm_head.weight").zero_()
    assert logits.any()
    assert not pair.runner.compute_logits(torch.ones(1, HIDDEN_SIZE)).any()


@pytest.mark.parametrize("has_map", [False, True])
def test_an_update_of_the_target_reaches_the_head(
    target: Path, tmp_path: Path, has_map: bool
) -> None:
    (tmp_path / "hot.json").write_text("[5, 1, 250]")
    token_map = str(tmp_path / "hot.json") if has_map else None
    pair = make_pair(target, write_eagle(tmp_path / "head"), EAGLE, token_map=token_map)
    old = pair.runner.compute_logits(torch.ones(1, HIDDEN_SIZE))
    other = make_random_llama(
        tmp_path / "other", seed=5, num_hidden_layers=8, tie_word_embeddings=False
    )
    weights = pair.group.target.weights
    weights.apply(weights.reader.from_directory(str(other)))
    new = load_file(other / FILE)
    pair.oracle.embedding = new["model.embed_tokens.weight"]
    pair.oracle.output = new["lm_head.weight"]
    assert not torch.allclose(pair.runner.compute_logits(torch.ones(1, HIDDEN_SIZE)), old)
    run_a_round(pair, EAGLE)


@pytest.mark.parametrize("has_map", [False, True])
def test_the_head_of_a_target_that_is_untied_by_its_files_is_shared(
    target: Path, tmp_path: Path, has_map: bool
) -> None:
    (tmp_path / "hot.json").write_text("[5, 1, 250]")
    token_map = str(tmp_path / "hot.json") if has_map else None
    untied = Path(shutil.copytree(target, tmp_path / "untied"))
    config = json.loads((target / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    pair = make_pair(untied, write_eagle(tmp_path / "head"), EAGLE, token_map=token_map)
    run_a_round(pair, EAGLE)
    weights = pair.group.target.weights
    weights.apply(weights.reader.from_tensors([("lm_head.weight", -pair.oracle.output)]))
    pair.oracle.output = -pair.oracle.output
    run_a_round(pair, EAGLE)


@pytest.mark.parametrize("has_map", [False, True])
def test_the_head_of_a_tied_target_follows_its_embedding(tmp_path: Path, has_map: bool) -> None:
    (tmp_path / "hot.json").write_text("[5, 1, 250]")
    token_map = str(tmp_path / "hot.json") if has_map else None
    tied = make_random_llama(tmp_path / "tied", num_hidden_layers=8)
    pair = make_pair(tied, write_eagle(tmp_path / "head"), EAGLE, token_map=token_map)
    run_a_round(pair, EAGLE)
    new = torch.flip(pair.oracle.embedding, (0,))
    weights = pair.group.target.weights
    tensors = {"model.embed_tokens.weight": new, "lm_head.weight": new.clone()}
    weights.apply(weights.reader.from_tensors(tensors.items()))
    pair.oracle.embedding = pair.oracle.output = new
    run_a_round(pair, EAGLE, ROUNDED)


@BOTH
def test_released_weights_come_back(target: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "hot.json").write_text("[5, 1, 250]")
    token_map = str(tmp_path / "hot.json") if kind == EAGLE else None
    pair = make_pair(target, WRITERS[kind](tmp_path / "head"), kind, token_map=token_map)
    pair.group.release_weights()
    assert not any(each.untyped_storage().nbytes() for each in pair.model.parameters())
    pair.group.restore_weights()
    run_a_round(pair, kind)


@BOTH
def test_an_update_of_the_head_itself(target: Path, tmp_path: Path, kind: str) -> None:
    folder = write_eagle(tmp_path / "head")
    if kind == EAGLE3:
        folder = write_eagle3(tmp_path / "head")
    pair = make_pair(target, folder, kind)
    if kind == EAGLE:
        pair.model.get_parameter("fc.bias").fill_(1.0)  # which the new checkpoint leaves out
        other = write_eagle(tmp_path / "other", seed=3)
    else:
        other = write_eagle3(tmp_path / "other", seed=3)
    weights = pair.runner.weights
    weights.apply(weights.reader.from_directory(str(other)))
    pair.oracle = Oracle(other, pair.oracle.embedding, pair.oracle.output)
    run_a_round(pair, kind)
    if kind == EAGLE3:
        offsets = load_file(other / FILE)["d2t"]
        found = pair.model.to_target_ids(torch.arange(DRAFT_VOCAB_SIZE))
        assert torch.equal(found, torch.arange(DRAFT_VOCAB_SIZE) + offsets)


# --- in a group of runners -----------------------------------------------------------------------


@BOTH
def test_its_pool_has_one_layer_behind_the_targets_slots(
    target: Path, tmp_path: Path, kind: str
) -> None:
    folder = WRITERS[kind](tmp_path / "h", num_attention_heads=2, num_key_value_heads=1)
    group = make_pair(target, folder, kind).group
    ours, drafts = group.memory.pools
    assert (len(ours.kv), len(drafts.kv)) == (8, 1)
    assert len(drafts.kv[0]) == len(ours.kv[0])
    assert group.memory.bytes_per_token == 2 * 4 * (8 * 2 * 16 + 1 * 1 * 32)


@BOTH
def test_the_largest_step_is_run_beside_the_targets(
    target: Path, tmp_path: Path, kind: str
) -> None:
    pair = make_pair(target, WRITERS[kind](tmp_path / "head"), kind)
    pair.group.target.warm_up(drafting=[pair.runner])
    run_a_round(pair, kind)


def test_the_targets_taps_are_what_an_eagle3_head_reads(target: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    execution = make_execution(target, Setup(), **CPU)
    folder = write_eagle3(tmp_path / "head")
    head = load_head_config(str(folder), EAGLE3, execution.model)
    assert head.taps is not None
    capture = HiddenCapture(head.taps.layers)
    group = make_runners(replace(execution, capture=capture), replace(execution, model=head))
    weights = load_file(target / FILE)
    oracle = Oracle(folder, weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    feeding = Feeding(Pair(group, oracle))
    tokens, _ = feeding.random(9, 1)
    batch = ForwardBatch(
        input_ids=torch.tensor(tokens),
        positions=torch.arange(9),
        slots=group.memory.table.req_to_token[0, :9].long(),
        rows=torch.tensor([0]),
        q_lens=[9],
        kv_lens=torch.tensor([9]),
        kv_len_upper_bounds=[9],
    )
    taps = group.target.forward(batch).taps
    assert taps is not None
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert_close(taps, torch.cat([states[layer][0] for layer in (2, 4, 5)], dim=1))
    feeding.feed({0: (tokens, taps)})


def test_a_head_is_no_target(target: Path, tmp_path: Path) -> None:
    setup = Setup()
    execution = make_execution(target, setup, **CPU)
    head = load_head_config(str(write_eagle(tmp_path / "head")), EAGLE, execution.model)
    with pytest.raises(ModelPathError, match=f"{EAGLE} only drafts.*serve that one"):
        make_runners(replace(execution, model=head))


@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 128}, {"vocab_size": 256}], ids=["hidden_size", "vocab_size"]
)
def test_a_target_of_other_sizes_is_refused_when_it_is_attached(
    target: Path, tmp_path: Path, sizes: dict[str, Any]
) -> None:
    execution = make_execution(target, Setup(), **CPU)
    head = load_head_config(str(write_eagle(tmp_path / "head")), EAGLE, execution.model)
    other = make_random_llama(tmp_path / "other", num_hidden_layers=1, **sizes)
    loaded = LoadedModel(make_execution(other, Setup(), **CPU))
    with pytest.raises(ModelPathError, match=f"{next(iter(sizes))} is .* trained for this target"):
        LoadedModel(replace(execution, model=head)).attach(loaded)


def test_in_bfloat16_ids_stay_integers_and_the_rotary_table_float32(
    target: Path, tmp_path: Path
) -> None:
    execution = make_execution(target, Setup(), **{**CPU, "dtype": "bfloat16"})
    head = load_head_config(str(write_eagle3(tmp_path / "head")), EAGLE3, execution.model)
    group = make_runners(execution, replace(execution, model=head))
    model = group.runners[1].model
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert model.get_buffer("d2t").dtype == torch.int64
    assert model.get_buffer("rotary.table").dtype == torch.float32
    logits = group.runners[1].compute_logits(torch.ones(2, HIDDEN_SIZE, dtype=torch.bfloat16))
    assert logits.shape == (2, DRAFT_VOCAB_SIZE)
