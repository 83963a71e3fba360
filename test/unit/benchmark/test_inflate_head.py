"""An inflated head over an inflated target says what the small ones say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmark.inflate import (
    HEAD_LAYOUTS,
    Filling,
    InflationError,
    pad_draft_vocabulary,
    plan_inflation,
    write_head,
    write_model,
)
from benchmark.random_model import Geometry
from draft_heads import FILE, Oracle
from sglang.srt.head_config import load_head_config
from sglang.srt.model_config import load_model_config
from training.eagle_head import EAGLE3, make_head, tap_layers
from training.export import model_config, write_json
from training.export_eagle import write_head_folder
from training.model import Llama, LlamaShape

SHAPE = LlamaShape(
    vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=4, head_dim=16,
    max_position_embeddings=64, rope_theta=900.0,
)  # fmt: skip
LARGE = Geometry(128, 96, 6, 16, 4, 16, 80)
TOKENS = [0, *range(5, 40, 2), 7, 7, 30]


def random_weights(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            is_norm = weight.dim() == 1
            weight.uniform_(0.5, 1.5) if is_norm else weight.normal_(0, weight.shape[1] ** -0.5)


@torch.no_grad()
def logits_of(base: Path, folder: Path, algorithm: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt's rows, and of two more that read the head's own output."""
    from transformers import LlamaForCausalLM

    target = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    states = target.model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    embedding = target.model.embed_tokens.weight
    oracle = Oracle(folder, embedding, target.lm_head.weight)
    floats = {n: t.float() for n, t in oracle.tensors.items() if t.is_floating_point()}
    oracle.tensors |= floats
    taps = tap_layers(algorithm, SHAPE.num_hidden_layers)
    read = torch.cat([states[layer][0] for layer in taps], dim=1) if taps else states[-1][0]
    hidden, tokens = oracle.combine(read[:-1]), TOKENS[1:]
    carried, prompt_logits = oracle.run(tokens, hidden)
    for token in (11, 12):
        hidden, tokens = torch.cat((hidden, carried[-1:])), [*tokens, token]
        carried, logits = oracle.run(tokens, hidden)
    return prompt_logits, logits[-2:]


@pytest.mark.long_matrix
@pytest.mark.parametrize("silent_std", [0.0, 1e-12])
@pytest.mark.parametrize(
    ("algorithm", "draft_vocab_size"), [*((name, None) for name in HEAD_LAYOUTS), (EAGLE3, 40)]
)
def test_logits_stay_what_they_were(
    algorithm: str, draft_vocab_size: int | None, silent_std: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    target = Llama(SHAPE)
    head = make_head(algorithm, target, torch.arange(0, 48, 2))
    for model in (target, head):
        random_weights(model)
    base, folder = tmp_path / "base", tmp_path / "head"
    base.mkdir()
    write_json(base / "config.json", model_config(target))
    weights = target.to_hf_state_dict(torch.float32)
    save_file(weights, base / FILE, metadata={"format": "pt"})
    write_head_folder(folder, algorithm, head, tap_layers(algorithm, 4))

    config = load_model_config(str(base))
    plan = plan_inflation(config, LARGE)
    filling = Filling(dtype=torch.float32, silent_std=silent_std)
    write_model(config, tmp_path / "big", plan, filling)
    small_head = load_head_config(str(folder), HEAD_LAYOUTS[algorithm], config)
    write_head(small_head, tmp_path / "big_head", plan, filling, draft_vocab_size)
    big = load_model_config(str(tmp_path / "big"))
    loaded = load_head_config(str(tmp_path / "big_head"), HEAD_LAYOUTS[algorithm], big)
    assert (loaded.hidden_size, loaded.num_heads, loaded.num_layers) == (128, 16, 1)

    small = logits_of(base, folder, algorithm)
    large = logits_of(tmp_path / "big", tmp_path / "big_head", algorithm)
    for expected, found in zip(small, large, strict=True):
        count = expected.shape[1]
        torch.testing.assert_close(found[:, :count], expected, rtol=1e-4, atol=1e-4)
        if found.shape[1] > count:
            assert found[:, count:].max() < expected.min() - 50  # padding is never drafted
    if draft_vocab_size is not None:
        assert large[0].shape[1] == draft_vocab_size
        tensors = load_file(tmp_path / "big_head" / FILE)
        ids = tensors["d2t"] + torch.arange(draft_vocab_size)
        assert ids.tolist() == [*range(0, 48, 2), *range(48, 64)]
        assert torch.nonzero(tensors["t2d"])[:, 0].tolist() == ids.tolist()


def test_a_vocabulary_that_cannot_be_padded_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", model_config(Llama(SHAPE)))
    plan = plan_inflation(load_model_config(str(tmp_path)), LARGE)
    with pytest.raises(InflationError, match="has the target's vocabulary"):
        pad_draft_vocabulary({}, 40, plan, Filling())
    for size in (8, 42):  # 32 tokens of padding
        with pytest.raises(InflationError, match="must be between 9 and 41"):
            pad_draft_vocabulary({"d2t": torch.zeros(9)}, size, plan, Filling())
