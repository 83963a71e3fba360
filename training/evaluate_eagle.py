"""Counts how many drafts of a head (EAGLE, EAGLE-3, NEXTN) its target confirms.

    python -m training.evaluate_eagle build/tiny-code-eagle3 --prompts 16

Each draft step feeds the whole text to the head again, and each verification the whole text to the
target, in float32 and without a cache. That is slow, but short and independent of the runtime,
which must draft the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from training.command import pick_device
from training.corpus import collect_corpus
from training.eagle_head import DraftHead, read_target
from training.evaluate import windows
from training.evaluate_mtp import (
    MAX_REPEATS,
    NEW_TOKENS,
    STATIC,
    Continuations,
    best_tokens,
    check_lossless,
    continue_prompts,
    held_out_prompts,
    repeat_rates,
)
from training.export_eagle import load_head, read_taps
from training.model import Llama
from training.tokens import held_out_streams

NUM_STEPS = 3  # of the figure that counts
MAX_STEPS = 5
ROWS_PER_BATCH = 4096  # drafting starts


class Drafting(Protocol):
    """A target, and what drafts for it."""

    @property
    def target(self) -> Llama: ...

    def hits(self, tokens: Tensor, starts: Tensor) -> list[Tensor]:
        """Drafts from rows starts [S] int64 of tokens [B, T] int64, which follow as if they had
        been drafted; says of each of MAX_STEPS drafts whether it is what the target says,
        [B, S]."""

    def draft(self, text: Tensor, lens: Tensor, num_steps: int) -> Tensor:
        """Returns drafts [N, num_steps] int64 after text [N, T] int64, of which the first lens [N]
        tokens count; T is at least num_steps more."""


@dataclass(frozen=True)
class Pair:
    """A head, its target, and the layers of the target whose inputs it reads."""

    target: Llama
    head: DraftHead
    taps: tuple[int, ...]

    def said(self, carried: Tensor) -> Tensor:
        """Returns the target's ids of the head's best tokens, of [..., D] that it gave."""
        best = self.head.logits(carried, self.target.embed_tokens.weight).argmax(dim=-1)
        return self.head.target_ids[best]

    def hits(self, tokens: Tensor, starts: Tensor) -> list[Tensor]:
        """See `Drafting`."""
        normed, features = read_target(self.target, tokens, self.taps)
        best = best_tokens(self.target, normed)[0]
        embedded = self.target.embed_tokens(tokens[:, 1:])
        given = self.head.unroll(embedded, self.head.combine(features[:, :-1]), starts, MAX_STEPS)
        return [self.said(each) == best[:, starts + j + 1] for j, each in enumerate(given)]

    def draft(self, text: Tensor, lens: Tensor, num_steps: int) -> Tensor:
        """See `Drafting`."""
        return draft(self, text, lens, num_steps)


# ---------------------------------------------------------------- on real text


@torch.no_grad()
def teacher_forced(
    pair: Drafting, stream: np.ndarray, context: int, stride: int, device: torch.device
) -> dict[str, Any]:
    """Drafts from every `stride`-th place of a stream [N] uint16, cut into windows, when the
    tokens that follow are those of the text.

    Returns:
        `alone`: how often draft 1..5 is what the target says there; `accepted`: with all drafts
        before it right too; `positions`: places that drafting started from.
    """
    inputs, _ = windows(stream[: len(stream) // context * context], context)
    starts = torch.arange(0, context - MAX_STEPS - 1, stride, device=device)
    right = torch.zeros(2, MAX_STEPS, dtype=torch.float64)
    for batch in inputs.split(max(1, ROWS_PER_BATCH // len(starts))):
        alone = torch.stack(pair.hits(batch.to(device), starts)).long()
        right[0] += alone.sum(dim=(1, 2)).double().cpu()
        right[1] += alone.cumprod(dim=0).sum(dim=(1, 2)).double().cpu()
    total = len(inputs) * len(starts)
    shares = [[round(share, 4) for share in row] for row in (right / total).tolist()]
    return {"alone": shares[0], "accepted": shares[1], "positions": total}


# ---------------------------------------------------------------- text of its own


@dataclass(frozen=True)
class Rounds:
    """Continues N prompts greedily by rounds of drafting and verification.

    Attributes:
        made: the text; `num_steps` counts rounds.
        num_accepted: of every round, the drafts that were confirmed, [rounds] int64.
        prompts: of every round, its prompt, [rounds] int64.
    """

    made: Continuations
    num_accepted: Tensor
    prompts: Tensor


@torch.no_grad()
def draft(pair: Pair, text: Tensor, lens: Tensor, num_steps: int) -> Tensor:
    """`Drafting.draft` of a head."""
    places = torch.arange(len(text), device=text.device)
    text = text.clone()
    _, features = read_target(pair.target, text, pair.taps)
    hidden = pair.head.combine(features[:, :-1])
    drafts = []
    for step in range(num_steps):
        rows = lens - 2 + step
        given = pair.head(pair.target.embed_tokens(text[:, 1:]), hidden)[places, rows]
        drafts.append(pair.said(given))
        text[places, lens + step] = drafts[-1]
        if step + 1 < num_steps:
            hidden[places, rows + 1] = given
    return torch.stack(drafts, dim=1)


@torch.no_grad()
def continue_by_drafts(pair: Drafting, prompts: Tensor, num_steps: int, label: str) -> Rounds:
    """Continues prompts [N, P] int64 greedily; each round drafts a chain of num_steps tokens
    and keeps those that the target says too, and the target's token behind them."""
    num, prompt_len = prompts.shape
    end = prompt_len + NEW_TOKENS
    text = prompts.new_zeros((num, end + 2 * num_steps + 1))
    text[:, :prompt_len] = prompts
    gaps = torch.zeros(text.shape, device=text.device)
    lens = torch.full((num,), prompt_len, device=text.device)
    num_rounds = torch.zeros_like(lens)
    accepted, numbers = [], []
    steps = torch.arange(num_steps + 1, device=text.device)
    bar = tqdm(total=NEW_TOKENS, desc=label, mininterval=2.0, leave=False)
    while bool((lens < end).any()):
        width = int(lens.max()) + num_steps + 1
        drafts = pair.draft(text[:, :width], lens, num_steps)
        text.scatter_(1, lens[:, None] + steps[:-1], drafts)
        normed, _ = read_target(pair.target, text[:, :width], ())
        rows = lens[:, None] - 1 + steps
        read = normed.gather(1, rows[:, :, None].expand(-1, -1, normed.shape[2]))
        best, _, gap = best_tokens(pair.target, read)
        confirmed = (drafts == best[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        active = lens < end
        text.scatter_(1, lens[:, None] + steps, best)  # behind the first rejection it is rewritten
        gaps.scatter_(1, lens[:, None] + steps, gap)
        accepted.append(confirmed[active])
        numbers.append(active.nonzero()[:, 0])
        num_rounds += active
        lens = torch.where(active, lens + confirmed + 1, lens)
        bar.update(min(int(lens.min()) - prompt_len, NEW_TOKENS) - bar.n)
    bar.close()
    made = Continuations(text[:, prompt_len:end], num_rounds, gaps[:, prompt_len:end])
    return Rounds(made, torch.cat(accepted).cpu(), torch.cat(numbers).cpu())


def summarize(rounds: Rounds, num_steps: int) -> dict[str, Any]:
    """Counts tokens per round over the continuations that do not loop, and over all; of the former
    also the share of rounds that confirm at least 1, 2, ... drafts."""
    is_fresh = (repeat_rates(rounds.made.tokens) < MAX_REPEATS)[rounds.prompts]
    fresh = rounds.num_accepted[is_fresh]
    least = range(1, num_steps + 1)
    shares = [round(float((fresh >= j).float().mean()), 4) if len(fresh) else None for j in least]
    return {
        "accept_length": round(1 + float(fresh.float().mean()), 4) if len(fresh) else None,
        "accept_length_all": round(1 + float(rounds.num_accepted.float().mean()), 4),
        "accepted": shares,
        "rounds": len(fresh),
    }


def evaluate_head(
    pair: Drafting, streams: dict[str, np.ndarray], num_prompts: int, device: torch.device
) -> dict[str, Any]:
    """Collects all figures of the card of a head or of a draft model.

    Raises:
        RuntimeError: if text by drafts is not the target's own.
    """
    real = np.concatenate(list(streams.values()))
    contexts = ((512, 1), (pair.target.shape.max_position_embeddings, 16))
    results: dict[str, Any] = {
        "real_text": {
            str(context): teacher_forced(pair, real, context, stride, device)
            for context, stride in contexts
            if len(real) >= context
        }
    }
    prompts = held_out_prompts(streams, num_prompts, seed=0).to(device)
    plain = continue_prompts(pair.target, prompts, 1, STATIC, False, "plain")
    results["own_text"], results["near_ties"] = {}, 0
    for num_steps in (1, NUM_STEPS, MAX_STEPS):
        name = f"{num_steps} draft steps"
        rounds = continue_by_drafts(pair, prompts, num_steps, name)
        results["own_text"][str(num_steps)] = summarize(rounds, num_steps)
        results["near_ties"] += check_lossless(rounds.made, plain, name)
    fresh = (repeat_rates(plain.tokens) < MAX_REPEATS).float().mean()
    results["share_without_loops"] = round(float(fresh), 4)
    return {**results, "prompts": num_prompts, "new_tokens": NEW_TOKENS}


def print_figures(doc: str, load: Callable[[Path, Llama], Drafting]) -> None:
    """Evaluates a folder on the held-out packages that this machine has.

    Args:
        doc: of the script.
        load: makes of a folder and the target what is evaluated.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path, default="python/sglang/demo_models/tiny-code")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--max-eval-tokens", type=int, help="per held-out package")
    parser.add_argument("--max-corpus-bytes", type=int, help="read about this much source")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    corpus = collect_corpus(0, arguments.max_corpus_bytes)
    tokenizer = Tokenizer.from_file(str(arguments.base / "tokenizer.json"))
    streams, _ = held_out_streams(corpus, tokenizer, arguments.max_eval_tokens)
    target = Llama.from_hf_folder(arguments.base).to(device)
    pair = load(arguments.folder, target)
    print(json.dumps(evaluate_head(pair, streams, arguments.prompts, device), indent=2))


def load_pair(folder: Path, target: Llama) -> Pair:
    """Reads a head of a folder, on the target's device."""
    head = load_head(folder).to(target.embed_tokens.weight.device)
    return Pair(target, head, read_taps(folder))


if __name__ == "__main__":
    print_figures(__doc__ or "", load_pair)
