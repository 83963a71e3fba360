"""Layout, labels and loss of multi-token prediction training by self-distillation.

After "Multi-Token Prediction via Self-Distillation" (arXiv 2602.06019): mask tokens behind a prefix
learn to say what the model itself would write there. Here the model at the same training step is
its own teacher, and a mask row counts most while the rows before it are right, since only then its
prediction can be used.

A sequence is R real tokens, then M mask rows in regions of K. The region with anchor a holds the
positions a+1..a+K; its rows see the real tokens up to a and the region's rows before them. Real
rows see real rows alone, so they compute what they compute without masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LATE_WEIGHT = 0.2  # of a mask row behind a wrong one


@dataclass(frozen=True)
class Layout:
    """B sequences of R real tokens and M mask rows.

    Attributes:
        num_real: R.
        width: K, masks per region; M // K regions, the rows left over are in none.
        anchors: [B, M // K] int64; position of the last real token that a region sees.
        positions: [B, R + M] int64.
        visible: [B, 1, R + M, R + M] bool; which keys a row sees.
    """

    num_real: int
    width: int
    anchors: Tensor
    positions: Tensor
    visible: Tensor


def make_layout(anchors: Tensor, num_real: int, num_masks: int, width: int) -> Layout:
    """The layout for anchors [B, num_masks // width] int64."""
    batch, num_regions = anchors.shape
    device = anchors.device
    used = num_regions * width
    region = torch.arange(num_masks, device=device) // width
    offset = torch.arange(num_masks, device=device) % width + 1
    last = F.pad(anchors.repeat_interleave(width, dim=1), (0, num_masks - used))
    real = torch.arange(num_real, device=device)
    positions = torch.cat((real.expand(batch, -1), last + offset), dim=1)
    sees_real = torch.cat((real.expand(batch, -1), last), dim=1)  # the last real key of each row
    to_real = real <= sees_real[:, :, None]
    same = (region[:, None] == region) & (offset[:, None] >= offset)
    unused = torch.arange(num_masks, device=device) >= used
    same = torch.where(unused, torch.eye(num_masks, dtype=torch.bool, device=device), same)
    to_masks = F.pad(same, (0, 0, num_real, 0)).expand(batch, -1, -1)
    visible = torch.cat((to_real, to_masks), dim=2)[:, None]
    return Layout(num_real, width, anchors, positions, visible)


def slot_tokens(layout: Layout, predicted: Tensor) -> Tensor:
    """The student's own continuation, written into the mask slots.

    Slot j of a region gets what the row before it predicts: the anchor's row for the first, mask
    j-1 for the others.

    Args:
        predicted: [B, R + M] int64; best token after each row.

    Returns:
        [B, M // K, K] int64.
    """
    regions = region_rows(layout, predicted)
    first = predicted.gather(1, layout.anchors)[:, :, None]
    return torch.cat((first, regions[:, :, :-1]), dim=2)


def region_rows(layout: Layout, values: Tensor) -> Tensor:
    """The mask rows' part of values [B, R + M], as [B, M // K, K]."""
    batch, num_regions = layout.anchors.shape
    masks = values[:, layout.num_real : layout.num_real + num_regions * layout.width]
    return masks.reshape(batch, num_regions, layout.width)


def with_slots(layout: Layout, tokens: Tensor, slots: Tensor) -> Tensor:
    """tokens [B, R + M] with the mask slots replaced by slots [B, M // K, K]."""
    replaced = tokens.clone()
    flat = slots.flatten(1)
    replaced[:, layout.num_real : layout.num_real + flat.shape[1]] = flat
    return replaced


def row_weights(predicted: Tensor, labels: Tensor) -> Tensor:
    """Weight of each mask row: 1 while all rows before it in its region are right.

    Args:
        predicted, labels: [B, regions, K] int64.

    Returns:
        [B, regions, K] float32.
    """
    right = (predicted == labels).float().cumprod(dim=2)
    before = F.pad(right, (1, 0), value=1.0)[:, :, :-1]
    return LATE_WEIGHT + (1.0 - LATE_WEIGHT) * before


def mask_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Mean weighted cross-entropy in nats; logits [..., V], labels int64 and weights [...]."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).mean()


def holding_loss(logits: Tensor, base_logits: Tensor) -> Tensor:
    """Mean Kullback-Leibler divergence in nats from the base model's distributions, [..., V] each:
    with one token per step the model is to stay what it was."""
    student = torch.log_softmax(logits.float(), dim=-1)
    base = torch.log_softmax(base_logits.float(), dim=-1)
    return F.kl_div(
        student.flatten(0, -2), base.flatten(0, -2), log_target=True, reduction="batchmean"
    )
