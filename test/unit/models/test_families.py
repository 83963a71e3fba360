"""Every family that is served equals transformers: tied or not, with every RoPE scaling and with
sliding windows shorter than the prompt, however the tokens are fed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

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
from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.transformer import CausalLM
from sglang.srt.registry import MODELS
from utils import CONTEXT_LEN, make_random_model

WINDOW = 7
ORIGINAL = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 8.0, **ORIGINAL}
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    "yarn": YARN,
    "yarn mscale": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5},
}
SLIDING_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2, window in all layers": ("qwen2", {**SLIDING_QWEN, "max_window_layers": 0}),
    "qwen2, window in the last": (
        "qwen2",
        {**SLIDING_QWEN, "max_window_layers": 2, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3, window in the first": (
        "qwen3",
        {**SLIDING_QWEN, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
FAMILIES |= {
    "mixtral": ("mixtral", EXPERTS),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 32}),
}
# Each family with each kind of RoPE, and both with tied and untied heads.
CASES = [
    (family, rope, (number + place) % 2 == 0)
    for number, family in enumerate(FAMILIES)
    for place, rope in enumerate(ROPES)
]
CASE_IDS = [
    f"{family}; {rope}; {'tied' if is_tied else 'untied'}" for family, rope, is_tied in CASES
]


def build(path: Path, family: str, rope: str = "plain", is_tied: bool = True) -> Path:
    model_type, changes = FAMILIES[family]
    parameters = {"rope_theta": 10_000.0, **ROPES[rope]}
    return make_random_model(
        model_type, path, tie_word_embeddings=is_tied, rope_parameters=parameters, **changes
    )


@pytest.fixture(scope="module", params=CASES, ids=CASE_IDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(build(tmp_path_factory.mktemp("models") / "model", *request.param))


def load(path: Path) -> CausalLM:
    return load_model(load_model_config(str(path)), "auto", 64, torch.float32, "cpu")


def change_config(path: Path, **changes: Any) -> None:
    """Entries that are None are removed."""
    config = {**json.loads((path / "config.json").read_text()), **changes}
    kept = {name: value for name, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))


def refusal(path: Path) -> str:
    with pytest.raises(ModelPathError) as error:
        load(path)
    message = str(error.value)
    assert str(path / "config.json") in message
    assert "\n" not in message
    return message


# --- equality ------------------------------------------------------------------------------------


def test_every_registered_family_is_tested() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tested = {
        AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(model_type))].__name__
        for model_type, _ in FAMILIES.values()
    }
    assert tested == set(MODELS.names) - {"MiMoForCausalLM"}  # Qwen2's class


@pytest.mark.long_matrix
def test_prompts_whole_and_in_chunks_beside_decodes(model: Model) -> None:
    check_whole_and_chunked_prompts(model, num_steps=12)


@pytest.mark.long_matrix
def test_greedy_decoding_of_a_batch(model: Model) -> None:
    """One batch from step to step: the backend adds to the KV that it gathered before."""
    prompts = [sequence(length, seed=length) for length in (1, 12, 25)]
    outputs = Decoding(model, 4).generate(prompts, 10, chunk=10)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(model, prompt, output)


@pytest.mark.parametrize("family", [name for name in FAMILIES if "window" in name])
def test_ragged_steps_of_several_requests_with_windows(tmp_path: Path, family: str) -> None:
    windowed = Model(build(tmp_path / "model", family, "yarn"))
    sequences = {name: sequence(60, seed) for seed, name in enumerate("abcd")}
    expected = {name: windowed.expected(tokens) for name, tokens in sequences.items()}
    feeder = Feeder(windowed.runner(1), 1)
    chooser = random.Random(2)
    left = {name: list(tokens) for name, tokens in sequences.items()}
    while left:
        names = chooser.sample(sorted(left), chooser.randint(1, len(left)))
        sizes = {name: chooser.choice([1, 1, 2, 5, 20]) for name in names}
        chunks = {name: left[name][:size] for name, size in sizes.items()}
        left = {name: tokens[sizes.get(name, 0) :] for name, tokens in left.items()}
        left = {name: tokens for name, tokens in left.items() if tokens}
        for name, logits in feeder.feed(chunks).items():
            assert_close(logits, expected[name][feeder.fed[name] - 1])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama, biases", {"attention_bias": False, "mlp_bias": False}),
        ("mistral, window", {"sliding_window": WINDOW + 1}),
        ("qwen2, window in all layers", {"max_window_layers": 1, "layer_types": None}),
        ("qwen3, window in the first", {"sliding_window": WINDOW - 1}),
        ("qwen2", {"rope_parameters": {**YARN, "rope_theta": 500_000.0}}),
    ],
    ids=str,
)
def test_each_option_matters(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Logits that ignore an option differ by far more than the tolerance."""
    from transformers import AutoModelForCausalLM

    path = build(tmp_path / "model", family)
    tokens = sequence(30)
    before = Model(path).expected(tokens)[-1]
    change_config(path, **changes)
    other = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        after = other(torch.tensor([tokens])).logits[0, -1]
    assert float((before - after).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("rope", ROPES)
def test_the_spelling_of_transformers_4_loads_the_same_model(tmp_path: Path, rope: str) -> None:
    path = build(tmp_path / "model", "qwen2", rope)
    new = load(path)
    old_names = {("type" if key == "rope_type" else key): v for key, v in ROPES[rope].items()}
    theta = old_names.pop("rope_theta", 10_000.0)
    scaling = None if rope == "plain" else old_names
    change_config(path, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    assert "rope_parameters" not in json.loads((path / "config.json").read_text())
    assert torch.equal(load(path).model.rotary.table, new.model.rotary.table)


def test_one_norm_weight_serves_all_query_heads(tmp_path: Path) -> None:
    path = build(tmp_path / "model", "qwen3")
    weights = dict(load(path).named_parameters())
    assert weights["model.layers.0.self_attn.q_norm.weight"].shape == (16,)
    assert weights["model.layers.0.self_attn.k_norm.weight"].shape == (16,)


# --- windows of the layers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("llama", {"sliding_window": 5}, (None, None)),
        ("mistral", {}, (4096, 4096)),
        ("mistral, window", {}, (WINDOW, WINDOW)),
        ("qwen2", {"sliding_window": 5}, (None, None)),
        ("qwen2", {"layer_types": None, **SLIDING_QWEN, "max_window_layers": 1}, (None, WINDOW)),
        ("qwen2", {"layer_types": None, **SLIDING_QWEN, "max_window_layers": 2}, (None, None)),
        ("qwen2", {"layer_types": None, "max_window_layers": 0}, (None, None)),
        ("qwen3", {"layer_types": None, **SLIDING_QWEN, "max_window_layers": 0}, (WINDOW, WINDOW)),
        ("qwen3, window in the first", {}, (WINDOW, None)),
        ("qwen3, window in the first", {"max_window_layers": 1}, (WINDOW, None)),
    ],
    ids=str,
)
def test_the_window_of_each_layer(
    tmp_path: Path, family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    path = build(tmp_path / "model", family)
    change_config(path, **changes)
    if family == "mistral":
        change_config(path, sliding_window=None)  # missing, not null
    assert load(path).windows == windows


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "remove the entry"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must be a list of 2"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "use a checkpoint"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window"),
        ("qwen3", {"use_sliding_window": 1}, "use_sliding_window must be true or false"),
        (
            "qwen3",
            {"layer_types": None, "use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers must be",
        ),
        ("qwen3", {"architectures": ["Qwen9ForCausalLM"]}, "known: LlamaForCausalLM"),
        ("mixtral", {"num_experts_per_tok": 5}, "there are 4 experts"),
        ("qwen3_moe", {"num_local_experts": None}, "num_experts nor num_local_experts"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("qwen3_moe", {"moe_intermediate_size": 1 << 63}, "at most 16777216, not 9223372036"),
        ("mistral", {"sliding_window": 1 << 40}, "at most 16777216, not 1099511627776"),
        ("qwen3_moe", {"mlp_only_layers": [[1]]}, "mlp_only_layers must be a list of layers"),
        ("qwen3", {"num_experts": 4}, "dense checkpoint"),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "remove the"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_in_one_line(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    path = build(tmp_path / "model", family)
    change_config(path, **changes)
    assert said in refusal(path)


def test_biases_that_config_does_not_announce_are_refused(tmp_path: Path) -> None:
    path = build(tmp_path / "model", "llama, biases")
    change_config(path, attention_bias=False)
    with pytest.raises(ModelPathError, match=r"self_attn\.\w+_proj\.bias.*does not know"):
        load(path)


def test_a_linear_scaling_makes_room_for_longer_requests(tmp_path: Path) -> None:
    path = build(tmp_path / "model", "mistral", "linear")
    assert load_model_config(str(path)).context_len == CONTEXT_LEN * 2.5
