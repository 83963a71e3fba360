"""Trains a draft model for the demo model `tiny-code`: a Llama a fifth of its size, same tokenizer.

    python -m training.train_draft --base python/sglang/demo_models/tiny-code \\
        --out build/tiny-code-draft

The target is frozen. First it continues windows of the training corpus; then the draft model learns
to say what the target says at each place of those and of real text. A draft counts only while all
before it are right, and then the draft model reads the target's own text: so it is trained on that,
and need not read its own. One GPU, or a CPU with small settings. Writes the folder with a model
card, and results; `evaluate_draft.py` says what is measured.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training.command import describe_run, is_compiled, make_optimizer, make_parser, pick_device
from training.corpus import collect_corpus
from training.evaluate_draft import ModelPair, load_pair
from training.evaluate_eagle import NUM_STEPS, evaluate_head, teacher_forced
from training.export import write_json, write_model_folder
from training.export_draft import draft_card
from training.model import Llama, LlamaShape
from training.optim import warm_constant_linear
from training.own_text import mixed_windows
from training.timed_loop import TimedLoop
from training.tokens import MASK_ID, held_out_streams, pack, training_windows
from training.train_eagle import (
    HOLD_SHARE,
    TEMPERATURE,
    WARM_UP_STEPS,
    OwnText,
    describe_corpus,
    make_own_text,
)

RESULTS_NAME = "benchmark/results/train_draft_tiny_code.json"


def draft_shape(target: LlamaShape) -> LlamaShape:
    """Half as wide as the target and half as deep, with the same tokens and positions."""
    return replace(
        target,
        hidden_size=target.hidden_size // 2,
        intermediate_size=target.intermediate_size // 2,
        num_hidden_layers=max(1, target.num_hidden_layers // 2),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=target.head_dim // 2,
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__ or "")
    add = parser.add_argument
    add("--base", type=Path, required=True, help="folder of the target")
    add("--own-rows", type=int, default=16384, help="windows that the target continues")
    add("--own-batch", type=int, default=4096, help="of them at once")
    add("--own-share", type=float, default=0.75, help="of a batch, that the target continued")
    add("--best-weight", type=float, default=0.5, help="of the target's best tokens in the loss")
    add("--long-rows", type=int, default=8, help="long windows of real text per step of them")
    add("--long-every", type=int, default=6, help="one such step after so many others")
    add("--prompts", type=int, default=512, help="held-out prompts that are continued")
    parser.set_defaults(minutes=1.25, seed=3, batch_size=128, context=512)
    parser.set_defaults(muon_lr=0.02, adam_lr=3e-3, weight_decay=0.01)
    return parser.parse_args()


class DraftTrainer:
    """The training loop for a time budget."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        pair: ModelPair,
        tokens: Tensor,
        own: OwnText,
        probe: np.ndarray,
        generator: torch.Generator,
    ) -> None:
        self.arguments, self.pair, self.probe = arguments, pair, probe
        self.device = tokens.device
        self.on_gpu = self.device.type == "cuda"
        self.optimizer = make_optimizer(arguments, pair.model)
        is_fast = is_compiled(arguments, self.device)
        self.loss_of = torch.compile(self._loss, dynamic=False) if is_fast else self._loss
        num_own = round(arguments.batch_size * arguments.own_share)
        num_real = arguments.batch_size - num_own
        windows = own.windows.to(self.device)
        self.windows = mixed_windows(tokens, windows, num_real, num_own, generator)
        long = training_windows(tokens, arguments.long_context, arguments.long_rows, generator)
        self.long_windows = (inputs for inputs, _ in long)

    def _loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of tokens [B, T] int64, and the share of places where both models say the same:
        the cross-entropy to the target's distribution and to its best token."""
        target, model, weight = self.pair.target, self.pair.model, self.arguments.best_weight
        with torch.no_grad():
            wanted = target.logits(target(tokens)).float()
            is_mask = torch.arange(wanted.shape[-1], device=tokens.device) == MASK_ID
            wanted = wanted.masked_fill(is_mask, float("-inf"))
            best, shares = wanted.argmax(dim=-1), wanted.softmax(dim=-1)
        logits = model.logits(model(tokens)).float()
        nats = logits.log_softmax(dim=-1)
        to_all = -(shares * nats).sum(dim=-1).mean()
        to_best = F.nll_loss(nats.flatten(0, 1), best.flatten())
        is_same = (logits.argmax(dim=-1) == best).float().mean()
        return (1 - weight) * to_all + weight * to_best, is_same

    def _backward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            loss, is_same = self.loss_of(tokens)
        loss.backward()
        return loss.detach(), is_same

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
            loss, is_same = self._backward(next(self.windows))
            self._step(factor)
            loop.tokens += arguments.batch_size * arguments.context
            if loop.steps % arguments.long_every == 0:
                self._backward(next(self.long_windows))
                self._step(factor)
                loop.tokens += arguments.long_rows * arguments.long_context
            loop.steps += 1
            loop.note({"loss": loss, "same": is_same}, self._accepted)
        return loop

    def _accepted(self) -> list[float]:
        found = teacher_forced(self.pair, self.probe, self.arguments.context, 4, self.device)
        return list(found["accepted"])


def describe(
    arguments: argparse.Namespace,
    device: torch.device,
    model: Llama,
    loop: TimedLoop,
    own: OwnText,
) -> dict[str, Any]:
    """Describes what was run, how training went and what the folder holds."""
    weights = arguments.out / "model.safetensors"
    settings = {key: value for key, value in vars(arguments).items() if not isinstance(value, Path)}
    return {
        **describe_run("train_draft", arguments.commit, device),
        "draft": {
            "name": arguments.out.name,
            "shape": asdict(model.shape),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "weights_bytes": weights.stat().st_size,
        },
        "training": {
            "settings": settings,
            "temperature": TEMPERATURE,
            "own_text_seconds": round(own.seconds, 2),
            "steps": loop.steps,
            "tokens": loop.tokens,
            "seconds": round(loop.seconds, 2),
            "compile_seconds": round(loop.compile_seconds, 2),
            "loss_curve": loop.loss_curve,
            "acceptance_curve": loop.probe_curve,
        },
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
    print(f"own text in {own.seconds:.1f} s")
    model = Llama(draft_shape(target.shape)).to(device)
    probe = np.concatenate([part[:1024] for part in streams.values()])
    pair = ModelPair(target, model)
    loop = DraftTrainer(arguments, pair, tokens, own, probe, generator).run()

    write_model_folder(arguments.out, model, tokenizer, has_mask=False)
    results = describe(arguments, device, model, loop, own)
    results["corpus"] = describe_corpus(corpus, len(stream))
    shipped = load_pair(arguments.out, target)  # rounded to bf16
    results["acceptance"] = {
        "num_steps": NUM_STEPS,
        **evaluate_head(shipped, streams, arguments.prompts, device),
    }
    path = arguments.results or arguments.out.parent / f"{arguments.out.name}.json"
    write_json(path, results)
    (arguments.out / "README.md").write_text(draft_card(results, RESULTS_NAME))
    print(f"{results['acceptance']}\nwritten: {arguments.out}, {path}")


if __name__ == "__main__":
    main()
