"""Measures how well a model predicts ahead: acceptance on real text and on text of its own.

    python -m training.evaluate_mtp python/sglang/demo_models/tiny-code --prompts 16

Each decoding step feeds the whole text again, in float32. That is slow, but short and independent
of the runtime, which must decode the same.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from training.command import pick_device
from training.corpus import collect_corpus
from training.evaluate import windows
from training.model import Llama
from training.mtp_layout import make_layout, region_rows, slot_tokens, with_slots
from training.tokens import BOS_ID, MASK_ID, held_out_streams

MAX_OFFSET = 7  # masks behind the last real token
WINDOW = 256
PROMPT_TOKENS = 128
NEW_TOKENS = 64
MAX_REPEATS = 0.2  # of 4-grams; text that loops is easy to predict
MAX_TIE_GAP = 1e-3
STATIC = -1.0


# ---------------------------------------------------------------- on real text


@torch.no_grad()
def teacher_forced(model: Llama, stream: np.ndarray, device: torch.device) -> dict[str, Any]:
    """Behind every position of a stream [N] uint16, cut into windows: how often the model, given
    its own tokens before it, confirms what mask 1..7 says.

    Returns:
        `marginal`: share per offset, `accepted`: with all offsets before it confirmed too (what
        `mtp_verify` would accept); `real_marginal`: against what the model says there after the
        real text instead of its own.
    """
    inputs, _ = windows(stream[: len(stream) // WINDOW * WINDOW], WINDOW)
    anchors = torch.arange(WINDOW, device=device)
    right = torch.zeros(3, MAX_OFFSET, dtype=torch.float64)
    total = torch.zeros(MAX_OFFSET, dtype=torch.float64)
    later = anchors[:, None] + torch.arange(1, MAX_OFFSET + 1, device=device)
    for batch in inputs.split(16 if device.type == "cuda" else 2):
        real = batch.to(device)
        layout = make_layout(anchors.expand(len(real), -1), WINDOW, WINDOW * MAX_OFFSET, MAX_OFFSET)
        masks = real.new_full((len(real), WINDOW * MAX_OFFSET), MASK_ID)
        tokens = torch.cat((real, masks), dim=1)
        best = best_tokens(model, model(tokens, layout.positions, layout.visible))[0]
        own = with_slots(layout, tokens, slot_tokens(layout, best))
        judged = best_tokens(model, model(own, layout.positions, layout.visible))[0]
        inside = later < WINDOW
        said = region_rows(layout, best)
        hits = (said == region_rows(layout, judged)) & inside
        on_real = (said == best[:, :WINDOW][:, later.clamp(max=WINDOW - 1)]) & inside
        right[0] += hits.sum(dim=(0, 1)).double().cpu()
        right[1] += hits.long().cumprod(dim=2).sum(dim=(0, 1)).double().cpu()
        right[2] += on_real.sum(dim=(0, 1)).double().cpu()
        total += (inside.sum(dim=0) * len(real)).double().cpu()
    names = ("marginal", "accepted", "real_marginal")
    shares = dict(zip(names, (right / total).tolist(), strict=True))
    rounded = {name: [round(share, 4) for share in row] for name, row in shares.items()}
    return {**rounded, "positions": int(total[0])}


def best_tokens(model: Llama, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Best token, its probability and the gap to the second logit, per hidden state [..., D]; the
    mask token is left out."""
    best, probability, gap = [], [], []
    for part in hidden.split(1, dim=0) if hidden.numel() > 1 << 25 else (hidden,):
        logits = model.logits(part).float()
        logits[..., MASK_ID] = float("-inf")
        top = logits.topk(2, dim=-1)
        best.append(top.indices[..., 0])
        probability.append(torch.exp(top.values[..., 0] - logits.logsumexp(dim=-1)))
        gap.append(top.values[..., 0] - top.values[..., 1])
    return torch.cat(best), torch.cat(probability), torch.cat(gap)


# ---------------------------------------------------------------- text of its own


@dataclass(frozen=True)
class Continuations:
    """Holds the continuations of N prompts.

    Attributes:
        tokens: [N, NEW_TOKENS] int64.
        num_steps: [N] int64; steps until they were all there.
        gaps: [N, NEW_TOKENS] float32; top-2 logit gap where each token was chosen.
    """

    tokens: Tensor
    num_steps: Tensor
    gaps: Tensor


@torch.no_grad()
def continue_prompts(
    model: Llama, prompts: Tensor, k: int, tau: float, verified: bool, label: str
) -> Continuations:
    """Greedy decode of prompts [N, P] int64, k tokens predicted per step (docs/mtp.md)."""
    num, prompt_len = prompts.shape
    device = prompts.device
    end = prompt_len + NEW_TOKENS
    text = prompts.new_zeros((num, end + k))
    text[:, :prompt_len] = prompts
    gaps = torch.zeros((num, end + k), device=device)
    lens = torch.full((num,), prompt_len, device=device)
    drafts = prompts.new_zeros((num, k))
    num_drafts = torch.zeros_like(lens)
    num_steps = torch.zeros_like(lens)
    columns, places = (
        torch.arange(end + 2 * k, device=device),
        torch.arange(2 * k - 1, device=device),
    )
    offsets = torch.arange(k, device=device)
    bar = tqdm(total=NEW_TOKENS, desc=label, mininterval=2.0, leave=False)
    while bool((lens < end).any()):
        width = int(lens.max()) + 2 * k - 1
        fed = torch.nn.functional.pad(text, (0, 2 * k))[:, :width].clone()
        behind = columns[:width] - lens[:, None]
        is_draft = (behind >= 0) & (behind < num_drafts[:, None])
        fed = torch.where(behind >= 0, MASK_ID, fed)
        fed = torch.where(is_draft, drafts.gather(1, behind.clamp(0, k - 1)), fed)
        rows = (lens[:, None] - 1 + places).clamp(max=width - 1)
        hidden = model(fed)
        read = hidden.gather(1, rows[:, :, None].expand(-1, -1, hidden.shape[-1]))
        best, probability, gap = best_tokens(model, read)
        sure = (probability >= tau).long()
        if verified:
            right = (drafts == best[:, :k]) & (offsets < num_drafts[:, None])
            num_right = right.long().cumprod(1).sum(1)
            count = num_right + 1
            window = (count[:, None] + offsets).clamp(max=2 * k - 2)
            usable = sure.gather(1, window) * (offsets < k - 1)
            is_whole = num_right == num_drafts
            num_drafts = usable.cumprod(1).sum(1) * is_whole
            drafts = best.gather(1, window)
        else:
            count = sure[:, :k].cumprod(1).sum(1).clamp(min=1)
        active = lens < end
        count = torch.minimum(count, end - lens) * active
        for j in range(k):
            where = active & (j < count)
            at = (lens + j)[where]
            text[where, at], gaps[where, at] = best[where, j], gap[where, j]
        lens += count
        num_steps += active
        bar.update(int(lens.min()) - prompt_len - bar.n)
    bar.close()
    return Continuations(text[:, prompt_len:end], num_steps, gaps[:, prompt_len:end])


def repeat_rates(tokens: Tensor) -> Tensor:
    """Share of 4-grams that occurred before, per row of tokens [N, T]."""
    rates = []
    for row in tokens.tolist():
        grams = [tuple(row[i : i + 4]) for i in range(len(row) - 3)]
        rates.append(1 - len(set(grams)) / len(grams))
    return torch.tensor(rates)


@torch.no_grad()
def nats_per_token(model: Llama, prompts: Tensor, tokens: Tensor) -> Tensor:
    """Mean negative log-likelihood of continuations [N, T] under one token per step: [N]."""
    logits = model.logits(model(torch.cat((prompts, tokens), dim=1)))[:, prompts.shape[1] - 1 : -1]
    logits = logits.float()
    logits[..., MASK_ID] = float("-inf")
    chosen = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, :, None]).squeeze(2)
    return -chosen.mean(dim=1).cpu()


def summarize(
    model: Llama, prompts: Tensor, made: Continuations, plain: Continuations
) -> dict[str, Any]:
    """Speed over all continuations and over those that do not loop; how they differ from plain
    greedy text."""
    steps = made.num_steps.cpu()
    fresh = repeat_rates(made.tokens) < MAX_REPEATS
    same = (made.tokens == plain.tokens).cpu()
    agreeing = same.long().cumprod(1).sum(1)
    nats = nats_per_token(model, prompts, made.tokens)
    plain_nats = nats_per_token(model, prompts, plain.tokens)

    def rate(chosen: Tensor) -> float | None:
        if not bool(chosen.any()):
            return None
        return round(float(NEW_TOKENS * chosen.sum() / steps[chosen].sum()), 4)

    return {
        "tokens_per_step": rate(fresh),
        "tokens_per_step_all": rate(torch.ones_like(fresh)),
        "share_without_loops": round(float(fresh.float().mean()), 4),
        "equal_to_greedy": round(float(same.all(1).float().mean()), 4),
        "mean_agreeing_prefix": round(float(agreeing.float().mean()) / NEW_TOKENS, 4),
        "nats_per_token": round(float(nats.mean()), 4),
        "greedy_nats_per_token": round(float(plain_nats.mean()), 4),
    }


def check_lossless(made: Continuations, plain: Continuations, what: str) -> int:
    """Raises unless verified text is greedy text, but for near-ties; returns how many those are."""
    num_ties = 0
    for i in (made.tokens != plain.tokens).any(dim=1).nonzero().flatten().tolist():
        place = int((made.tokens[i] != plain.tokens[i]).nonzero()[0])
        gap = float(plain.gaps[i, place])
        if gap > MAX_TIE_GAP:
            raise RuntimeError(f"{what}: prompt {i} leaves greedy text at {place}, gap {gap:.4f}.")
        num_ties += 1
    return num_ties


def held_out_prompts(streams: dict[str, np.ndarray], count: int, seed: int) -> Tensor:
    """[count, PROMPT_TOKENS] int64: BOS and held-out text from places drawn over all packages."""
    joined = np.concatenate(list(streams.values())).astype(np.int64)
    starts = np.random.default_rng(seed).integers(0, len(joined) - PROMPT_TOKENS, count)
    rows = np.stack([joined[start : start + PROMPT_TOKENS] for start in starts])
    rows[:, 0] = BOS_ID
    return torch.from_numpy(rows)


def evaluate_prediction(
    model: Llama, streams: dict[str, np.ndarray], num_prompts: int, device: torch.device
) -> dict[str, Any]:
    """All figures of the model card."""
    real = np.concatenate(list(streams.values()))
    results: dict[str, Any] = {"real_text": teacher_forced(model, real, device)}
    prompts = held_out_prompts(streams, num_prompts, seed=0).to(device)
    plain = continue_prompts(model, prompts, 1, STATIC, False, "plain")
    cases = [
        *((8, tau, False) for tau in (0.5, 0.8, 0.9, 0.95)),
        *((k, 0.9, False) for k in (2, 4)),
        *((k, STATIC, True) for k in (8, 4, 2)),
        (3, STATIC, False),
    ]
    results["own_text"] = {}
    results["near_ties"] = {}
    for k, tau, verified in cases:
        how = "static" if tau == STATIC else f"tau {tau:g}"
        name = f"verified k={k}" if verified else f"k={k} {how}"
        made = continue_prompts(model, prompts, k, tau, verified, name)
        results["own_text"][name] = summarize(model, prompts, made, plain)
        if verified:
            results["near_ties"][name] = check_lossless(made, plain, name)
    return {**results, "prompts": num_prompts, "new_tokens": NEW_TOKENS}


def main() -> None:
    """Evaluate a folder on the held-out packages that this machine has."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--max-eval-tokens", type=int, help="per held-out package")
    parser.add_argument("--max-corpus-bytes", type=int, help="read about this much source")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    corpus = collect_corpus(0, arguments.max_corpus_bytes)
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    streams, _ = held_out_streams(corpus, tokenizer, arguments.max_eval_tokens)
    model = Llama.from_hf_folder(arguments.folder).to(device)
    results = evaluate_prediction(model, streams, arguments.prompts, device)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
