"""Weights of 8 bits with scales: what is served is what they mean, however they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from draft_heads import EAGLE3
from drafter_checks import Request, assert_same, serve
from eagle_models import CONTEXT, VOCAB, eagle_config_for, write_eagle3_head
from eagle_serving import setup_for
from fp8_models import (
    FORMS,
    FP8,
    Tensors,
    fp8_tensors,
    is_rounded,
    rounded,
    tensors_of,
    write_folder,
    write_fp8,
)
from model_harness import Decoding, Feeder, Model, assert_close, assert_greedy, sequence
from ngram_serving import ngram_config
from sglang.srt.layers.linear import FusedLinear, Linear
from sglang.srt.layers.ops.torch_ops import TorchOps
from sglang.srt.layers.scaled_weight import ScaledWeight, multiplies, scaled
from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.model_loader.loader import load_model
from sglang.srt.weight_format import CHANNEL, WeightFormat, format_of
from sglang.srt.weight_sync.weight_reader import WeightUpdateError
from thread_ranks import ThreadRanks
from utils import (
    MTP_MAX_ROWS,
    VOCAB_SIZE,
    SchedulerHarness,
    Setup,
    make_execution,
    make_mtp_worker,
    make_random_model,
    make_runner,
)

# Heads of 32 features: parts of two ranks are whole blocks.
SIZES = {"head_dim": 32, "intermediate_size": 128, "num_attention_heads": 4}
DOWN = "model.layers.1.mlp.down_proj"
K_PROJ = "model.layers.0.self_attn.k_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("qwen3", tmp_path_factory.mktemp("fp8") / "plain", **SIZES)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("qwen3", tmp_path_factory.mktemp("fp8") / "other", seed=5, **SIZES)


@pytest.fixture(scope="module")
def folders(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Makes a checkpoint of a form, and what it means, once."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(form: str) -> tuple[Path, Path]:
        if form not in made:
            made[form] = write_fp8(plain, tmp_path_factory.mktemp("form"), form)
        return made[form]

    return of


def rounding_runner(path: Path) -> ModelRunner:
    """The plain model at `path`, with weights rounded to 8 bits as it is loaded."""
    execution = make_execution(path, Setup())
    return make_runners(
        replace(execution, model=replace(execution.model, rounds_weights=True))
    ).target


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """[3, vocab_size] of a prompt in two parts and a token."""
    feeder, tokens = Feeder(runner, 1), sequence(30)
    parts = (tokens[:20], tokens[20:29], tokens[29:])
    return torch.stack([feeder.feed({"a": part})["a"] for part in parts])


def held(runner: ModelRunner) -> set[str]:
    """Names of the layers that hold 8 bits."""
    return {
        name
        for name, module in runner.model.named_modules()
        if isinstance(module, Linear) and module.weight.dtype == FP8
    }


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_transformers_over_the_values(
    folders: Callable[[str], tuple[Path, Path]], form: str
) -> None:
    stored, values = folders(form)
    runner = make_runner(stored, Setup())
    assert len(held(runner)) == 8  # all products of two layers
    assert torch.equal(logits_of(runner), logits_of(make_runner(values, Setup())))
    oracle = Model(values)
    assert_close(logits_of(runner)[-1], oracle.expected(sequence(30))[29])
    oracle.config = load_model_config(str(stored))
    [output] = Decoding(oracle, 4).generate([sequence(12)], 10, chunk=5)
    assert_greedy(oracle, sequence(12), output)


@pytest.mark.parametrize("form", ["channel", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_of_values_rounded_once(form: str, dtype: torch.dtype) -> None:
    """A weight may have smaller last blocks."""
    codes, scales, values = rounded(torch.randn(37, 50) * 3, form)
    weight = ScaledWeight(codes, scales, WeightFormat(*FORMS[form][1]))
    x, bias = torch.randn(3, 50).to(dtype), torch.randn(37).to(dtype)
    found = TorchOps(x.device).linear(x, weight, bias)
    assert torch.equal(found, F.linear(x, values.to(dtype), bias))
    made = scaled(values, weight.form)
    assert all(torch.equal(*pair) for pair in zip(made[:2], weight[:2], strict=True))


@pytest.mark.parametrize(
    ("family", "changes", "num_held"),
    [
        ("mixtral", {"num_local_experts": 4}, 4),  # experts hold values
        ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32}, 10),  # by transformers' code
        ("qwen2", {"tie_word_embeddings": False}, 8),  # biases
    ],
)
def test_other_families(
    tmp_path: Path, family: str, changes: dict[str, Any], num_held: int
) -> None:
    source = make_random_model(family, tmp_path / "plain", **{**SIZES, **changes})
    stored, values = write_fp8(source, tmp_path, "block")
    runner = make_runner(stored, Setup())
    found = logits_of(runner)
    assert len(held(runner)) == num_held
    assert torch.equal(found, logits_of(make_runner(values, Setup())))
    assert_close(found[-1], Model(values).expected(sequence(30))[29])


def test_what_is_not_stored_as_a_layer_holds_it_becomes_values(plain: Path, tmp_path: Path) -> None:
    """A head of 8 bits, and queries of 16 bits beside keys of 8."""
    tensors = tensors_of(plain)
    stored, values = fp8_tensors(tensors, "block")
    head = torch.randn(VOCAB_SIZE, 64) * 0.2
    stored["lm_head.weight"], stored["lm_head.weight_scale_inv"], values["lm_head.weight"] = (
        rounded(head, "block")
    )
    query = K_PROJ.replace("k_proj", "q_proj")
    stored[f"{query}.weight"] = values[f"{query}.weight"] = tensors[f"{query}.weight"]
    del stored[f"{query}.weight_scale_inv"]
    runner = make_runner(write_folder(plain, tmp_path / "fp8", stored, "block"), Setup())
    expected = make_runner(write_folder(plain, tmp_path / "values", values), Setup())
    assert held(runner).isdisjoint({"lm_head", "model.layers.0.self_attn.qkv_proj"})
    assert len(held(runner)) == 7
    assert torch.equal(logits_of(runner), logits_of(expected))


@pytest.mark.parametrize("rows", [1 << 60, 40])
def test_blocks_may_be_larger_than_a_weight(rows: int) -> None:
    codes, scales, values = rounded(torch.randn(37, 50), "tensor")
    form = WeightFormat(rows, 1 << 60)
    assert torch.equal(ScaledWeight(codes, scales.view(1, 1), form).values(torch.float32), values)
    assert torch.equal(scaled(values, form).codes.float(), codes.float())


def test_config_json_may_say_the_form_of_the_part_that_writes_text() -> None:
    said = {"quantization_config": FORMS["block"][0]}
    assert format_of({"text_config": said}) == WeightFormat(*FORMS["block"][1])


@pytest.mark.parametrize(("inputs", "rounds"), [({"num_bits": 8}, True), (None, False)])
def test_a_gpu_rounds_inputs_where_the_checkpoint_says_so(inputs: Any, rounds: bool) -> None:
    config: dict[str, Any] = json.loads(json.dumps(FORMS["channel"][0]))
    config["config_groups"]["group_0"]["input_activations"] = inputs
    form, device = format_of({"quantization_config": config}), torch.device("cuda")
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        assert multiplies(form, torch.bfloat16, device) == rounds
    assert multiplies(form, torch.bfloat16, torch.device("cpu"))


def test_parts_of_a_fused_layer_are_features_that_gpus_multiply_alone() -> None:
    assert FusedLinear(64, ("q", "k", "v"), (64, 16, 16), bias=False).takes(CHANNEL)
    assert not FusedLinear(64, ("q", "k", "v"), (40, 20, 20), bias=False).takes(CHANNEL)


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("block", {f"{DOWN}.weight_scale_inv": None}, f"'{DOWN}.weight' of 8 bits, but no"),
    ("channel", {f"{DOWN}.weight": None}, "no weight of 8 bits that it belongs to"),
    ("channel", {f"{DOWN}.weight": torch.zeros(64, 128)}, "no weight of 8 bits that it"),
    ("channel", {"model.norm.weight_scale": torch.ones(1)}, "'model.norm.weight_scale', but no"),
    ("channel", {"model.nothing.weight_scale": torch.ones(1)}, "does not know"),
    ("channel", {f"{DOWN}.weight_scale": torch.ones(65, 1)}, "takes 1 or"),
    ("block", {f"{DOWN}.weight_scale_inv": torch.ones(4, 3)}, "takes 1 or"),
    ("block", {f"{DOWN}.weight_scale_inv": -torch.ones(4, 4)}, "below 0"),
    ("block", {f"{DOWN}.weight_scale_inv": torch.full((4, 4), torch.inf)}, "NaN or infinite"),
    ("tensor", {f"{DOWN}.weight_scale": torch.ones(1, dtype=torch.int32)}, "of type torch.int32"),
    ("channel", {f"{DOWN}.weight_scale_inv": torch.ones(1)}, "twice"),
    ("tensor", {f"{DOWN}.weight": torch.full((64, 128), torch.nan).to(FP8)}, "NaN or infinite"),
    ("tensor", {f"{DOWN}.weight": torch.zeros(64, 127).to(FP8)}, "config.json asks for"),
    ("tensor", {f"{DOWN}.weight": torch.zeros(64, 128).to(torch.float8_e5m2)}, "float8_e5m2"),
]


@pytest.mark.parametrize(("form", "change", "said"), CHANGES, ids=lambda value: str(value)[:60])
def test_wrong_scales_end_a_start_with_one_line_and_leave_a_running_model(
    folders: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
    form: str,
    change: dict[str, Any],
    said: str,
) -> None:
    stored, _ = folders(form)
    tensors = {**tensors_of(stored), **change}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    path = write_folder(stored, tmp_path / "wrong", tensors, form)
    with pytest.raises(ModelPathError) as refusal:
        load_model(load_model_config(str(path)), "auto", 64, torch.float32, "cpu")
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert "; " in str(refusal.value)
    runner = make_runner(stored, Setup())
    before = logits_of(runner)
    with pytest.raises(WeightUpdateError) as failed:
        runner.weights.reader.from_directory(str(path))
    assert said in str(failed.value)
    assert torch.equal(logits_of(runner), before)


# --- rounded at load -----------------------------------------------------------------------------


def test_rounding_at_load_is_that_of_a_checkpoint_by_outputs(
    plain: Path, folders: Callable[[str], tuple[Path, Path]]
) -> None:
    stored, _ = folders("channel")
    runner = rounding_runner(plain)
    assert torch.equal(logits_of(runner), logits_of(make_runner(stored, Setup())))


def test_logits_of_rounded_weights_stay_near(plain: Path) -> None:
    """A value moves by 1/16 of itself at most, or by 2^-10 of 1/448 of its row's largest; logits by
    a tenth of what they spread."""
    weights = rounding_runner(plain).weights
    for name, tensor in tensors_of(plain).items():
        found = weights.value_of(name)
        assert found is not None
        if is_rounded(name, tensor):
            least = tensor.abs().amax(1, keepdim=True) / 448 / 1024
            assert bool(((found - tensor).abs() <= tensor.abs() / 16 * 1.0001 + least).all())
        else:
            assert torch.equal(found, tensor)
    expected = logits_of(make_runner(plain, Setup()))
    error = (logits_of(rounding_runner(plain)) - expected).abs().max()
    assert float(error) < 0.1 * float(expected.max() - expected.min())


def test_experts_are_not_rounded(tmp_path: Path) -> None:
    path = make_random_model("mixtral", tmp_path / "plain", **SIZES, num_local_experts=4)
    with pytest.raises(ModelPathError, match="--quantization fp8: experts are not rounded here"):
        rounding_runner(path)


def test_weights_are_drawn_in_8_bits_too(plain: Path) -> None:
    config = replace(load_model_config(str(plain)), rounds_weights=True)
    model = load_model(config, "dummy", 64, torch.float32, "cpu")
    layer = model.get_submodule(DOWN)
    assert isinstance(layer, Linear)
    spread = float((layer.weight.float() * layer.weight_scale).std())
    assert layer.weight.dtype == FP8
    assert 0.018 < spread < 0.022


# --- look-ahead and ranks ------------------------------------------------------------------------


def requests(vocab_size: int) -> list[Request]:
    params: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "sampling_seed": 3}]
    return [
        Request([token % vocab_size for token in sequence(5 + 9 * number, number)] * 2, each)
        for number, each in enumerate(params * 2)
    ]


@pytest.mark.parametrize("form", ["block", "channel"])
def test_predicted_tokens_are_the_same_on_one_rank_and_two(
    folders: Callable[[str], tuple[Path, Path]], form: str
) -> None:
    """Plain, verified and unverified requests in one batch; ranks divide scales as weights."""
    path, values = folders(form)
    setup, kinds = Setup(chunked_prefill_size=7), [{"mtp_verify": True}, {"mtp_verify": False}]
    ranks = ThreadRanks(make_execution(path, setup, max_decode_rows=MTP_MAX_ROWS), 2)
    ranks.serve(lambda runners: make_mtp_worker(runners.target, VOCAB_SIZE - 1))
    worker = make_mtp_worker(make_runner(path, setup), VOCAB_SIZE - 1)
    given = []
    for harness in (SchedulerHarness(setup, ranks.worker), SchedulerHarness(setup, worker)):
        numbers = [
            harness.submit(sequence(12, 1), temperature=0.0, max_new_tokens=12, **params)
            for params in ({}, *({"mtp_enabled": True, "mtp_k": 4, **each} for each in kinds))
        ]
        harness.run()
        given.append([harness.outputs[number].token_ids for number in numbers])
    weights = ranks.resources.weights
    for name, tensor in tensors_of(values).items():
        found = weights.value_of(name)
        assert torch.equal(found, tensor), name
    assert weights.value_of(f"{DOWN}.weight_scale").shape == (
        (4, 4) if form == "block" else (64, 1)
    )
    ranks.settle()
    assert given[0] == given[1]
    assert given[0][0] == given[0][1]
    assert_greedy(Model(values), sequence(12, 1), given[0][0])


@pytest.mark.parametrize("form", ["block", "channel"])
def test_ranks_have_parts_of_products_that_files_hold_as_one(tmp_path: Path, form: str) -> None:
    """Transformers' code computes; queries, keys and values are one weight with its scales."""
    source = make_random_model("phi3", tmp_path / "plain", pad_token_id=0, **SIZES)
    path, values = write_fp8(source, tmp_path, form)
    setup, prompt = Setup(), sequence(12, 1)
    ranks = ThreadRanks(make_execution(path, setup, max_decode_rows=MTP_MAX_ROWS), 2)
    ranks.serve(lambda runners: make_mtp_worker(runners.target, VOCAB_SIZE - 1))
    assert [len(held(rank.runners.target)) for rank in ranks.ranks] == [8, 8]
    for name, tensor in tensors_of(values).items():
        found = ranks.resources.weights.value_of(name)
        assert torch.equal(found, tensor), name
    harness = SchedulerHarness(setup, ranks.worker)
    (found,) = harness.generate([prompt], temperature=0.0, max_new_tokens=8)
    ranks.settle()
    assert_greedy(Model(values), prompt, found)


def test_drafts_of_ngrams_change_no_token(folders: Callable[[str], tuple[Path, Path]]) -> None:
    path, _ = folders("channel")
    asked = [
        Request(each.prompt, {"max_new_tokens": 20, **each.params}) for each in requests(VOCAB_SIZE)
    ]
    served = serve(path, Setup(), ngram_config(3), asked)
    assert served.seen["fed"]
    assert_same(served.outcomes, serve(path, Setup(), None, asked).outcomes)


def test_drafts_of_a_head_that_reads_its_layers_change_no_token(tmp_path: Path) -> None:
    """The head has 8 bits too, and drafts as its values do."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 8}
    changes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    source = make_random_model(
        "llama", tmp_path / "plain", **sizes, **changes, tie_word_embeddings=False
    )
    target, _ = write_fp8(source, tmp_path, "block")
    plain_head = write_eagle3_head(tmp_path / "head", target)
    heads = write_fp8(plain_head, tmp_path / "heads", "channel")
    drafter, other = (eagle_config_for(target, head, EAGLE3, 2) for head in heads)
    asked = [
        Request(each.prompt[:40], {"max_new_tokens": 16, **each.params}) for each in requests(VOCAB)
    ]
    setup = setup_for(2)
    served = serve(target, setup, drafter, asked)
    assert served.seen["fed"]
    assert served.seen == serve(target, setup, other, asked).seen
    assert_same(served.outcomes, serve(target, setup, None, asked).outcomes)


# --- new weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_new_weights_in_16_bits_are_rounded_and_those_in_8_keep_their_scales(
    folders: Callable[[str], tuple[Path, Path]], other: Path, num_ranks: int
) -> None:
    new = {name: tensor.bfloat16() for name, tensor in tensors_of(other).items()}
    for form in ("block", "channel"):
        ranks = ThreadRanks(make_execution(folders(form)[0], Setup()), num_ranks)
        ranks.serve(lambda runners: make_mtp_worker(runners.target, VOCAB_SIZE - 1))
        weights = ranks.resources.weights
        wide = {name: tensor.float() for name, tensor in new.items()}
        stored, values = fp8_tensors(wide, form)
        weights.apply(weights.reader("target").from_tensors(iter(new.items())))
        check_served(weights, values)
        weights.apply({name: torch.zeros(()).expand(weights.value_of(name).shape) for name in new})
        assert not weights.value_of(f"{DOWN}.weight").any()
        reversed_order = dict(reversed(stored.items()))
        weights.apply(weights.reader("target").from_tensors(iter(reversed_order.items())))
        check_served(weights, values)
        ranks.settle()


def check_served(weights: Any, values: Tensors) -> None:
    for name, tensor in values.items():
        assert torch.equal(weights.value_of(name), tensor.float()), name


@pytest.mark.parametrize("change", [{"device": "meta"}, {"layout": torch.sparse_coo}], ids=str)
def test_numbers_of_8_bits_and_scales_without_values_are_refused(
    folders: Callable[[str], tuple[Path, Path]], other: Path, change: dict[str, Any]
) -> None:
    stored = tensors_of(folders("tensor")[0])
    names = f"{DOWN}.weight", f"{DOWN}.weight_scale"
    runner = make_runner(other, Setup())
    for bad in names:
        shape, dtype = stored[bad].shape, stored[bad].dtype
        given = {name: stored[name] for name in names}
        given[bad] = torch.empty(shape, dtype=dtype, **change)
        with pytest.raises(WeightUpdateError, match="without plain values"):
            runner.weights.reader.from_tensors(iter(given.items()))


def test_a_plain_model_takes_weights_of_8_bits_once(
    folders: Callable[[str], tuple[Path, Path]], other: Path
) -> None:
    stored = tensors_of(folders("tensor")[0])
    names = f"{DOWN}.weight", f"{DOWN}.weight_scale", f"{DOWN}.weight"
    with pytest.raises(WeightUpdateError, match="twice"):
        make_runner(other, Setup()).weights.reader.from_tensors((n, stored[n]) for n in names)


def test_a_plain_model_takes_weights_of_8_bits_as_values(
    folders: Callable[[str], tuple[Path, Path]], other: Path
) -> None:
    """Each tensor's memory may be used until the next one is asked for."""
    stored, values = folders("tensor")
    runner = make_runner(other, Setup())

    def lent() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors_of(stored).items():
            yield name, tensor
            tensor.zero_()

    runner.weights.apply(runner.weights.reader.from_tensors(lent()))
    assert not held(runner)
    assert torch.equal(logits_of(runner), logits_of(make_runner(values, Setup())))


def test_weights_come_back_after_their_memory_was_released(
    folders: Callable[[str], tuple[Path, Path]],
) -> None:
    runner = make_runner(folders("block")[0], Setup())
    before = logits_of(runner)
    runner.weights.release()
    assert all(not each.untyped_storage().nbytes() for each in runner.model.parameters())
    runner.weights.restore()
    assert torch.equal(logits_of(runner), before)
