"""The training script's layout: masks must see what they see when a request is decoded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from training.export_mtp import extend_card, read_base_card
from training.model import Llama, LlamaShape
from training.mtp_layout import (
    LATE_WEIGHT,
    holding_loss,
    make_layout,
    mask_loss,
    region_rows,
    row_weights,
    slot_tokens,
    with_slots,
)
from training.optim import MuonAdamW

ROOT = Path(__file__).resolve().parents[2]
MASK = 2
NUM_REAL, NUM_MASKS = 12, 10
SHAPE = LlamaShape(
    vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8
)


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    model = Llama(SHAPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("width", [1, 3, 4])
@torch.no_grad()
def test_mask_rows_compute_what_a_request_with_masks_behind_it_computes(
    model: Llama, width: int
) -> None:
    torch.manual_seed(width)
    real = torch.randint(3, 20, (2, NUM_REAL))
    anchors = torch.randint(NUM_REAL, (2, NUM_MASKS // width))
    layout = make_layout(anchors, NUM_REAL, NUM_MASKS, width)
    slots = torch.randint(3, 20, (2, NUM_MASKS // width, width))
    masks = torch.full((2, NUM_MASKS), MASK)
    for tokens in (
        torch.cat((real, masks), dim=1),
        with_slots(layout, torch.cat((real, masks), dim=1), slots),
    ):
        hidden = model(tokens, layout.positions, layout.visible)
        torch.testing.assert_close(hidden[:, :NUM_REAL], model(real))
        fed = region_rows(layout, tokens)
        for row in range(2):
            for region, anchor in enumerate(anchors[row].tolist()):
                alone = torch.cat((real[row, : anchor + 1], fed[row, region]))[None]
                expected = model(alone)[0, anchor + 1 :]
                start = NUM_REAL + region * width
                torch.testing.assert_close(hidden[row, start : start + width], expected)


def test_slots_hold_the_students_own_continuation() -> None:
    anchors = torch.tensor([[4, 0]])
    layout = make_layout(anchors, NUM_REAL, 6, 3)
    predicted = torch.arange(100, 100 + NUM_REAL + 6)[None]
    slots = slot_tokens(layout, predicted)
    assert slots.tolist() == [[[104, 112, 113], [100, 115, 116]]]


def test_a_row_counts_while_those_before_it_are_right() -> None:
    predicted = torch.tensor([[[1, 2, 3, 4], [9, 2, 3, 4]]])
    labels = torch.tensor([[[1, 2, 9, 4], [1, 2, 3, 4]]])
    late = LATE_WEIGHT
    expected = torch.tensor([[[1, 1, 1, late], [1, late, late, late]]])
    torch.testing.assert_close(row_weights(predicted, labels), expected)


def test_the_holding_loss_is_zero_only_for_the_base_models_own_distribution() -> None:
    torch.manual_seed(1)
    base = torch.randn(3, 5, 20)
    assert float(holding_loss(base + 3.0, base)) == pytest.approx(0, abs=1e-6)
    other = base + torch.randn(3, 5, 20)
    p, q = base.softmax(-1), other.softmax(-1)
    expected = float((p * (p / q).log()).sum(-1).mean())
    assert float(holding_loss(other, base)) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.1


def test_only_a_base_models_card_is_extended() -> None:
    folder = ROOT / "python" / "sglang" / "demo_models" / "tiny-code"
    with pytest.raises(ValueError, match="taught several tokens per step already"):
        read_base_card(folder)
    results = json.loads((ROOT / "benchmark/results/train_mtp_tiny_code.json").read_text())
    base = (
        "| held-out loss | 1 |\n\n## Training\n\n## Held-out packages\n\n"
        "## Samples (not picked)\n\nthese go\n\n## Limits\n\n"
    )
    card = extend_card(base, results, "these come")
    headings = [line for line in card.splitlines() if line.startswith("## ")]
    assert headings[:3] == ["## Training", "## Multi-token prediction", "## Held-out packages"]
    assert "| held-out loss of the base model | 1 |\n| held-out loss of these weights |" in card
    assert "these come" in card
    assert "these go" not in card


@pytest.mark.long_matrix
def test_training_teaches_masks_to_predict() -> None:
    """A text that repeats itself: soon the masks say what comes."""
    torch.manual_seed(0)
    model = Llama(SHAPE)
    optimizer = MuonAdamW(model, muon_lr=0.01, adam_lr=3e-3)
    width = 2
    losses, hits = [], []
    for _ in range(120):
        start = torch.randint(5, (16, 1))
        text = 3 + (start + torch.arange(NUM_REAL + 1)) % 5
        real, following = text[:, :-1], text[:, 1:]
        layout = make_layout(torch.randint(NUM_REAL, (16, 5)), NUM_REAL, NUM_MASKS, width)
        masks = torch.full((16, NUM_MASKS), MASK)
        tokens = torch.cat((real, masks), dim=1)
        hidden = model(tokens, layout.positions, layout.visible)
        with torch.no_grad():
            predicted = model.logits(hidden).argmax(-1)
            own = with_slots(layout, tokens, slot_tokens(layout, predicted))
            judged = model.logits(model(own, layout.positions, layout.visible)).argmax(-1)
            labels, guesses = region_rows(layout, judged), region_rows(layout, predicted)
        logits = model.logits(hidden)
        loss = mask_loss(logits[:, :NUM_REAL], following, torch.ones(real.shape))
        weights = row_weights(guesses, labels).flatten(1)
        loss = loss + mask_loss(logits[:, NUM_REAL:], labels.flatten(1), weights)
        loss.backward()
        optimizer.step(1.0)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        hits.append(float((guesses == labels).float().mean()))
    assert losses[-1] < 0.3 * losses[0]
    assert hits[-1] > 0.95


def test_a_matrix_moves_by_the_learning_rate_times_an_almost_orthogonal_one() -> None:
    torch.manual_seed(0)
    tall, wide = (torch.nn.Linear(cols, rows, bias=False) for rows, cols in ((64, 16), (16, 64)))
    norm = torch.nn.LayerNorm(4)
    model = torch.nn.Sequential(tall, wide, norm)
    optimizer = MuonAdamW(model, muon_lr=0.01, adam_lr=1e-3, weight_decay=0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step(0.5)
    moved = [(old - new).detach() for new, old in zip(model.parameters(), before, strict=True)]
    for update, factor in ((moved[0], 2.0), (moved[1], 1.0)):  # sqrt(max(1, rows / columns))
        sizes = torch.linalg.svdvals(update) / (0.5 * 0.01 * factor)
        assert ((sizes > 0.5) & (sizes < 1.5)).all()
    torch.testing.assert_close(moved[2].abs(), torch.full((4,), 0.5e-3), rtol=1e-3, atol=0)
