"""Training of draft models: they learn to say what their target says, and their folders are models
that the runtime drafts with."""

from __future__ import annotations

import argparse
import code
import copy
import json
import sys
import textwrap
from argparse import Namespace
from inspect import getsource
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from test_train_eagle import NUM_TOKENS, SHAPE, VOCAB, in_bfloat16, tokens_of
from tokenizers import Tokenizer

from sglang.srt.draft_model_config import load_draft_config
from sglang.srt.model_config import DEMO_MODELS_DIR, load_model_config
from sglang.srt.model_executor.runner_group import make_runners
from training import train_draft
from training.corpus import Corpus, Package, SourceFile
from training.evaluate_draft import ModelPair, load_pair
from training.evaluate_eagle import MAX_STEPS, continue_by_drafts, summarize, teacher_forced
from training.evaluate_mtp import STATIC, check_lossless, continue_prompts
from training.export import write_model_folder
from training.model import Llama, LlamaShape
from training.tokens import MASK_ID
from training.train_draft import DraftTrainer, draft_shape
from training.train_eagle import make_own_text
from utils import Setup, make_execution

DEMO = DEMO_MODELS_DIR / "tiny-code"


@pytest.fixture(scope="module")
def target() -> Llama:
    torch.manual_seed(0)
    model = Llama(SHAPE).requires_grad_(False)
    in_bfloat16(model)
    return model


@pytest.fixture
def pair(target: Llama) -> ModelPair:
    torch.manual_seed(1)
    model = Llama(draft_shape(SHAPE)).requires_grad_(False)
    in_bfloat16(model)
    return ModelPair(target, model)


def test_the_draft_of_the_demo_model_has_about_a_million_parameters() -> None:
    shape = LlamaShape.from_config(json.loads((DEMO / "config.json").read_text()))
    model = Llama(draft_shape(shape))
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.1e6
    assert model.shape.head_dim == 64
    assert model.shape.max_position_embeddings == shape.max_position_embeddings


@torch.no_grad()
def test_drafts_are_the_draft_models_greedy_text(pair: ModelPair) -> None:
    """Behind texts of different lengths, whatever stands behind them."""
    text, lens = tokens_of(4), torch.tensor([9, 2, 20, 14])
    drafts = pair.draft(text, lens, 4)
    for row, length in enumerate(lens.tolist()):
        known = text[row, :length].tolist()
        for drafted in drafts[row].tolist():
            logits = pair.model.logits(pair.model(torch.tensor([known])))[0, -1]
            logits[MASK_ID] = float("-inf")
            assert drafted == int(logits.argmax())
            known.append(drafted)


@torch.no_grad()
def test_agreement_on_real_text_is_that_of_the_best_tokens(pair: ModelPair) -> None:
    tokens, starts = tokens_of(3), torch.tensor([0, 4, NUM_TOKENS - MAX_STEPS - 1])
    said, wanted = (
        each.logits(each(tokens)).index_fill(2, torch.tensor([MASK_ID]), float("-inf")).argmax(-1)
        for each in (pair.model, pair.target)
    )
    for step, hits in enumerate(pair.hits(tokens, starts)):
        for index, start in enumerate(starts.tolist()):
            row = start + step + 1
            assert torch.equal(hits[:, index], said[:, row] == wanted[:, row])
    twins = ModelPair(pair.target, pair.target)
    assert all(bool(hits.all()) for hits in twins.hits(tokens, starts))


@pytest.mark.long_matrix
def test_text_by_drafts_is_the_targets_own(pair: ModelPair) -> None:
    """A draft model of random weights guesses badly; one that is the target is always right."""
    prompts = tokens_of(4)
    plain = continue_prompts(pair.target, prompts, 1, STATIC, False, "plain")
    for drafting, least, most in ((pair, 1.0, 2.0), (ModelPair(pair.target, pair.target), 4, 4)):
        rounds = continue_by_drafts(drafting, prompts, 3, "drafts")
        check_lossless(rounds.made, plain, "drafts")
        assert least <= summarize(rounds, 3)["accept_length_all"] <= most


@pytest.mark.long_matrix
def test_training_teaches_a_draft_model_to_say_what_its_target_says(target: Llama) -> None:
    arguments = Namespace(
        batch_size=8, context=32, own_share=0.5, own_rows=32, own_batch=16, best_weight=0.5,
        long_context=64, long_rows=1, long_every=20, muon_lr=0.02, adam_lr=3e-3,
        weight_decay=0.01, compile=False, minutes=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCAB, (4000,), generator=generator, dtype=torch.int32)
    own = make_own_text(arguments, target, tokens, generator)
    pair = ModelPair(target, Llama(draft_shape(SHAPE)))
    before = [weight.clone() for weight in pair.model.parameters()]
    probe = own.windows.numpy().astype(np.uint16).flatten()
    trainer = DraftTrainer(arguments, pair, tokens, own, probe, generator)
    trainer.warm_up()
    for weight, old in zip(pair.model.parameters(), before, strict=True):
        assert torch.equal(weight, old)

    def accepted() -> float:
        return teacher_forced(pair, probe, 32, 1, torch.device("cpu"))["accepted"][0]

    untrained = accepted()
    for _ in range(200):
        trainer._backward(next(trainer.windows))
        trainer._step(1.0)
    assert accepted() > untrained + 0.15
    assert all(weight.grad is None for weight in target.parameters())


def test_a_folder_is_a_model_that_the_runtime_drafts_with(tmp_path: Path) -> None:
    """Checks a folder for the demo model: it has the same tokens, and no mask token, which it was
    not trained for."""
    demo = load_model_config(str(DEMO))
    shape = LlamaShape.from_config(json.loads((DEMO / "config.json").read_text()))
    model = Llama(draft_shape(shape))
    in_bfloat16(model)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    write_model_folder(tmp_path, model, tokenizer, has_mask=False)
    config = load_draft_config(str(tmp_path), demo, DEMO)
    assert "mtp_mask_token_id" not in config.hf
    assert config.context_len == demo.context_len
    again = load_pair(tmp_path, Llama(shape)).model
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    execution = make_execution(tmp_path, Setup(num_pages=64))
    assert make_runners(execution).target.num_parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )


def few_files(seed: int, max_bytes: int | None) -> Corpus:
    """Makes a corpus of a few files of the standard library."""

    def read(*modules: ModuleType) -> list[SourceFile]:
        return [
            SourceFile(Package(each.__name__, "1", "PSF-2.0"), each.__name__, getsource(each))
            for each in modules
        ]

    return Corpus(read(argparse, textwrap), read(code, copy), {})


@pytest.mark.long_matrix
def test_the_command_trains_writes_and_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With next to no time, on the CPU, of a corpus of a few files."""
    monkeypatch.setattr(train_draft, "collect_corpus", few_files)
    folder = tmp_path / "tiny-code-draft"
    small = {
        "--minutes": 0.005, "--own-rows": 4, "--own-batch": 4, "--context": 64, "--prompts": 1,
        "--batch-size": 4, "--long-context": 128, "--long-rows": 1,
        "--max-eval-tokens": 600,
    }  # fmt: skip
    words = [str(word) for pair in small.items() for word in pair]
    places = ["--base", str(DEMO), "--out", str(folder), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["train_draft", *places, *words])
    train_draft.main()
    results = json.loads((tmp_path / "tiny-code-draft.json").read_text())
    card = (folder / "README.md").read_text()
    found = results["acceptance"]["own_text"]["3"]
    assert f"({found['accept_length_all']:.2f})" in card
    assert f"| parameters | {results['draft']['parameters'] / 1e6:.2f} M," in card
    assert f"{results['training']['steps']:,} updates" in card
    names = {path.name for path in folder.iterdir()}
    assert names >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
