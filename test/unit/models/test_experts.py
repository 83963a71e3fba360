"""Mixtures of experts: routing, both forms of checkpoints, look-ahead, ranks and new weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_heads import EAGLE3
from drafter_checks import Request, assert_same, serve
from eagle_models import CONTEXT, VOCAB, eagle_config_for, write_eagle3_head
from eagle_serving import setup_for
from model_harness import Decoding, Feeder, Model, assert_close, assert_greedy, sequence
from ngram_serving import ngram_config
from sglang.srt.layers.ops.chosen_experts import choose_experts
from sglang.srt.layers.ops.torch_ops import TorchOps
from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.model_loader.loader import load_model
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

QWEN = {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen3_moe": ("qwen3_moe", {**QWEN, "norm_topk_prob": False}),
    "normalized, some layers": (
        "qwen3_moe",
        {**QWEN, "norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
}
FORMS = "one", "each"  # tensors of a checkpoint: one of all experts, or one of each


def write_model(path: Path, kind: str, seed: int = 0, has_ties: bool = True) -> Path:
    """A random model; scores of the first three experts of each layer may be equal."""
    model_type, changes = KINDS[kind]
    make_random_model(model_type, path, seed, **changes)
    [file] = path.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if has_ties and name.endswith(".gate.weight"):
            tensor[1:3] = tensor[0]
    save_file(tensors, file, {"format": "pt"})
    return path


def write_stacked(source: Path, path: Path) -> Path:
    """The same model as transformers writes it with the tensors that it computes with."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(path, save_original_format=False)
    return path


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("experts") / "model", request.param)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in both forms, and another one of its shape."""
    folder = tmp_path_factory.mktemp("mixtral")
    each = write_model(folder / "each", "mixtral")
    other = write_model(folder / "other", "mixtral", seed=1)
    return {"each": each, "one": write_stacked(each, folder / "one"), "other": other}


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    [file] = path.glob("*.safetensors")
    return load_file(file)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_row_is_the_weighted_sum_of_what_its_experts_make_of_it(normalizes: bool) -> None:
    """Against sums over rows and experts, one by one; equal scores among them."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, gate_up, down = drawn(9, 6), drawn(5, 8, 6), drawn(5, 6, 4)
    scores = torch.randint(0, 3, (9, 5), generator=generator).double()
    scores[:, 3] = -9.0
    chosen = choose_experts(scores, 2, normalizes).experts
    expected = torch.zeros_like(x)
    for row, experts in enumerate(chosen.tolist()):
        assert 3 not in experts
        least = min(float(scores[row, each]) for each in experts)
        assert sum(float(each) > least for each in scores[row]) < 2
        odds = scores[row].exp() / scores[row].exp().sum()
        total = float(odds[experts].sum()) if normalizes else 1.0
        for expert in experts:
            gate, up = (gate_up[expert] @ x[row]).split(4)
            made = down[expert] @ (gate * gate.sigmoid() * up)
            expected[row] += float(odds[expert]) / total * made
    found = TorchOps(x.device).experts(x, scores, gate_up, down, 2, normalizes)
    torch.testing.assert_close(found, expected)


def test_tokens_are_those_of_transformers_however_they_are_fed(path: Path) -> None:
    model = Model(path)
    prompts = [sequence(length, seed=length) for length in (1, 12, 25)]
    outputs = Decoding(model, 4).generate(prompts, 10, chunk=10)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(model, prompt, output)
    feeder, tokens = Feeder(model.runner(1), 1), sequence(30)
    expected = model.expected(tokens)
    for start, end in ((0, 17), (17, 29), (29, 30)):
        logits = feeder.feed({"a": tokens[start:end]})["a"]
        assert_close(logits, expected[end - 1])


def test_weights_that_do_not_sum_to_one_matter(tmp_path: Path) -> None:
    """Logits that ignore `norm_topk_prob` differ by far more than the tolerance."""
    path, tokens = write_model(tmp_path / "model", "qwen3_moe"), sequence(9)
    before = Model(path).expected(tokens)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True}))
    assert float((Model(path).expected(tokens) - before).abs().max()) > 0.01


# --- look-ahead ----------------------------------------------------------------------------------


def requests(vocab_size: int) -> list[Request]:
    params: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "sampling_seed": 3}]
    return [
        Request([token % vocab_size for token in sequence(5 + 9 * number, number)] * 2, each)
        for number, each in enumerate(params * 2)
    ]


def test_predicted_tokens_are_the_same_on_one_rank_and_two(path: Path) -> None:
    """Plain, verified and unverified requests in one batch, prompts in chunks."""
    setup, kinds = Setup(chunked_prefill_size=7), [{"mtp_verify": True}, {"mtp_verify": False}]
    execution = make_execution(path, setup, max_decode_rows=MTP_MAX_ROWS)
    ranks = ThreadRanks(execution, 2)
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
    ranks.settle()
    assert given[0] == given[1]
    assert given[0][0] == given[0][1]
    assert_greedy(Model(path), sequence(12, 1), given[0][0])


def test_drafts_of_ngrams_change_no_token(mixtral: dict[str, Path]) -> None:
    asked = [
        Request(each.prompt, {"max_new_tokens": 20, **each.params}) for each in requests(VOCAB_SIZE)
    ]
    plain = serve(mixtral["each"], Setup(), None, asked)
    served = serve(mixtral["each"], Setup(), ngram_config(3), asked)
    assert served.seen["fed"]
    assert_same(served.outcomes, plain.outcomes)


def test_drafts_of_a_head_that_reads_its_layers_change_no_token(tmp_path: Path) -> None:
    target = make_random_model(
        "mixtral",
        tmp_path / "target",
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        num_local_experts=4,
    )
    head = write_eagle3_head(tmp_path / "head", target)
    drafter = eagle_config_for(target, head, EAGLE3, 2)
    asked = [
        Request(each.prompt[:40], {"max_new_tokens": 16, **each.params}) for each in requests(VOCAB)
    ]
    setup = setup_for(2)
    served = serve(target, setup, drafter, asked)
    assert served.seen["fed"]
    assert_same(served.outcomes, serve(target, setup, None, asked).outcomes)


# --- weights -------------------------------------------------------------------------------------


def test_both_forms_of_a_checkpoint_are_the_same_model(mixtral: dict[str, Path]) -> None:
    assert not tensors_of(mixtral["each"]).keys() >= tensors_of(mixtral["one"]).keys()
    models = [
        load_model(load_model_config(str(mixtral[form])), "auto", 64, torch.float32, "cpu")
        for form in FORMS
    ]
    first, second = (dict(model.named_parameters()) for model in models)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_new_weights_come_in_both_forms_and_are_read_by_both_names(
    mixtral: dict[str, Path], num_ranks: int, tmp_path: Path
) -> None:
    """On ranks too, which hold a part of each expert."""
    ranks = ThreadRanks(make_execution(mixtral["other"], Setup()), num_ranks)
    ranks.serve(lambda runners: make_mtp_worker(runners.target, VOCAB_SIZE - 1))
    weights = ranks.resources.weights
    other = tensors_of(mixtral["other"])
    for form in FORMS:
        stored = tensors_of(mixtral[form])
        staged = weights.reader("target").from_tensors(iter(stored.items()))
        weights.apply(staged)
        for named in FORMS:
            for name, values in tensors_of(mixtral[named]).items():
                found = weights.value_of(name)
                assert found is not None
                assert torch.equal(found, values), name
        weights.apply(weights.reader("target").from_directory(str(mixtral["other"])))
        gate = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
        assert torch.equal(weights.value_of(gate), other[gate])
    ranks.settle()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 64, 95)}, "asks for"),
        ({"model.layers.0.mlp.experts.7.w1.weight": torch.zeros(96, 64)}, "does not know"),
        ({"model.layers.0.mlp.experts.0.w1.weight": torch.zeros(96, 64)}, "twice"),
        ({"model.layers.1.mlp.experts.down_proj": None}, "lacks 4 weights"),
        ({"model.layers.1.mlp.experts.gate_up_proj": torch.full((4, 192, 64), torch.nan)}, "NaN"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_experts_that_do_not_fit_are_refused(
    mixtral: dict[str, Path], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    tensors = {**tensors_of(mixtral["one"]), **change}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for file in mixtral["one"].glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_model_config(str(tmp_path))
    with pytest.raises(ModelPathError, match=said):
        load_model(config, "auto", 64, torch.float32, "cpu")
    store = make_runner(mixtral["each"], Setup()).weights
    with pytest.raises(WeightUpdateError, match=said):
        store.reader.from_directory(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_local_experts": 1 << 24}, "must be at most 4096"),
        ({"num_local_experts": 0}, "at least 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 4 experts"),
        ({"num_local_experts": None}, "how many experts there are"),
    ],
    ids=str,
)
def test_impossible_numbers_of_experts_are_refused_at_once(
    mixtral: dict[str, Path], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    """Before anything is made for each expert."""
    entries = json.loads((mixtral["one"] / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ModelPathError, match=said):
        load_model(load_model_config(str(tmp_path)), "dummy", 64, torch.float32, "cpu")
