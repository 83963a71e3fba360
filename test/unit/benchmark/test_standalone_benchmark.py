"""The draft model of the benchmark: a larger one that says what a small one says."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmark import inflate
from benchmark.mtp_model import STANDALONE, inflate_words
from benchmark.random_model import DRAFT_GEOMETRIES, LLAMA_8B
from mtp_oracle import load_reference
from sglang.srt.model_config import DEMO_MODELS_DIR, load_model_config
from training.export import write_model_folder
from training.model import Llama, LlamaShape
from training.train_draft import draft_shape

DEMO = DEMO_MODELS_DIR / "tiny-code"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As training writes them, with random weights."""
    torch.manual_seed(0)
    shape = LlamaShape.from_config(json.loads((DEMO / "config.json").read_text()))
    model = Llama(draft_shape(shape))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.5 * weight.shape[1] ** -0.5)
    folder = tmp_path_factory.mktemp("draft")
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    write_model_folder(folder, model, tokenizer, has_mask=False)
    return folder


@pytest.mark.parametrize("name", DRAFT_GEOMETRIES)
def test_the_demo_draft_fits_into_each_geometry(draft: Path, name: str) -> None:
    geometry = DRAFT_GEOMETRIES[name]
    plan = inflate.plan_inflation(load_model_config(str(draft)), geometry)
    assert plan.target == geometry
    if name != "tiny-draft":
        assert geometry.vocab_size == LLAMA_8B.vocab_size


@torch.inference_mode()
def test_the_larger_draft_model_says_what_the_small_one_says(draft: Path, tmp_path: Path) -> None:
    arguments = Namespace(algorithm=STANDALONE, geometry="tiny", device="cpu")
    words = ["--out", str(tmp_path / "large"), *inflate_words(str(draft), arguments)]
    assert inflate.main([*words, "--dtype", "float32"]) == 0
    large = load_reference(tmp_path / "large")
    assert large.config.hidden_size == DRAFT_GEOMETRIES["tiny-draft"].hidden_size
    tokens = torch.randint(3, 4096, (2, 40), generator=torch.Generator().manual_seed(1))
    small_logits, logits = (each(tokens).logits for each in (load_reference(draft), large))
    torch.testing.assert_close(logits[..., :4096], small_logits, rtol=1e-3, atol=1e-3)
    assert (logits.argmax(-1) < 4096).all()
