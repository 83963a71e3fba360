"""Counts the drafts of a draft model that its target confirms.

    python -m training.evaluate_draft build/tiny-code-draft --prompts 16

As `evaluate_eagle.py`, of a smaller model that is fed tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from training.evaluate_eagle import MAX_STEPS, print_figures
from training.evaluate_mtp import best_tokens
from training.model import Llama


@dataclass(frozen=True)
class ModelPair:
    """A target and a smaller model that drafts for it (`Drafting`)."""

    target: Llama
    model: Llama

    def hits(self, tokens: Tensor, starts: Tensor) -> list[Tensor]:
        """See `Drafting`."""
        wanted, said = (best_tokens(each, each(tokens))[0] for each in (self.target, self.model))
        return [(said == wanted)[:, starts + j + 1] for j in range(MAX_STEPS)]

    @torch.no_grad()
    def draft(self, text: Tensor, lens: Tensor, num_steps: int) -> Tensor:
        """See `Drafting`."""
        places = torch.arange(len(text), device=text.device)
        text = text.clone()
        drafts = []
        for step in range(num_steps):
            hidden = self.model(text)[places, lens + step - 1]
            drafts.append(best_tokens(self.model, hidden)[0])
            text[places, lens + step] = drafts[-1]
        return torch.stack(drafts, dim=1)


def load_pair(folder: Path, target: Llama) -> ModelPair:
    """A draft model of a folder, on the target's device."""
    model = Llama.from_hf_folder(folder).to(target.embed_tokens.weight.device)
    return ModelPair(target, model.requires_grad_(False))


if __name__ == "__main__":
    print_figures(__doc__ or "", load_pair)
