"""Trains a draft head of EAGLE, EAGLE-3 or NEXTN for the demo model `tiny-code`.

    python -m training.train_eagle --algorithm EAGLE3 \\
        --base python/sglang/demo_models/tiny-code --out build/tiny-code-eagle3

The target is frozen. First it continues windows of the training corpus; then the head learns, on
those and on real text, to say what the target says, drafting from many places of a window at once
with its own output as input (`DraftHead.unroll`). One GPU, or a CPU with small settings. Writes the
folder with a model card, and results; `evaluate_eagle.py` says what is measured.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training.command import describe_run, is_compiled, make_optimizer, make_parser, pick_device
from training.corpus import Corpus, collect_corpus
from training.eagle_head import (
    ALGORITHMS,
    EAGLE3,
    DraftHead,
    make_head,
    read_target,
    tap_layers,
)
from training.evaluate_eagle import NUM_STEPS, Pair, evaluate_head, teacher_forced
from training.export import write_json
from training.export_eagle import WEIGHTS, head_card, load_head, write_head_folder
from training.model import Llama
from training.mtp_layout import LATE_WEIGHT
from training.optim import warm_constant_linear
from training.own_text import continue_windows, mixed_windows
from training.timed_loop import TimedLoop
from training.tokens import MASK_ID, held_out_streams, pack, training_windows

WARM_UP_STEPS = 50
HOLD_SHARE = 0.3
TEMPERATURE = 0.8  # of every second continuation; the others are greedy
MIN_PROMPT, MIN_OWN = 32, 64  # tokens of a continued window


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__ or "")
    add = parser.add_argument
    add("--algorithm", choices=ALGORITHMS, required=True)
    add("--base", type=Path, required=True, help="folder of the target")
    add("--unrolled", type=int, default=4, help="draft steps that are trained")
    add("--starts", type=int, default=256, help="places per window that drafting starts from")
    add("--draft-vocab", type=int, default=1536, help="tokens that an EAGLE-3 head says")
    add("--own-rows", type=int, default=16384, help="windows that the target continues")
    add("--own-batch", type=int, default=4096, help="of them at once")
    add("--own-share", type=float, default=0.5, help="of a batch, that the target continued")
    add("--long-rows", type=int, default=6, help="long windows of real text per step of them")
    add("--long-every", type=int, default=6, help="one such step after so many others")
    add(
        "--feature-weight",
        type=float,
        default=0.5,
        help="of the distance to the target; not of EAGLE-3",
    )
    add("--prompts", type=int, default=512, help="held-out prompts that are continued")
    parser.set_defaults(minutes=1.5, seed=2, batch_size=64, context=512)
    parser.set_defaults(muon_lr=0.02, adam_lr=3e-3, weight_decay=0.01)
    return parser.parse_args()


@dataclass(frozen=True)
class OwnText:
    """Windows that the target continued.

    Attributes:
        windows: [N, context] int16, on the CPU.
        counts: [vocab_size] int64; how often each token occurs in their continuations.
        seconds: that they took.
    """

    windows: Tensor
    counts: Tensor
    seconds: float


def make_own_text(
    arguments: argparse.Namespace, target: Llama, tokens: Tensor, generator: torch.Generator
) -> OwnText:
    """Lets the target continue windows of a stream [N] int32, behind prompts of random lengths."""
    start, context = time.perf_counter(), arguments.context
    size = min(arguments.own_batch, arguments.own_rows, len(tokens) // context - 1)
    source = training_windows(tokens, context, size, generator)
    is_odd = torch.arange(size, device=tokens.device) % 2 == 1
    temperatures = torch.where(is_odd, TEMPERATURE, 0.0)
    shortest = min(MIN_PROMPT, context // 4)
    longest = max(context - MIN_OWN, shortest + 1)
    columns = torch.arange(context, device=tokens.device)
    counts = torch.zeros(target.shape.vocab_size, dtype=torch.int64, device=tokens.device)
    made: list[Tensor] = []
    for number in range(0, arguments.own_rows, size):
        windows, _ = next(source)
        lens = torch.randint(shortest, longest, (size,), generator=generator, device=tokens.device)
        label = f"own text {number + size:,}"
        text = continue_windows(target, windows, lens, temperatures, generator, label)
        counts += torch.bincount(text[columns >= lens[:, None]], minlength=len(counts))
        made.append(text.to("cpu", torch.int16))
    return OwnText(torch.cat(made), counts.cpu(), time.perf_counter() - start)


class EagleTrainer:
    """The training loop for a time budget."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        pair: Pair,
        tokens: Tensor,
        own: OwnText,
        probe: np.ndarray,
        generator: torch.Generator,
    ) -> None:
        self.arguments, self.pair, self.probe = arguments, pair, probe
        self.device, self.generator = tokens.device, generator
        self.on_gpu = self.device.type == "cuda"
        self.optimizer = make_optimizer(arguments, pair.head)
        is_fast = is_compiled(arguments, self.device)
        self.loss_of = torch.compile(self._loss, dynamic=False) if is_fast else self._loss
        num_own = round(arguments.batch_size * arguments.own_share)
        num_real = arguments.batch_size - num_own
        windows = own.windows.to(self.device)
        self.windows = mixed_windows(tokens, windows, num_real, num_own, self.generator)
        long_rows = training_windows(
            tokens, arguments.long_context, arguments.long_rows, self.generator
        )
        self.long_windows = (inputs for inputs, _ in long_rows)

    def _loss(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of tokens [B, T] int64 with drafting from rows starts [S] int64, and the share
        of first drafts that are what the target says."""
        target, head, unrolled = self.pair.target, self.pair.head, self.arguments.unrolled
        output = target.embed_tokens.weight
        with torch.no_grad():
            normed, features = read_target(target, tokens, self.pair.taps)
            is_mask = torch.arange(output.shape[0], device=tokens.device) == MASK_ID
            wanted = target.logits(normed).masked_fill(is_mask, float("-inf"))
            best = wanted.argmax(dim=-1)
            wanted = wanted[..., head.target_ids]
        embedded = target.embed_tokens(tokens[:, 1:])
        given = head.unroll(embedded, head.combine(features[:, :-1]), starts, unrolled)
        loss = normed.new_zeros(())
        weight = torch.ones_like(best[:, starts], dtype=torch.float32)
        first_right = loss
        for step, carried in enumerate(given):
            row = starts + step + 1
            logits = head.logits(carried, output).float()
            teacher = wanted[:, row].float().softmax(dim=-1)
            nats = -(teacher * logits.log_softmax(dim=-1)).sum(dim=-1)
            loss = loss + (nats * weight * head.is_said[best[:, row]]).mean()
            if self.arguments.algorithm != EAGLE3:
                distance = F.smooth_l1_loss(carried, normed[:, row], reduction="none").mean(dim=-1)
                loss = loss + self.arguments.feature_weight * (distance * weight).mean()
            said = head.target_ids[logits.argmax(dim=-1)]
            if step == 0:
                first_right = (said == best[:, row]).float().mean()
            if step + 1 < unrolled:
                is_right = (said == tokens[:, row + 1]).float()
                weight = torch.where(
                    weight == 1.0, LATE_WEIGHT + (1 - LATE_WEIGHT) * is_right, weight
                )
        return loss / unrolled, first_right

    def _starts(self, length: int) -> Tensor:
        """As many ascending rows of windows of `length` tokens as drafting starts from."""
        places = length - 1 - self.arguments.unrolled
        order = torch.randperm(places, generator=self.generator, device=self.device)
        return order[: self.arguments.starts].sort().values

    def _backward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        starts = self._starts(tokens.shape[1])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            loss, first_right = self.loss_of(tokens, starts)
        loss.backward()
        return loss.detach(), first_right

    def _step(self, factor: float) -> None:
        self.optimizer.step(factor)
        self.optimizer.zero_grad()

    def warm_up(self) -> float:
        """Compiles without changing a weight; seconds."""
        start = time.perf_counter()
        for _ in range(2):
            for windows in (self.windows, self.long_windows):
                self._backward(next(windows))
                self.optimizer.warm_up()
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def run(self) -> TimedLoop:
        """Trains until the time is used."""
        arguments = self.arguments
        loop = TimedLoop(arguments.minutes, "accepted by step", self.warm_up())
        for progress in loop.progress():
            factor = warm_constant_linear(loop.steps, progress, WARM_UP_STEPS, HOLD_SHARE)
            loss, first_right = self._backward(next(self.windows))
            self._step(factor)
            loop.tokens += arguments.batch_size * arguments.context
            if loop.steps % arguments.long_every == 0:
                self._backward(next(self.long_windows))
                self._step(factor)
                loop.tokens += arguments.long_rows * arguments.long_context
            loop.steps += 1
            loop.note({"loss": loss, "first_right": first_right}, self._accepted)
        return loop

    def _accepted(self) -> list[float]:
        found = teacher_forced(self.pair, self.probe, self.arguments.context, 4, self.device)
        return list(found["accepted"])


def draft_vocabulary(own: OwnText, size: int) -> tuple[Tensor, float]:
    """The ids [size] int64, ascending, of the tokens that the target writes most often, and their
    share of all that it writes."""
    ids = own.counts.argsort(descending=True, stable=True)[:size].sort().values
    return ids, float(own.counts[ids].sum() / own.counts.sum())


def describe(
    arguments: argparse.Namespace, device: torch.device, loop: TimedLoop, own: OwnText
) -> dict[str, Any]:
    """Describes what was run and how training went."""
    return {
        **describe_run("train_eagle", arguments.commit, device),
        "training": {
            "settings": {
                key: value for key, value in vars(arguments).items() if not isinstance(value, Path)
            },
            "temperature": TEMPERATURE,
            "late_weight": LATE_WEIGHT,
            "own_text_seconds": round(own.seconds, 2),
            "steps": loop.steps,
            "tokens": loop.tokens,
            "seconds": round(loop.seconds, 2),
            "compile_seconds": round(loop.compile_seconds, 2),
            "loss_curve": loop.loss_curve,
            "acceptance_curve": loop.probe_curve,
        },
    }


def describe_head(
    arguments: argparse.Namespace, pair: Pair, covered: float, results: dict[str, Any]
) -> None:
    """Adds what the folder holds to results."""
    head = pair.head
    results["head"] = {
        "name": arguments.out.name,
        "algorithm": arguments.algorithm,
        "shape": asdict(head.shape),
        "layer_ids": [layer - 1 for layer in pair.taps],
        "draft_vocab_size": len(head.target_ids),
        "covered": round(covered, 4),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "weights_bytes": (arguments.out / WEIGHTS).stat().st_size,
    }


def describe_corpus(corpus: Corpus, num_tokens: int) -> dict[str, Any]:
    """The corpus in short."""
    return {
        "train_files": len(corpus.train),
        "train_tokens": num_tokens,
        "held_out": [row["name"] for row in corpus.packages(corpus.held_out)],
    }


def main() -> None:
    """Corpus, own text, training, export, evaluation, card, results."""
    arguments = parse_arguments()
    device = pick_device(arguments.device)
    torch.manual_seed(arguments.seed)
    corpus = collect_corpus(0, arguments.max_corpus_bytes)
    tokenizer = Tokenizer.from_file(str(arguments.base / "tokenizer.json"))
    stream = pack(tokenizer, corpus.train, label="training files")
    streams, _ = held_out_streams(corpus, tokenizer, arguments.max_eval_tokens)
    print(f"{len(stream):,} training tokens; held out: {', '.join(streams)}")

    target = Llama.from_hf_folder(arguments.base).to(device).requires_grad_(False)
    tokens = torch.from_numpy(stream.astype(np.int32)).to(device)
    generator = torch.Generator(device).manual_seed(arguments.seed)
    own = make_own_text(arguments, target, tokens, generator)
    ids, covered = draft_vocabulary(own, arguments.draft_vocab)
    print(f"own text in {own.seconds:.1f} s; {len(ids):,} tokens are {covered:.1%} of it")
    head = make_head(arguments.algorithm, target, ids).to(device)
    taps = tap_layers(arguments.algorithm, target.shape.num_hidden_layers)
    probe = np.concatenate([part[:1024] for part in streams.values()])
    pair = Pair(target, head, taps)
    loop = EagleTrainer(arguments, pair, tokens, own, probe, generator).run()

    write_head_folder(arguments.out, arguments.algorithm, head, taps)
    results = describe(arguments, device, loop, own)
    describe_head(arguments, pair, covered, results)
    results["corpus"] = describe_corpus(corpus, len(stream))
    exported: DraftHead = load_head(arguments.out).to(device)  # rounded to bf16
    shipped = Pair(target, exported, taps)
    results["acceptance"] = {
        "num_steps": NUM_STEPS,
        **evaluate_head(shipped, streams, arguments.prompts, device),
    }
    path = arguments.results or arguments.out.parent / f"{arguments.out.name}.json"
    write_json(path, results)
    name = f"benchmark/results/train_{arguments.algorithm.lower()}_tiny_code.json"
    (arguments.out / "README.md").write_text(head_card(results, name))
    print(f"{results['acceptance']}\nwritten: {arguments.out}, {path}")


if __name__ == "__main__":
    main()
