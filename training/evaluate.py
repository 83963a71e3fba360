"""Loss on token streams, by package and by position in the window; checks of a shipped folder.

Every window begins with BOS, as a served prompt does, in training and here alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from training.model import Llama
from training.tokens import BOS_ID, EOS_ID

IGNORED = -100
TOKENS_PER_BATCH = 16_384
SAMPLE_TOKENS = 160
GREEDY_PROMPT = '''def read_lines(path):
    """Return the lines of a text file without their line ends."""
'''
SAMPLED_PROMPT = """import logging
import os

class ConfigLoader:
"""


@dataclass
class Score:
    """Sums over scored tokens; nats_at and tokens_at are [context] float64, by window position."""

    nats_at: Tensor
    tokens_at: Tensor
    correct: int = 0
    windows: int = 0

    @classmethod
    def empty(cls, context: int) -> Score:
        """No tokens scored yet."""
        zeros = torch.zeros(context, dtype=torch.float64)
        return cls(zeros, zeros.clone())

    def add(self, other: Score) -> None:
        """Add another score of the same context."""
        self.nats_at = self.nats_at + other.nats_at
        self.tokens_at = self.tokens_at + other.tokens_at
        self.correct += other.correct
        self.windows += other.windows

    def summary(self, num_bytes: int) -> dict[str, float | int]:
        """Loss in nats per token and bits per byte of source text, accuracy, counts."""
        nats, tokens = float(self.nats_at.sum()), int(self.tokens_at.sum())
        return {
            "nats_per_token": round(nats / tokens, 5),
            "bits_per_byte": round(nats / math.log(2) / num_bytes, 5),
            "accuracy": round(self.correct / tokens, 5),
            "tokens": tokens,
            "bytes": num_bytes,
        }

    def by_position(self, edges: list[int]) -> dict[str, float]:
        """Nats per token in the position ranges between consecutive edges that hold tokens."""
        return {
            f"{a}-{b}": round(float(self.nats_at[a:b].sum() / self.tokens_at[a:b].sum()), 5)
            for a, b in itertools.pairwise(edges)
            if self.tokens_at[a:b].sum() > 0
        }


def windows(stream: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    """Cut a stream [N] uint16 into inputs and targets, each [W, context] int64.

    Targets are the stream in order; inputs are BOS, then the targets but the last. The padding of
    the last window has target IGNORED.
    """
    count = -(-len(stream) // context)
    padded = np.full(count * context, IGNORED, dtype=np.int64)
    padded[: len(stream)] = stream
    targets = torch.from_numpy(padded).view(count, context)
    inputs = targets.roll(1, dims=1)
    inputs[:, 0] = BOS_ID
    inputs[inputs == IGNORED] = EOS_ID
    return inputs, targets


@torch.no_grad()
def score_stream(
    logits_of: Callable[[Tensor], Tensor], stream: np.ndarray, context: int, device: torch.device
) -> Score:
    """Score a stream [N] uint16; logits_of maps tokens [B, T] int64 to logits [B, T, V]."""
    inputs, targets = windows(stream, context)
    total = Score.empty(context)
    total.windows = len(inputs)
    rows = max(1, TOKENS_PER_BATCH // context)
    for batch, wanted in zip(inputs.split(rows), targets.split(rows), strict=True):
        wanted = wanted.to(device)
        logits = logits_of(batch.to(device)).float()
        flat = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        total.nats_at += flat.view(wanted.shape).double().sum(0).cpu()
        total.tokens_at += (wanted != IGNORED).double().sum(0).cpu()
        total.correct += int((logits.argmax(-1) == wanted).sum())
    return total


def score_packages(
    logits_of: Callable[[Tensor], Tensor],
    streams: dict[str, np.ndarray],
    num_bytes: dict[str, int],
    context: int,
    device: torch.device,
) -> dict[str, Any]:
    """Summaries per package and overall, plus the overall loss by position (powers of two)."""
    overall = Score.empty(context)
    packages = {}
    for name, stream in sorted(streams.items()):
        score = score_stream(logits_of, stream, context, device)
        packages[name] = score.summary(num_bytes[name])
        overall.add(score)
    edges = [0] + [e for e in (128, 256, 512, 1024, 2048) if e < context] + [context]
    return {
        "context": context,
        "overall": overall.summary(sum(num_bytes.values())),
        "by_position": overall.by_position(edges),
        "packages": packages,
    }


def evaluate_folder(
    folder: Path,
    context: int,
    device: torch.device,
    streams: dict[str, np.ndarray],
    num_bytes: dict[str, int],
    train_sample: np.ndarray,
) -> dict[str, Any]:
    """Losses of a folder's (bfloat16-rounded) weights, computed in float32, two ways.

    Held-out streams are scored in windows of `context` and of the model's whole context; the
    result with `context` is compared with that of transformers on the same windows.
    """
    model = Llama.from_hf_folder(folder).to(device)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.to(device).eval()

    def own(tokens: Tensor) -> Tensor:
        return model.logits(model(tokens))

    def theirs(tokens: Tensor) -> Tensor:
        return reference(input_ids=tokens, use_cache=False).logits

    contexts = (context, model.shape.max_position_embeddings)
    scores = {str(c): score_packages(own, streams, num_bytes, c, device) for c in contexts}
    check = score_packages(theirs, streams, num_bytes, context, device)
    own_loss = scores[str(context)]["overall"]["nats_per_token"]
    their_loss = check["overall"]["nats_per_token"]
    if abs(own_loss - their_loss) > 1e-3:
        raise RuntimeError(
            f"The exported folder has loss {their_loss} in transformers but {own_loss} here: the "
            "layouts of model.py and export.py disagree with LlamaForCausalLM; mend export.py."
        )
    train = score_stream(own, train_sample, context, device)
    tokens = int(train.tokens_at.sum())
    return {
        "held_out_loss": scores,
        "train_loss": {
            "nats_per_token": round(float(train.nats_at.sum()) / tokens, 5),
            "accuracy": round(train.correct / tokens, 5),
            "tokens": tokens,
        },
        "transformers_check": {
            "context": context,
            "transformers_nats_per_token": their_loss,
            "training_code_nats_per_token": own_loss,
        },
    }


def draw_samples(folder: Path, device: torch.device, seed: int) -> list[dict[str, str]]:
    """One greedy and one sampled continuation, by transformers in float32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device).eval()
    sampled = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
    samples = []
    for how, prompt, options in (
        ("Greedy", GREEDY_PROMPT, {"do_sample": False}),
        (f"Sampled, temperature 0.8, top-p 0.95, seed {seed}", SAMPLED_PROMPT, sampled),
    ):
        torch.manual_seed(seed)
        encoded = tokenizer(prompt, return_tensors="pt").to(device)
        output = model.generate(**encoded, max_new_tokens=SAMPLE_TOKENS, **options)
        new = output[0, encoded["input_ids"].shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        samples.append({"how": how, "prompt": prompt, "text": text})
    return samples
