"""Reference decodes of multi-token prediction: transformers, the whole sequence every step.

Each follows the published description (arXiv 2602.06019) or docs/mtp.md, not the runtime. A
reference knows at each token how close the step's decisions were (top-2 logit gaps, distance of a
confidence to the threshold), for the near-tie rule.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang.srt.model_config import resolve_model_path
from sglang.srt.tokenizer import load_tokenizer

STATIC = -1.0  # a threshold that every confidence reaches


@dataclass(frozen=True)
class MTPReference:
    """Tokens, tokens per step, and per token the margin by which its step was decided."""

    tokens: list[int]
    step_lens: list[int]
    margins: list[float]


@functools.cache
def load_reference(path: Path) -> Any:
    """The model at `path` in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy_over_kv_of(
    old: Any, new: Any, known: list[int], num_new: int, mask: int | None = None
) -> list[int]:
    """Returns what the model `new` says behind `known`, of which `old` has read all but the last
    token: so it is after weights changed in place. `mask` is never said."""
    cache = old(torch.tensor([known[:-1]]), use_cache=True).past_key_values
    tokens: list[int] = []
    token = known[-1]
    for _ in range(num_new):
        logits = new(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
        if mask is not None:
            logits[mask] = float("-inf")
        token = int(logits.argmax())
        tokens.append(token)
    return tokens


def predict(
    model: Any, certain: list[int], drafts: list[int], k: int, mask: int
) -> tuple[list[int], list[float], list[float]]:
    """Best token, its probability and the top-2 logit gap at the last certain token, at each draft
    and at the k - 1 masks behind them."""
    fed = (*certain, *drafts, *[mask] * (k - 1))
    return _predict_from(model, fed, len(certain) - 1, mask)


@functools.cache  # decodes of different thresholds begin alike
@torch.inference_mode()
def _predict_from(
    model: Any, fed: tuple[int, ...], first: int, mask: int
) -> tuple[list[int], list[float], list[float]]:
    logits = model(torch.tensor([fed])).logits[0, first:].float()
    logits[:, mask] = float("-inf")
    top = logits.topk(2).values
    best = logits.softmax(-1).max(-1)
    return best.indices.tolist(), best.values.tolist(), (top[:, 0] - top[:, 1]).tolist()


def unverified_decode(
    model: Any, prompt: list[int], num_tokens: int, k: int, tau: float, mask: int
) -> MTPReference:
    """Accepts all k predictions (STATIC), or the longest prefix of probability >= tau, at least one
    token; the next step predicts behind them."""
    out: list[int] = []
    steps: list[int] = []
    margins: list[float] = []
    while len(out) < num_tokens:
        tokens, confidences, gaps = predict(model, prompt + out, [], k, mask)
        count = 0
        while count < k and confidences[count] >= tau:
            count += 1
        margin = min(abs(c - tau) for c in confidences[: count + 1]) if k > 1 else 1.0
        count = min(max(count, 1), num_tokens - len(out))
        out += tokens[:count]
        steps.append(count)
        margins += [min(margin, *gaps[:count])] * count
    return MTPReference(out, steps, margins)


def verified_decode(
    model: Any, prompt: list[int], num_tokens: int, k: int, tau: float, mask: int
) -> MTPReference:
    """Accepts the drafts that the model's own row before each confirms, and the token after them;
    if it confirms all, the predictions (of probability >= tau) behind that are the next drafts."""
    out: list[int] = []
    steps: list[int] = []
    margins: list[float] = []
    drafts: list[int] = []
    while len(out) < num_tokens:
        tokens, confidences, gaps = predict(model, prompt + out, drafts, k, mask)
        num_right = 0
        while num_right < len(drafts) and drafts[num_right] == tokens[num_right]:
            num_right += 1
        emitted = tokens[: num_right + 1][: num_tokens - len(out)]
        margin = min(gaps)
        if num_right == len(drafts):
            drafts = []
            for token, confidence in zip(tokens[num_right + 1 :], confidences[num_right + 1 :]):
                margin = min(margin, abs(confidence - tau))
                if confidence < tau:
                    break
                drafts.append(token)
        else:
            drafts = []
        out += emitted
        steps.append(len(emitted))
        margins += [margin] * len(emitted)
    return MTPReference(out, steps, margins)


def greedy_outputs(texts: Sequence[str], num_tokens: int) -> list[list[int]]:
    """So many tokens behind each text by transformers and the bundled model, whatever they are."""
    path = resolve_model_path("demo")
    reference, tokenizer = load_reference(path), load_tokenizer(path)
    outputs = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text)])
        params = {"do_sample": False, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        outputs.append(reference.generate(ids, **params)[0, ids.shape[1] :].tolist())
    return outputs
