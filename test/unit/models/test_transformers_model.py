"""Decoders by transformers' own modelling code equal transformers, however tokens are fed, and
everything that goes by the contract of models works on them as on our own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import build as build_own
from test_families import change_config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from drafted_serving import params_of, prompts
from eagle_models import EAGLE3, STANDALONE, write_models
from eagle_serving import Served, right_tokens, setup_for, tree_setup
from model_harness import (
    TOLERANCE,
    Decoding,
    Feeder,
    Model,
    assert_close,
    assert_greedy,
    check_whole_and_chunked_prompts,
    sequence,
)
from ngram_serving import Served as ServedNgrams
from ngram_serving import ngram_config
from sglang.srt import model_config
from sglang.srt.layers.forward_batch import dummy_step
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.layers.layer_runtime import HeadNorms
from sglang.srt.layers.ops.torch_ops import TorchOps
from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.model_loader.loader import WeightPlaces, load_model
from sglang.srt.model_loader.weight_files import read_directory
from sglang.srt.models import fused_layers
from sglang.srt.models.divided_attention import divide_attention
from sglang.srt.models.exchanged_modules import (
    CurrentStep,
    StepGatedMLP,
    StepNorm,
    StepPart,
    eps_of_rms_norm,
)
from sglang.srt.models.fused_layers import StepLayer, StepRotations, is_half_rotation
from sglang.srt.models.transformers_model import ATTENTION, TransformersModel
from sglang.srt.registry import HEADS, OWN, TRANSFORMERS
from sglang.srt.shard import Shard
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.transformers_config import read_config, why_not
from sglang.srt.workers.tp_worker import TpModelWorker
from thread_ranks import ThreadRanks
from utils import (
    MTP_MAX_ROWS,
    SchedulerHarness,
    Setup,
    make_execution,
    make_model_worker,
    make_mtp_worker,
    make_random_model,
    make_runner,
)

ATTEND = ALL_ATTENTION_FUNCTIONS[ATTENTION]
WINDOW = 7
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [9.0] * 4}
# By name: model_type, entries, and an entry that would change what comes out.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma 2": (
        "gemma2",
        {
            **MIXED,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 3,
        },
        {"attn_logit_softcapping": None},
    ),
    "Gemma 3": (
        "gemma3_text",
        {
            **MIXED,
            "query_pre_attn_scalar": 3,
            "rope_parameters": {
                "sliding_attention": ROPE,
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            },
        },
        {"sliding_window": WINDOW + 2},
    ),
    "Phi 3": (
        "phi3",
        {
            "sliding_window": WINDOW,
            "rope_parameters": {**LONG, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 256,
        },
        {"sliding_window": None},
    ),
    "Olmo 2": (
        "olmo2",
        {"tie_word_embeddings": False, "attention_bias": True},
        {"rms_norm_eps": 0.5},
    ),
    "Olmo 3": (
        "olmo3",
        {**MIXED, "rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4}},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "Granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.7,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
        {"attention_multiplier": 0.25},
    ),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 1]}),
    "Cohere 2": ("cohere2", {**MIXED, "logit_scale": 0.5}, {"logit_scale": 0.25}),
    "GLM-4": (
        "glm4",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "attention_bias": True},
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
    ),
    "Ministral": (
        "ministral",
        {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": WINDOW - 2},
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    model_type, entries, _ = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("models") / "model"
    return Model(make_random_model(model_type, folder, pad_token_id=0, **entries))


@pytest.mark.long_matrix
def test_prompts_whole_and_in_chunks_beside_decodes(family: Model) -> None:
    check_whole_and_chunked_prompts(family, num_steps=6)


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_tokens_of_a_batch_and_of_cached_prompts(family: Model, page_size: int) -> None:
    """The second time the prompts are in the radix tree."""
    asked = [sequence(length, seed=length) for length in (1, 17, 33)]
    decoding = Decoding(family, page_size)
    outputs = decoding.generate(asked, 5, chunk=10)
    for prompt, output in zip(asked, outputs, strict=True):
        assert_greedy(family, prompt, output)
    assert decoding.generate(asked, 5, chunk=10) == outputs


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", FAMILIES)
def test_each_option_matters(tmp_path: Path, name: str) -> None:
    """Logits without it differ by far more than the tolerance."""
    from transformers import AutoModelForCausalLM

    model_type, entries, changes = FAMILIES[name]
    path = make_random_model(model_type, tmp_path / "model", pad_token_id=0, **entries)
    before = Model(path).expected(sequence(30))[-1]
    change_config(path, **changes)
    other = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        after = other(torch.tensor([sequence(30)])).logits[0, -1]
    assert float((before - after).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["llama, biases", "mistral, window", "qwen2", "qwen3, biases"])
def test_our_own_families_are_the_same_through_transformers(tmp_path: Path, name: str) -> None:
    path = build_own(tmp_path / "model", name, "yarn")
    logits = {}
    for impl in (OWN, TRANSFORMERS):
        runner = runner_over(path, impl)
        assert isinstance(runner.model, TransformersModel) == (impl == TRANSFORMERS)
        logits[impl] = Feeder(runner, 1).feed({"a": sequence(40), "b": sequence(3, 1)})
    for request, expected in logits[OWN].items():
        assert_close(logits[TRANSFORMERS][request], expected)


def runner_over(path: Path, impl: str, **changes: Any) -> ModelRunner:
    config = load_model_config(str(path), impl=impl)
    execution = make_execution(path, Setup(), **changes)
    return make_runners(dataclasses.replace(execution, model=config)).target


def test_modules_with_known_code_are_exchanged(tmp_path: Path) -> None:
    """Products of one input are one, and names of weights are the checkpoint's."""
    path = build_own(tmp_path / "model", "qwen3")
    runner = runner_over(path, TRANSFORMERS)
    kinds = [type(module) for module in runner.model.modules()]
    assert kinds.count(StepGatedMLP) == 2
    assert kinds.count(StepPart) == 2 * 3
    assert kinds.count(StepNorm) == 2 * 4 + 1
    places = WeightPlaces(runner.model, runner.config.model)
    assert places.names == sorted(Model(path).reference.state_dict().keys() - places.shared.keys())


# Number of layers whose adds are fused with norms, and the layers whose rotation is fused with the
# write of K and V: not Gemma's norms, Granite's multiplier, norms after the add, another rotation.
FUSED: dict[str, tuple[int, set[int]]] = {
    "Gemma 2": (0, {0, 1}),
    "Gemma 3": (0, {0, 1}),
    "Phi 3": (2, set()),
    "Olmo 2": (0, {0, 1}),
    "Olmo 3": (0, {0, 1}),
    "Granite": (0, {0, 1}),
    "SmolLM3": (2, {0}),
    "Cohere 2": (0, set()),
    "GLM-4": (2, set()),
    "Ministral": (2, {0, 1}),
}


def made(name: str, folder: Path) -> tuple[Path, TransformersModel]:
    model_type, entries, _ = FAMILIES[name]
    path = make_random_model(model_type, folder, pad_token_id=0, **entries)
    model = make_runner(path, Setup()).model
    assert isinstance(model, TransformersModel)
    return path, model


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_known_form_are_fused_and_give_the_same_tokens(tmp_path: Path, name: str) -> None:
    """Compares with the tokens of layers and rotations that are left to transformers' code."""
    path, model = made(name, tmp_path / "model")
    layers = [each for each in model.modules() if isinstance(each, StepLayer)]
    assert (len(layers), model._step.rotations.layers) == FUSED[name]
    asked = [sequence(length, seed=length) for length in (1, 17, 33)]
    fused = Decoding(Model(path), 4).generate(asked, 5, chunk=10)
    with (
        mock.patch.object(fused_layers, "form_of", return_value=None),
        mock.patch.object(fused_layers, "is_half_rotation", return_value=False),
    ):
        plain = Decoding(Model(path), 4)
    assert plain.generate(asked, 5, chunk=10) == fused


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_layers_call_the_operations_of_our_own_file(tmp_path: Path, name: str) -> None:
    path, calls = build_own(tmp_path / "model", name), dict[str, list[str]]()
    names = ("linear", "gated_linear", "add_rms_norm", "rotate_and_store")
    plain = {each: vars(TorchOps)[each] for each in names}
    for impl in (OWN, TRANSFORMERS):
        noted = calls.setdefault(impl, [])

        def note(called: str, *args: Any, noted: list[str] = noted) -> Any:
            noted.append(called)
            return plain[called](*args)

        wrapped = {each: partialmethod(partial(note, each)) for each in names}
        with mock.patch.multiple(TorchOps, **wrapped):
            feeder = Feeder(runner_over(path, impl), 1)
            feeder.feed({"a": sequence(20), "b": sequence(1)})
    assert len(calls[OWN]) > 2 * len(names)
    assert calls[TRANSFORMERS] == calls[OWN]


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (x * cos + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * sin for x in (q, k))
    return q, k


class Rotating(torch.nn.Module):
    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(x, x, angles, angles)


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_rotation_whose_result_is_changed_before_attention_stays(is_changed: bool) -> None:
    rotations, module = StepRotations(CurrentStep()), Rotating()
    rotations.exchange_in(module, 5)
    q, k = module(torch.ones(1, 2, 3, 8), torch.ones(1, 3, 8))
    rotations.note(5, q * 2 if is_changed else q, k, torch.ones(1))
    assert rotations.layers == (set() if is_changed else {5})


class Normalizing(torch.nn.Module):
    def __init__(self, norm: StepNorm, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.change = norm, change

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = self.norm(x).transpose(1, 2), self.norm(x).transpose(1, 2)
        return *rotate(self.change(q), k, angles, angles), k


@pytest.mark.parametrize(
    ("change", "values_are_keys", "is_left"),
    [
        (lambda heads: heads, False, True),
        (lambda heads: heads, True, False),
        (lambda heads: heads * 2, False, False),
        (lambda heads: heads[:, :1], False, False),
        (lambda heads: heads.flip(1), False, False),
    ],
    ids=["none", "values are keys", "scaled", "others", "turned"],
)
def test_norms_of_heads_stay_if_their_results_are_changed_before_the_rotation(
    change: Callable[[torch.Tensor], torch.Tensor], values_are_keys: bool, is_left: bool
) -> None:
    step = CurrentStep()
    rotations, norm = StepRotations(step), StepNorm(torch.nn.RMSNorm(8), 1e-5, step)
    module = Normalizing(norm, change)
    rotations.exchange_in(module, 5)
    q, k, normed = module(torch.ones(1, 3, 2, 8), torch.ones(1, 3, 8))
    rotations.note(5, q, k, normed if values_are_keys else torch.ones(1, 2, 3, 8))
    assert (norm.is_left, rotations.layers) == (is_left, {5})
    norms = rotations.norms_of(5)
    assert norms == (HeadNorms(norm.weight, norm.weight, 1e-5) if is_left else None)


# --- what goes by the contract of models ---------------------------------------------------------


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("drafted"))


@pytest.fixture
def by_transformers() -> Iterator[None]:
    """Every whole model is computed by transformers, a draft model too; heads are ours."""

    def choose(entries: dict[str, Any], wished: str) -> str:
        is_head = entries["architectures"][0] in HEADS.names
        return OWN if is_head else TRANSFORMERS

    with mock.patch.object(model_config, "_impl_of", choose):
        yield


TREE = TreeShape(topk=2, depth=3, num_drafts=5)


@pytest.mark.long_matrix
@pytest.mark.usefixtures("by_transformers")
@pytest.mark.parametrize("kind", [EAGLE3, "tree", STANDALONE, "NGRAM"])
def test_drafts_change_no_token(drafted: dict[str, Path], kind: str) -> None:
    harness: Any
    if kind == "NGRAM":
        harness = ServedNgrams(drafted["target"], ngram_config(3), setup_for(3, 4))
    elif kind == "tree":
        harness = Served(drafted, EAGLE3, TREE.depth, tree_setup(TREE, 4), tree=TREE)
    else:
        harness = Served(drafted, kind, 3, setup_for(3, 4))
    assert isinstance(harness.group.target.model, TransformersModel)
    ids = [harness.submit(each, **params_of(index)) for index, each in enumerate(prompts())]
    harness.run()
    harness.check()
    with mock.patch.object(model_config, "_impl_of", return_value=OWN):
        right = right_tokens(drafted["target"])
    assert [harness.outputs[each].token_ids for each in ids] == right
    assert harness.seen["confirmed"] > 0


@pytest.mark.usefixtures("by_transformers")
def test_masks_change_no_token(tmp_path: Path) -> None:
    path = build_own(tmp_path / "model", "qwen3, window in the first")
    setup = Setup(page_size=4, num_pages=128)
    plain = SchedulerHarness(setup, make_model_worker(path, setup))
    masked = SchedulerHarness(
        setup, make_mtp_worker(make_runner(path, setup, max_decode_rows=MTP_MAX_ROWS), 7)
    )
    asked = [sequence(length, seed=length) for length in (3, 20)]
    options = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    assert masked.generate(asked, **options) == plain.generate(asked, **options)


def test_taps_are_the_hidden_states_of_transformers(tmp_path: Path) -> None:
    path = make_random_model("gemma2", tmp_path / "model", num_hidden_layers=3)
    capture = HiddenCapture(layers=(0, 2), all_rows=True)
    runner = make_runner(path, Setup(), capture=capture)
    tokens = torch.tensor(sequence(9))
    batch = dummy_step([9], runner.req_to_token_pool.padding_row, runner.device)
    slots = torch.arange(1, 10)
    runner.req_to_token_pool.req_to_token[runner.req_to_token_pool.padding_row, :9] = slots.int()
    with torch.inference_mode():
        found = runner.forward(dataclasses.replace(batch, input_ids=tokens, slots=slots))
        right = Model(path).reference(tokens[None], output_hidden_states=True).hidden_states
    assert found.taps is not None
    assert_close(found.taps, torch.cat((right[0][0], right[2][0]), dim=1))
    assert_close(found.hidden, right[-1][0])


def test_new_weights_are_served(tmp_path: Path) -> None:
    paths = [make_random_model("gemma2", tmp_path / str(seed), seed) for seed in (1, 2)]
    runner = make_runner(paths[0], Setup())
    store = runner.weights
    store.apply(store.reader.from_directory(str(paths[1])))
    logits = Feeder(runner, 1).feed({"a": sequence(30)})["a"]
    assert_close(logits, Model(paths[1]).expected(sequence(30))[-1])


def test_of_a_model_with_several_parts_that_of_text_is_served(tmp_path: Path) -> None:
    text = make_random_model("gemma3_text", tmp_path / "text", pad_token_id=0)
    entries = json.loads((text / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": entries}))
    stored = load_file(text / "model.safetensors")
    moved = {name.replace("model.", "language_model.model.", 1): t for name, t in stored.items()}
    moved["vision_tower.weight"] = torch.zeros(3)
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    logits = Feeder(make_runner(folder, Setup()), 1).feed({"a": sequence(30)})["a"]
    assert_close(logits, Model(text).expected(sequence(30))[-1])


class OfFourDimensions(torch.nn.Module):
    """A norm that small tensors do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[3]


def test_code_that_small_tensors_do_not_fit_is_not_exchanged() -> None:
    def fails(q: object, k: object, cos: object, sin: object) -> None:
        raise AssertionError("no such call")

    assert eps_of_rms_norm(OfFourDimensions()) is None
    assert not is_half_rotation(fails)


# --- several ranks -------------------------------------------------------------------------------


def harness_of(path: Path, num_ranks: int) -> tuple[SchedulerHarness, ThreadRanks]:
    setup = Setup(page_size=4, num_pages=64)
    ranks = ThreadRanks(make_execution(path, setup), num_ranks)
    ranks.serve(plain)
    return SchedulerHarness(setup, ranks.worker, resources=ranks.resources), ranks


def tokens_of(harness: SchedulerHarness) -> list[list[int]]:
    asked = [sequence(length, seed=length) for length in (3, 20, 33)]
    return harness.generate(asked, temperature=0.0, max_new_tokens=6, ignore_eos=True)


def served_by_ranks(path: Path, num_ranks: int) -> list[list[int]]:
    harness, ranks = harness_of(path, num_ranks)
    found = tokens_of(harness)
    ranks.settle()
    return found


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, name: str) -> None:
    model_type, entries, _ = FAMILIES[name]
    path = make_random_model(model_type, tmp_path / "model", pad_token_id=0, **entries)
    assert served_by_ranks(path, 2) == served_by_ranks(path, 1)


@pytest.mark.parametrize("name", ["Phi 3", "Olmo 2", "GLM-4"])
def test_each_rank_holds_its_part_before_and_after_an_update(tmp_path: Path, name: str) -> None:
    """Products that checkpoints hold as one, and norms over all heads, are cut too; the parts
    together are the checkpoint."""
    model_type, entries, _ = FAMILIES[name]
    paths = [
        make_random_model(model_type, tmp_path / str(seed), seed, pad_token_id=0, **entries)
        for seed in (1, 2)
    ]
    harness, ranks = harness_of(paths[0], 2)
    for rank in ranks.ranks:
        sizes = {each: p.shape for each, p in rank.runners.target.model.named_parameters()}
        assert sum(size == (96, 64) for size in sizes.values()) == 2  # half of gate and of up
        assert not any(size[0] in (128, 192) for size in sizes.values())  # no whole product
    weights, served = ranks.resources.weights, list[list[list[int]]]()
    for path in paths:
        weights.apply(weights.reader("target").from_directory(str(path)))
        harness.ledger.flush()
        served.append(tokens_of(harness))
        stored = dict(read_directory(path))
        assert sorted(stored) == weights.names()
        for each, values in stored.items():
            found = weights.value_of(each)
            assert found is not None
            assert torch.equal(found, values), each
    ranks.settle()
    assert served == [served_by_ranks(path, 1) for path in paths]


class JoinedAttention(torch.nn.Module):
    """Attention with one product for queries, keys and values. Its config says in which order they
    are, or that each head has its own side by side, and the scale of scores."""

    def __init__(self, config: SimpleNamespace, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.sizes = [config.num_attention_heads, *[config.num_key_value_heads] * 2]
        self.joined = torch.nn.Linear(32, sum(self.sizes) * 8, device="meta")
        self.out = torch.nn.Linear(self.sizes[0] * 8, 32, device="meta")

    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        heads = self.joined(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        if self.config.order == "by head":
            parts = [heads[:, first::3] for first in range(3)]
        else:
            sizes = [self.sizes["qkv".index(each)] for each in self.config.order]
            found = dict(zip(self.config.order, heads.split(sizes, dim=1), strict=True))
            parts = [found[each] for each in "qkv"]
        scale = self.config.scale_of(self.sizes[0])
        return self.out(ATTEND(self, *parts, None, scaling=scale)[0].flatten(2))


@pytest.mark.parametrize(
    ("order", "num_kv_heads", "scale_of", "is_divided"),
    [
        ("qkv", 2, lambda _: 0.5, True),
        ("vqk", 4, lambda _: 0.5, True),  # all have one size
        ("vqk", 2, lambda _: 0.5, False),
        ("by head", 4, lambda _: 0.5, False),
        ("qkv", 2, lambda num_heads: 1 / num_heads, False),
    ],
)
def test_attention_is_divided_if_a_rank_computes_its_heads_of_the_whole(
    order: str, num_kv_heads: int, scale_of: Callable[[int], float], is_divided: bool
) -> None:
    config = SimpleNamespace(order=order, scale_of=scale_of)
    config.num_attention_heads, config.num_key_value_heads = 4, num_kv_heads
    model: Any = SimpleNamespace(num_heads=4, num_kv_heads=num_kv_heads, head_dim=8)
    qkv = 32, num_kv_heads * 8, num_kv_heads * 8
    for rank in range(2):
        model.shard = shard = Shard(rank, 2)
        layer = torch.nn.Module()
        layer.attention = whole = JoinedAttention(config, 0)
        cuts = divide_attention(layer, model, {})
        expected = {}
        if is_divided:
            assert layer.attention is not whole
            own = layer.attention
            rows = shard.cut(0, sum(qkv), qkv)
            expected = {own.joined: rows, own.out: shard.cut(1, 32)}
        assert cuts == expected


@pytest.mark.parametrize("model_type", ["persimmon", "bitnet"])
def test_attention_that_cannot_be_divided_is_refused_for_ranks(
    tmp_path: Path, model_type: str
) -> None:
    """Persimmon computes the size of heads from their number; BitNet, which transformers' plan
    divides, has a norm over the heads' output."""
    path = make_random_model(model_type, tmp_path / "model", num_key_value_heads=4)
    config = dataclasses.replace(load_model_config(str(path)), shard=Shard(0, 2))
    with pytest.raises(ModelPathError, match="leave --tp-size out"):
        load_model(config, "auto", 64, torch.float32, "cpu")


def plain(runners: RunnerGroup) -> TpModelWorker:
    runner = runners.target
    return TpModelWorker(runner, RequestRows(runner.req_to_token_pool, 1, runner.vocab_size))


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "entries", "said"),
    [
        ("qwen3_next", {}, "recurrent state"),
        ("mamba", {}, "recurrent state"),
        ("minicpm3", {}, "latent attention"),
        ("mixtral", {}, "mixture of experts"),
        ("gpt_oss", {}, "mixture of experts"),
        ("t5", {}, "an encoder and a decoder"),
        ("bloom", {}, "by its attention interface"),
        ("lfm2", {"num_hidden_layers": 1, "layer_types": ["conv"]}, "recurrent state"),
        ("gemma3n_text", {}, "share K and V"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "causal decoder"),
        ("olmo2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("olmo2", {"quantization_config": {"quant_method": "awq"}}, "quantized weights"),
        ("olmo2", {"architectures": ["OtherForCausalLM"]}, "is Olmo2ForCausalLM, not"),
        ("olmo2", {"num_hidden_layers": "many"}, "cannot read it"),
        ("olmo3", {"num_hidden_layers": 1 << 50}, "must be at most 1024"),
        ("nothing", {}, "no model_type 'nothing'"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_by_its_reason(
    model_type: str, entries: dict[str, Any], said: str
) -> None:
    problem = why_not({"model_type": model_type, **entries})
    assert problem is not None
    assert said in problem
    assert "\n" not in problem


def test_layers_that_attend_otherwise_than_the_config_says_are_refused(tmp_path: Path) -> None:
    """GPT-NeoX has as many KV heads as query heads, whatever its config.json has."""
    path = make_random_model("gpt_neox", tmp_path / "model")
    with pytest.raises(ModelPathError, match=r"layer 0 has query heads, KV heads"):
        make_runner(path, Setup())


def test_numbers_that_transformers_cannot_compute_with_are_refused(tmp_path: Path) -> None:
    path = make_random_model("gemma", tmp_path / "model")
    entries = json.loads((path / "config.json").read_text())
    entries["rope_parameters"]["rope_theta"] = -(1 << 70)
    (path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ModelPathError, match="transformers cannot make the model"):
        make_runner(path, Setup())


def test_without_transformers_the_refusal_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_random_model("olmo2", tmp_path / "model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(ModelPathError, match=r"pip install 'sglang-adaptive\[transformers\]'"):
        load_model_config(str(path))


def test_our_own_families_do_not_import_transformers(tmp_path: Path) -> None:
    path = build_own(tmp_path / "model", "llama")
    program = (
        "import sys; from sglang.srt.model_config import load_model_config as load;"
        f" load({str(path)!r}); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)


def test_labels_of_classes_are_not_made() -> None:
    """transformers' configs make a name of each."""
    entries = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "model_type": "olmo2"}
    assert len(read_config({**entries, "num_labels": 1 << 20}).id2label) < 10


def test_entries_that_choose_code_do_nothing(tmp_path: Path) -> None:
    path = make_random_model("olmo2", tmp_path / "model")
    right = Model(path).expected(sequence(30))[-1]
    (path / "evil.py").write_text("raise SystemExit('code of a folder ran')")
    change_config(
        path,
        auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        attn_implementation="someone/kernels",
        _attn_implementation="someone/kernels",
        return_dict=False,
        output_hidden_states=True,
        use_cache=True,
    )
    assert_close(Feeder(make_runner(path, Setup()), 1).feed({"a": sequence(30)})["a"], right)
