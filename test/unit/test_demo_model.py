"""The shipped demo model `tiny-code`, read by transformers and tokenizers as a user would."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).resolve().parents[2] / "python" / "sglang" / "demo_models" / "tiny-code"
RESULTS = FOLDER.parents[3] / "benchmark" / "results"
SPECIAL_IDS = {"bos": 0, "eos": 1, "mask": 2}

# Written for this test, so it is in no training file.
UNSEEN_SOURCE = '''"""Keep a running tally of the parcels that pass a sorting gate."""

import time
from dataclasses import dataclass, field


@dataclass
class ParcelTally:
    """Count parcels by destination and remember when the last one passed."""

    counts: dict[str, int] = field(default_factory=dict)
    last_seen: float | None = None

    def add(self, destination: str, number: int = 1) -> None:
        if number < 0:
            raise ValueError(f"number must not be negative, got {number}")
        self.counts[destination] = self.counts.get(destination, 0) + number
        self.last_seen = time.time()

    def total(self) -> int:
        return sum(self.counts.values())

    def busiest(self) -> str | None:
        if not self.counts:
            return None
        return max(self.counts, key=lambda name: self.counts[name])


def main() -> None:
    tally = ParcelTally()
    for name in ["north", "south", "north"]:
        tally.add(name)
    print(tally.busiest(), tally.total())


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def plain_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_config_has_the_frozen_shape(model) -> None:
    raw = json.loads((FOLDER / "config.json").read_text())
    frozen = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": SPECIAL_IDS["bos"],
        "eos_token_id": SPECIAL_IDS["eos"],
        "mtp_mask_token_id": SPECIAL_IDS["mask"],
    }
    assert {key: raw[key] for key in frozen} == frozen
    # What transformers makes of it: the rotary frequencies and the tie are easy to lose.
    expected = 500_000.0 ** (-torch.arange(0, 128, 2).float() / 128)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_983_040


def test_folder_is_complete_small_and_described() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } == set(files)
    assert sum(files.values()) < 10.6e6
    card = (FOLDER / "README.md").read_text()
    for part in (
        "## Multi-token prediction",
        "## Held-out packages",
        "## Samples",
        "## Limits",
        "## Licence and corpus",
    ):
        assert part in card


def test_card_holds_the_figures_of_the_results_files() -> None:
    card = (FOLDER / "README.md").read_text()
    base = json.loads((RESULTS / "train_base_tiny_code.json").read_text())["held_out_loss"]
    taught = json.loads((RESULTS / "train_mtp_tiny_code.json").read_text())
    before, after = (taught["held_out_loss"][when] for when in ("before", "after"))
    for context in ("512", "4096"):
        losses = [table[context]["overall"]["nats_per_token"] for table in (base, before, after)]
        assert losses[1] == pytest.approx(losses[0], abs=1e-4)
        assert losses[2] < 1.04 * losses[0]
        assert f"{losses[1]:.3f} and {losses[2]:.3f} " in card
    for name, made in taught["prediction"]["own_text"].items():
        speed = f"{made['tokens_per_step']:.2f} ({made['tokens_per_step_all']:.2f})"
        assert f"| {name} | {speed} |" in card
    assert "were not taught" not in card


def test_special_tokens_are_in_the_vocabulary_and_distinct(tokenizer, plain_tokenizer) -> None:
    assert len(tokenizer) == tokenizer.vocab_size == plain_tokenizer.get_vocab_size() == 4096
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "mask": tokenizer.mask_token_id,
    }
    assert ids == SPECIAL_IDS
    template = FOLDER.parents[3] / "training" / "chat_template.jinja"
    assert tokenizer.chat_template == template.read_text()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_round_trip_of_any_text_is_byte_exact_and_bos_comes_once(text: str) -> None:
    plain = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = plain.encode(text).ids
    assert ids.count(SPECIAL_IDS["bos"]) == 1
    assert ids[0] == SPECIAL_IDS["bos"]
    assert plain.decode(ids) == text


def test_both_tokenizer_classes_give_the_same_ids(tokenizer, plain_tokenizer) -> None:
    for text in (UNSEEN_SOURCE, "", " x", "\t\r\n", "naïve 漢字 🙂\u200d\x00", "a<|mask|>b"):
        ids = tokenizer(text).input_ids
        assert ids == plain_tokenizer.encode(text).ids
        assert ids.count(SPECIAL_IDS["bos"]) == 1
        bare = tokenizer(text, add_special_tokens=False).input_ids
        assert bare == ids[1:]
        assert tokenizer.decode(bare, clean_up_tokenization_spaces=False) == text


def test_loss_on_unseen_code_needs_a_trained_and_intact_model(tokenizer, model) -> None:
    ids = tokenizer(UNSEEN_SOURCE, return_tensors="pt").input_ids
    assert len(UNSEEN_SOURCE.encode()) / ids.shape[1] > 2.7
    with torch.inference_mode():
        loss = float(model(input_ids=ids, labels=ids).loss)
        shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
        loss_shuffled = float(model(input_ids=shuffled, labels=shuffled).loss)
    # Uniform guessing costs ln 4096 = 8.3 nats; token frequencies alone about 6.
    assert loss < 2.2
    assert loss_shuffled > math.log(4096) - 1.0


def test_attention_reaches_far_back(tokenizer, model) -> None:
    """A long repeated text is cheap the second time: positions past 1,000 work."""
    one = tokenizer(UNSEEN_SOURCE, add_special_tokens=False).input_ids
    ids = torch.tensor([[SPECIAL_IDS["bos"], *one, *one, *one, *one]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    first, last = losses[: len(one)].mean(), losses[-len(one) :].mean()
    assert last < 0.4 * first


@pytest.mark.long_matrix
def test_a_mask_says_the_token_after_the_next(tokenizer, model) -> None:
    ids = tokenizer(UNSEEN_SOURCE).input_ids
    mask = SPECIAL_IDS["mask"]

    def last_choice(tokens: list[int]) -> int:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].clone()
            logits[mask] = -math.inf
            return int(logits.argmax())

    right = []
    for end in range(16, len(ids), 8):
        after_next = last_choice([*ids[:end], last_choice(ids[:end])])
        right.append(last_choice([*ids[:end], mask]) == after_next)
    assert sum(right) > 0.45 * len(right)


def test_greedy_continuation_is_python_like(tokenizer, model) -> None:
    prompt = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push("
    encoded = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**encoded, max_new_tokens=16, do_sample=False)
    text = tokenizer.decode(output[0, encoded.input_ids.shape[1] :])
    assert text.lstrip().startswith("self")
