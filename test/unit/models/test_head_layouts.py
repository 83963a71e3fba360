"""Each layout in which draft heads are published loads unmodified and computes what an oracle does,
or is refused by name; ids of layers in either convention are told apart."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from block_heads import BLOCK_CASES, INPUTS, BlockCase, BlockOracle, write_block_head
from block_heads import IDS as BLOCK_IDS
from code_shape import ROOT
from draft_heads import DFLASH, EAGLE, EAGLE3, FILE, Oracle, write_eagle, write_eagle3
from head_feeding import make_pair, run_a_round, run_blocks
from head_layouts import CASES, IDS, SPECULATORS, HeadCase
from sglang.srt.head_config import load_head_config
from sglang.srt.head_layouts import ARCHITECTURES, NEXTN, SPECULATORS_TYPES
from sglang.srt.model_config import ModelConfig, ModelPathError, load_model_config
from utils import make_random_llama

torch.set_num_threads(1)
REMEDY = re.compile(r"; (use|write|remove|name) | must be an integer of at least ")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Targets of 8 layers, by hidden size. The output head is not the embedding."""
    folder = tmp_path_factory.mktemp("targets")
    return {
        size: make_random_llama(
            folder / str(size), num_hidden_layers=8, tie_word_embeddings=False, hidden_size=size
        )
        for size in (64, 96)
    }


@pytest.fixture(scope="module")
def target(targets: dict[int, Path]) -> ModelConfig:
    return load_model_config(str(targets[64]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layout)
def test_a_published_layout_equals_the_oracle(
    case: HeadCase, targets: dict[int, Path], tmp_path: Path
) -> None:
    pair = make_pair(targets[case.target_hidden], case.write(tmp_path / "head"), case.kind)
    oracle = pair.oracle
    pair.oracle = Oracle(
        tmp_path, oracle.embedding, oracle.output, case.oracle_facts, case.tensors()
    )
    run_a_round(pair, case.kind)
    head = pair.runner.config.model
    taps = head.taps.layers if case.kind == EAGLE3 else None
    assert taps == (case.taps if case.kind == EAGLE3 else None)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda case: case.layout)
def test_a_published_layout_of_blocks_equals_the_oracle(
    case: BlockCase, page_size: int, targets: dict[int, Path], tmp_path: Path
) -> None:
    pair = make_pair(targets[64], case.write(tmp_path / "head"), DFLASH, page_size)
    right, head = pair.oracle, pair.runner.config.model
    tensors = case.tensors()
    pair.oracle = BlockOracle(tmp_path, right.embedding, right.output, case.facts, tensors)
    run_blocks(pair)
    assert head.taps.layers == case.taps


def test_the_page_names_each_layout_as_the_tables_have_it() -> None:
    """Those that load in its table, those that do not behind it, and no class that is unknown."""
    page = (ROOT / "docs/speculation.md").read_text(encoding="utf-8")
    section, nextn = page.split("## Heads that load\n")[1].split("## Layers of the model itself")
    table, text = section.split("In all of them tensors")
    nextn = nextn.split("## Trees")[0]
    for name, layout in {**ARCHITECTURES, **SPECULATORS_TYPES}.items():
        if layout.problem:
            assert layout.maker in text.split("These are refused by name")[1], name
        elif name != NEXTN:
            assert f"`{name}`" in (nextn if layout.kind == NEXTN else table), name
    classes = re.findall(r"`(\w*(?:ForCausalLM|Model)\w*)`", table)
    assert set(classes) <= ARCHITECTURES.keys()


# --- refused by name -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "use --speculative-algorithm DFLASH"),
        ({"block_size": 16}, "use --speculative-algorithm DFLASH"),
        ({"speculators_model_type": "dflash"}, "use --speculative-algorithm DFLASH"),
        ({"speculators_model_type": "dflash2"}, "DFlash2, which adds convolutions"),
        ({"speculators_model_type": "dspark"}, "DSpark"),
        ({"speculators_model_type": "mtp"}, "use --speculative-algorithm NEXTN"),
        ({"architectures": ["MiMoMTP"]}, "NEXTN"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "NEXTN"),
        ({"speculators_model_type": "new"}, "speculators_model_type 'new' is of no head"),
        ({"architectures": ["OtherForCausalLM"]}, "'OtherForCausalLM' is of no head"),
        ({"architectures": None}, "architecture ''"),
    ],
)
def test_a_head_that_nothing_here_drives_is_refused_by_name(
    entries: dict[str, Any], named: str, tmp_path: Path, target: ModelConfig
) -> None:
    assert named in refusal(write_eagle3(tmp_path, **entries), target)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        ("mask_hidden", "name none; write the one"),
        ("mtp.fc.weight", "NEXTN"),
        ("layers.0.attention_conv.weight", "DFlash2"),
        ("candidate_selector.proj.weight", "DFlash2"),
        ("markov_head.markov_w1.weight", "DSpark"),
    ],
)
def test_a_tensor_that_marks_another_head_is_enough(
    tensor: str, named: str, tmp_path: Path, target: ModelConfig
) -> None:
    folder = write_eagle3(tmp_path)
    save_file({**load_file(folder / FILE), tensor: torch.ones(1, 64)}, folder / FILE)
    assert named in refusal(folder, target)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"mask_token_id": 7, "pard_token": 8}, "name [7, 8]; write the one"),
        ({"ptd_token_id": 4096}, "the mask token is 4096, but vocab_size is"),
    ],
)
def test_a_mask_token_that_cannot_be_fed_is_refused(
    entries: dict[str, Any], problem: str, tmp_path: Path, target: ModelConfig
) -> None:
    assert problem in refusal(write_eagle3(tmp_path, **entries), target)


def test_a_head_of_mask_tokens_without_their_hidden_states_is_refused(
    targets: dict[int, Path], tmp_path: Path
) -> None:
    folder = write_eagle3(tmp_path / "head", mask_token_id=7)
    with pytest.raises(ModelPathError, match="mask_hidden"):
        make_pair(targets[64], folder, EAGLE3)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"block_size": None}, "block_size is missing, the rows that a head of DFlash drafts"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": 65}, "block_size is 65, but must be at most 64; use"),
        ({"dflash_config": {"mask_token_id": None}}, "a head of DFlash is fed a mask token"),
        ({"dflash_config": {"mask_token_id": 4096}}, "the mask token is 4096, but vocab_size is"),
        ({"dflash_config": {BLOCK_IDS: None}}, "no layers of the target are named"),
        ({"dflash_config": {BLOCK_IDS: [3, 1]}}, "at least one layer in ascending order"),
        ({"dflash_config": {BLOCK_IDS: [1, 3, 7]}}, "below the last one of the 8 layers"),
        ({"num_target_layers": 36}, "num_target_layers is 36, but the target has 8 layers"),
        ({"sample_from_anchor": True}, "as those of DSpark"),
        ({"norm_before_fc": True}, "norm_before_fc is of heads of EAGLE-3"),
        ({"layer_types": ["sliding_attention"]}, "sliding windows of heads"),
        ({"hidden_size": 128}, "hidden_size is 128, but that of the target is 64"),
    ],
)
def test_a_block_that_cannot_be_drafted_is_refused(
    entries: dict[str, Any], problem: str, tmp_path: Path, target: ModelConfig
) -> None:
    assert problem in refusal(write_block_head(tmp_path, **entries), target, DFLASH)


@pytest.mark.parametrize(
    ("outputs", "inputs", "readings"),
    [
        ([2, 4, 6], None, ([2, 4, 6], [1, 3, 5])),  # one more than z-lab's usual ones
        (None, [1, 3, 5], ([1, 3, 5], [0, 2, 4])),  # z-lab's usual ones in vLLM's place
        ([1, 2, 6], [1, 2, 6], ([1, 2, 6], [0, 1, 5])),
    ],
)
def test_ids_of_a_block_that_may_mean_two_things_are_refused(
    outputs: list[int] | None,
    inputs: list[int] | None,
    readings: tuple[list[int], list[int]],
    tmp_path: Path,
    target: ModelConfig,
) -> None:
    entries = {"dflash_config": {BLOCK_IDS: outputs}, INPUTS: inputs}
    message = refusal(write_block_head(tmp_path, **entries), target, DFLASH)
    first, second = readings
    assert f"outputs of layers {first}, by the other those of {second}" in message


@pytest.mark.parametrize(
    ("tensor", "named"),
    [("layers.1.self_attn.k_norm.weight", "lacks"), ("layers.0.extra.weight", "extra")],
)
def test_a_block_heads_missing_or_further_tensor_is_named(
    tensor: str, named: str, targets: dict[int, Path], tmp_path: Path
) -> None:
    folder = write_block_head(tmp_path / "head")
    tensors = load_file(folder / FILE)
    if tensors.pop(tensor, None) is None:
        tensors[tensor] = torch.ones(4)
    save_file(tensors, folder / FILE)
    with pytest.raises(ModelPathError, match=named) as error:
        make_pair(targets[64], folder, DFLASH)
    assert "\n" not in str(error.value)


def refusal(folder: Path, target: ModelConfig, kind: str = EAGLE3) -> str:
    with pytest.raises(ModelPathError) as error:
        load_head_config(str(folder), kind, target)
    message = str(error.value)
    assert str(folder) in message
    assert "\n" not in message
    assert len(message) - len(str(folder)) < 400
    assert REMEDY.search(message), message
    return message


def test_a_nested_config_without_norm_before_residual_is_refused_with_both_readings(
    tmp_path: Path, target: ModelConfig
) -> None:
    entries = {key: each for key, each in SPECULATORS.items() if key != "norm_before_residual"}
    folder = HeadCase("nested", EAGLE3, entries=entries, nests=True).write(tmp_path / "head")
    assert "speculators reads as false and vLLM as true" in refusal(folder, target)


def test_layers_with_a_gap_are_refused(tmp_path: Path, target: ModelConfig) -> None:
    folder = write_eagle3(tmp_path, layer="layers.1.")
    assert "the files have layers [1], not all from 0 on" in refusal(folder, target)


def test_an_upper_layer_with_both_norms_is_refused(
    targets: dict[int, Path], tmp_path: Path
) -> None:
    more = {"layers.1.hidden_norm.weight": (torch.float32, [64])}
    [two] = [case for case in CASES if case.layout == "2 layers"]
    folder = replace(two, add={**two.add, **more}).write(tmp_path / "head")
    with pytest.raises(ModelPathError, match=r"layers\.1\.\w+\.weight' twice"):
        make_pair(targets[64], folder, EAGLE3)


# --- ids of layers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "inputs", "readings"),
    [
        ([2, 4, 5], None, ([2, 4, 5], [1, 3, 4])),  # vLLM's usual ones in SGLang's place
        (None, [1, 3, 4], ([1, 3, 4], [0, 2, 3])),  # SGLang's usual ones in vLLM's place
        ([1, 2, 6], [1, 2, 6], ([1, 2, 6], [0, 1, 5])),
    ],
)
def test_ids_that_may_mean_two_things_are_refused_with_both_readings(
    outputs: list[int] | None,
    inputs: list[int] | None,
    readings: tuple[list[int], list[int]],
    tmp_path: Path,
    target: ModelConfig,
) -> None:
    places = {} if outputs is None else {"eagle_config": {IDS: outputs}}
    places |= {} if inputs is None else {IDS: inputs}
    message = refusal(write_eagle3(tmp_path, **places), target)
    first, second = readings
    assert f"outputs of layers {first}, by the other those of {second}" in message


@pytest.mark.parametrize("outputs", [[2, 4, 5], [1, 3, 4], [0, 2, 3]])
def test_ids_in_both_places_are_certain(
    outputs: list[int], tmp_path: Path, target: ModelConfig
) -> None:
    """As the refusal says."""
    inputs = [layer + 1 for layer in outputs]
    folder = write_eagle3(tmp_path, **{"eagle_config": {IDS: outputs}, IDS: inputs})
    head = load_head_config(str(folder), EAGLE3, target)
    assert head.taps is not None
    assert list(head.taps.layers) == inputs


# --- nothing is ignored in silence ---------------------------------------------------------------


def test_entries_without_effect_are_named_in_the_summary(
    tmp_path: Path, target: ModelConfig
) -> None:
    options = {IDS: [0, 3, 5], "use_mtp_layernorm": False}
    folder = write_eagle3(tmp_path, eagle_config=options, novelty=1)
    remark = load_head_config(str(folder), EAGLE3, target).remark
    assert "reads the inputs of layers 1, 4 and 6 (ids in eagle_config name the outputs" in remark
    assert "eagle_config.use_mtp_layernorm" in remark
    assert "novelty" in remark
    assert "rms_norm_eps" not in remark


def test_the_summary_says_how_many_drafts_a_head_of_mask_tokens_was_trained_for(
    tmp_path: Path, target: ModelConfig
) -> None:
    def remark(name: str, **entries: int) -> str:
        folder = write_eagle3(tmp_path / name, mask_token_id=7, **entries)
        return load_head_config(str(folder), EAGLE3, target).remark

    assert ", trained for 8 drafts" in remark("speculators", num_depths=8)
    assert ", trained for 4 drafts" in remark("flat", para_num=4)
    assert "trained" not in remark("silent")
    with pytest.raises(ModelPathError, match="num_depths must be an integer of at least 1"):
        remark("wrong", num_depths=0)


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
def test_an_embedding_that_equals_the_targets_is_the_targets(
    kind: str, targets: dict[int, Path], tmp_path: Path
) -> None:
    """Also in another type; one that differs in a value is the head's own (see the layouts)."""
    folder = (write_eagle if kind == EAGLE else write_eagle3)(tmp_path / "head")
    tensors, of_target = load_file(folder / FILE), load_file(targets[64] / FILE)
    tensors["embed_tokens.weight"] = of_target["model.embed_tokens.weight"].double()
    save_file(tensors, folder / FILE)
    pair = make_pair(targets[64], folder, kind)
    assert not [name for name, _ in pair.model.named_parameters() if "embed" in name]
    del pair.oracle.tensors["embed_tokens.weight"]
    run_a_round(pair, kind)


def _swap(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][[3, 4]] = tensors["d2t"][[4, 3]] + torch.tensor([1, -1])


def _other_marks(tensors: dict[str, torch.Tensor]) -> None:
    tensors["t2d"] = tensors["t2d"].roll(1)


@pytest.mark.parametrize("change", [_swap, _other_marks])
def test_a_map_that_contradicts_the_marks_is_refused(
    change: Any, tmp_path: Path, target: ModelConfig
) -> None:
    folder = write_eagle3(tmp_path)
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)
    assert "of the target of draft token" in refusal(folder, target)


def test_a_head_is_read_from_its_config_alone_before_its_weights_are_there(
    tmp_path: Path, target: ModelConfig
) -> None:
    folder = write_eagle3(tmp_path, num_hidden_layers=40)
    whole = load_head_config(str(folder), EAGLE3, target)
    (folder / FILE).unlink()
    assert load_head_config(str(folder), EAGLE3, target) == whole
