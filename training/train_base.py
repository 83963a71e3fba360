"""Trains the demo model `tiny-code` from the Python source installed on this machine.

    python -m training.train_base --minutes 5 --out build/tiny-code

Corpus, tokenizer, training, evaluation on held-out packages, export in the Hugging Face layout, a
check of the exported folder with transformers, model card and a results file. One GPU, or a CPU
with small settings.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.command import describe_run, is_compiled, make_optimizer, make_parser, pick_device
from training.corpus import HELD_OUT_RULE, Corpus, collect_corpus
from training.evaluate import draw_samples, evaluate_folder, score_stream
from training.export import model_card, write_json, write_model_folder
from training.model import Llama, LlamaShape
from training.optim import warm_constant_linear
from training.timed_loop import TimedLoop
from training.tokens import held_out_streams, pack, train_tokenizer, training_windows

WARM_UP_STEPS = 100
HOLD_SHARE = 0.3


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--long-share", type=float, default=0.3, help="share of the time with long windows, last")
    add("--eval-context", type=int, default=512, help="window length of the headline loss")
    add("--bpe-bytes", type=int, default=20_000_000, help="text the tokenizer is trained on")
    parser.set_defaults(minutes=5.0, seed=0, batch_size=96, context=1024)
    parser.set_defaults(muon_lr=0.02, adam_lr=3e-3, weight_decay=0.05)
    arguments = parser.parse_args()
    if not 0.0 <= arguments.long_share < 1.0:
        parser.error("--long-share is a share of the time: give a number in [0, 1).")
    if max(arguments.context, arguments.long_context) > LlamaShape().max_position_embeddings:
        parser.error("--context and --long-context can be at most 4096, the model's context.")
    if arguments.batch_size * arguments.context < arguments.long_context:
        parser.error("--batch-size x --context must reach --long-context: raise --batch-size.")
    return arguments


class Trainer:
    """The training loop for a time budget: short windows first, then long ones."""

    def __init__(
        self, arguments: argparse.Namespace, model: Llama, stream: np.ndarray, probe: np.ndarray
    ) -> None:
        self.arguments, self.model, self.probe = arguments, model, probe
        self.device = model.embed_tokens.weight.device
        self.optimizer = make_optimizer(arguments, model)
        self.loss_of = model.next_token_loss
        if is_compiled(arguments, self.device):
            self.loss_of = torch.compile(model.next_token_loss, dynamic=False)
        tokens = torch.from_numpy(stream.astype(np.int32)).to(self.device)
        generator = torch.Generator(self.device).manual_seed(arguments.seed)
        self.tokens_per_step = arguments.batch_size * arguments.context
        rows = self.tokens_per_step // arguments.long_context
        self.short = training_windows(tokens, arguments.context, arguments.batch_size, generator)
        self.long = training_windows(tokens, arguments.long_context, rows, generator)

    def _backward(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        inputs, targets = next(batches)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.loss_of(inputs, targets)
        loss.backward()
        return loss.detach()

    def warm_up(self) -> float:
        """Compiles for both window lengths without changing a weight; seconds."""
        start = time.perf_counter()
        for batches in (self.short, self.long):
            for _ in range(2):
                float(self._backward(batches))
                self.optimizer.warm_up()
        return time.perf_counter() - start

    def _probe_loss(self) -> float:
        score = score_stream(
            lambda tokens: self.model.logits(self.model(tokens)), self.probe, 512, self.device
        )
        return round(float(score.nats_at.sum() / score.tokens_at.sum()), 4)

    def run(self) -> TimedLoop:
        """Trains until the time is used."""
        arguments = self.arguments
        loop = TimedLoop(arguments.minutes, "held-out probe", self.warm_up())
        for progress in loop.progress():
            is_long = progress >= 1.0 - arguments.long_share
            loss = self._backward(self.long if is_long else self.short)
            factor = warm_constant_linear(loop.steps, progress, WARM_UP_STEPS, HOLD_SHARE)
            self.optimizer.step(factor)
            self.optimizer.zero_grad()
            loop.steps += 1
            loop.tokens += self.tokens_per_step
            loop.note({"loss": loss}, self._probe_loss)
        return loop


def training_packages(corpus: Corpus) -> list[dict[str, Any]]:
    """The packages of the training files, the standard library's modules as one row."""
    rows = corpus.packages(corpus.train)
    library = [row for row in rows if str(row["name"]).startswith("stdlib/")]
    merged: list[dict[str, Any]] = [row for row in rows if row not in library]
    if library:
        whole: dict[str, Any] = {**library[0], "name": f"stdlib ({len(library)} modules)"}
        for key in ("files", "bytes"):
            whole[key] = sum(int(row[key]) for row in library)
        merged.insert(0, whole)
    return merged


def describe(
    arguments: argparse.Namespace, device: torch.device, corpus: Corpus, loop: TimedLoop
) -> dict[str, Any]:
    """Everything about the run except losses and token counts of the corpus."""
    long_rows = arguments.batch_size * arguments.context // arguments.long_context
    how = (
        f"Batches of {arguments.batch_size} x {arguments.context} tokens, for the last "
        f"{arguments.long_share:.0%} of the time {long_rows} x {arguments.long_context}. "
    )
    return {
        **describe_run("train_base", arguments.commit, device),
        "model": asdict(LlamaShape()),
        "training": {
            "steps": loop.steps,
            "tokens": loop.tokens,
            "seconds": round(loop.seconds, 2),
            "compile_seconds": round(loop.compile_seconds, 2),
            "tokens_per_s": round(loop.tokens / loop.seconds),
            "how": how.strip(),
            "muon_lr": arguments.muon_lr,
            "adam_lr": arguments.adam_lr,
            "weight_decay": arguments.weight_decay,
            "seed": arguments.seed,
            "loss_curve": loop.loss_curve,
            "held_out_curve": loop.probe_curve,
        },
        "corpus": {
            "held_out_rule": HELD_OUT_RULE,
            "held_out": corpus.packages(corpus.held_out),
            "train": training_packages(corpus),
            "dropped": corpus.dropped,
        },
    }


def main() -> None:
    """Corpus, tokenizer, training, export, evaluation, card, results."""
    arguments = parse_arguments()
    device = pick_device(arguments.device)
    torch.manual_seed(arguments.seed)
    corpus = collect_corpus(arguments.seed, arguments.max_corpus_bytes)
    tokenizer = train_tokenizer(corpus.train, arguments.bpe_bytes)
    stream = pack(tokenizer, corpus.train, label="training files")
    streams, num_bytes = held_out_streams(corpus, tokenizer, arguments.max_eval_tokens)
    train_bytes = sum(len(file.text.encode()) for file in corpus.train)
    print(
        f"{len(corpus.train):,} training files, {train_bytes / 1e6:.1f} MB, "
        f"{len(stream):,} tokens; held out: {', '.join(streams)}"
    )

    model = Llama(LlamaShape()).to(device)
    probe = np.concatenate([part[:8192] for part in streams.values()])
    loop = Trainer(arguments, model, stream, probe).run()

    write_model_folder(arguments.out, model, tokenizer)
    results = describe(arguments, device, corpus, loop)
    results["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    results["training"]["epochs"] = round(loop.tokens / len(stream), 2)
    results["corpus"]["train_tokens"] = len(stream)
    results["corpus"]["bytes_per_token"] = round(train_bytes / len(stream), 4)
    results["samples"] = draw_samples(arguments.out, device, arguments.seed)
    results |= evaluate_folder(
        arguments.out,
        arguments.eval_context,
        device,
        streams,
        num_bytes,
        train_sample=stream[: len(stream) // 40],
    )
    weights_bytes = (arguments.out / "model.safetensors").stat().st_size
    (arguments.out / "README.md").write_text(model_card(results, weights_bytes))
    write_json(arguments.results or arguments.out.parent / "results.json", results)
    overall = results["held_out_loss"][str(arguments.eval_context)]["overall"]
    print(f"held-out: {overall}\ntraining text: {results['train_loss']}\nwritten: {arguments.out}")


if __name__ == "__main__":
    main()
