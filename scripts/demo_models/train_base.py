"""Train the demo model `tiny-code` from the Python source installed on this machine.

    python scripts/demo_models/train_base.py --minutes 5 --out build/tiny-code

Corpus, tokenizer, training, evaluation on held-out packages, export in the Hugging Face layout, a
check of the exported folder with transformers, model card and a results file. One GPU, or a CPU
with small settings.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import tokenizers
import torch
import transformers
from data import BOS_ID, HELD_OUT_RULE, Corpus, collect_corpus, pack, train_tokenizer
from evaluate import draw_samples, evaluate_folder, score_stream
from export import model_card, write_json, write_model_folder
from model import Llama, LlamaShape
from optim import MuonAdamW, warm_constant_linear
from torch import Tensor
from tqdm import tqdm

LOG_EVERY_STEPS = 20
WARM_UP_STEPS = 100
HOLD_SHARE = 0.3


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="training time, compilation not counted")
    add("--out", type=Path, required=True, help="folder for the exported model")
    add("--results", type=Path, help="results JSON (default: results.json beside --out)")
    add("--commit", default="uncommitted", help="commit hash to store with the results")
    add("--seed", type=int, default=0)
    add("--device", default="auto", help="auto, cuda or cpu")
    add("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU only")
    add("--batch-size", type=int, default=96, help="windows of --context tokens per step")
    add("--context", type=int, default=1024, help="window length of the first part")
    add("--long-context", type=int, default=4096, help="window length of the last part")
    add("--long-share", type=float, default=0.3, help="share of the time with long windows")
    add("--eval-context", type=int, default=512, help="window length of the headline loss")
    add("--muon-lr", type=float, default=0.02)
    add("--adam-lr", type=float, default=3e-3)
    add("--weight-decay", type=float, default=0.05, help="of the matrices, per unit of lr")
    add("--bpe-bytes", type=int, default=20_000_000, help="text the tokenizer is trained on")
    add("--max-corpus-bytes", type=int, help="use about this much of the corpus (quick runs)")
    add("--max-eval-tokens", type=int, help="per held-out package (quick runs)")
    arguments = parser.parse_args()
    if not 0.0 <= arguments.long_share < 1.0:
        parser.error("--long-share is a share of the time: give a number in [0, 1).")
    if max(arguments.context, arguments.long_context) > LlamaShape().max_position_embeddings:
        parser.error("--context and --long-context can be at most 4096, the model's context.")
    if arguments.batch_size * arguments.context < arguments.long_context:
        parser.error("--batch-size x --context must reach --long-context: raise --batch-size.")
    return arguments


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: PyTorch sees no GPU here; use --device cpu.")
    return torch.device(name)


def training_windows(
    stream: Tensor, context: int, rows: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches (inputs, targets), each [rows, context] int64, from a stream [N] int32.

    Every pass cuts the stream at a new random phase and visits the windows in a new order. Inputs
    begin with BOS in place of the token before the window.
    """
    device = stream.device
    offsets = torch.arange(context, device=device)
    if len(stream) < (rows + 1) * context:
        raise RuntimeError(
            f"{len(stream):,} training tokens do not fill a batch of {rows} x {context}: lower "
            "--batch-size or --context, or raise --max-corpus-bytes."
        )
    while True:
        phase = int(torch.randint(context, (), generator=generator, device=device))
        count = (len(stream) - phase) // context
        order = torch.randperm(count, generator=generator, device=device)
        for chosen in order[: count - count % rows].split(rows):
            targets = stream[(chosen * context + phase)[:, None] + offsets].long()
            inputs = targets.roll(1, dims=1)
            inputs[:, 0] = BOS_ID
            yield inputs, targets


@dataclass
class TrainingLog:
    """What happened: counts, and curves of (seconds, step, nats per token)."""

    steps: int
    tokens: int
    seconds: float
    compile_seconds: float
    loss_curve: list[tuple[float, int, float]]
    held_out_curve: list[tuple[float, int, float]]


class Trainer:
    """The training loop for a time budget: short windows first, then long ones."""

    def __init__(
        self, arguments: argparse.Namespace, model: Llama, stream: np.ndarray, probe: np.ndarray
    ) -> None:
        self.arguments, self.model, self.probe = arguments, model, probe
        self.device = model.embed_tokens.weight.device
        self.on_gpu = self.device.type == "cuda"
        compiled = arguments.compile if arguments.compile is not None else self.on_gpu
        self.optimizer = MuonAdamW(
            model,
            muon_lr=arguments.muon_lr,
            adam_lr=arguments.adam_lr,
            weight_decay=arguments.weight_decay,
            compiled=compiled,
        )
        self.loss_of = model.next_token_loss
        if compiled:
            self.loss_of = torch.compile(model.next_token_loss, dynamic=False)
        tokens = torch.from_numpy(stream.astype(np.int32)).to(self.device)
        generator = torch.Generator(self.device).manual_seed(arguments.seed)
        self.tokens_per_step = arguments.batch_size * arguments.context
        rows = self.tokens_per_step // arguments.long_context
        self.short = training_windows(tokens, arguments.context, arguments.batch_size, generator)
        self.long = training_windows(tokens, arguments.long_context, rows, generator)

    def _backward(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        inputs, targets = next(batches)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            loss = self.loss_of(inputs, targets)
        loss.backward()
        return loss.detach()

    def warm_up(self) -> float:
        """Compile both window lengths without changing a weight; returns seconds."""
        start = time.perf_counter()
        for batches in (self.short, self.long):
            for _ in range(2):
                float(self._backward(batches))
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.zero_()
                self.optimizer.step(0.0)
                self.optimizer.zero_grad()
        return time.perf_counter() - start

    def _probe_loss(self) -> float:
        score = score_stream(
            lambda tokens: self.model.logits(self.model(tokens)), self.probe, 512, self.device
        )
        return round(float(score.nats_at.sum() / score.tokens_at.sum()), 4)

    def run(self) -> TrainingLog:
        """Train until the budget is used."""
        log = TrainingLog(0, 0, 0.0, self.warm_up(), [], [])
        budget = self.arguments.minutes * 60.0
        bar = tqdm(total=int(budget), unit="s", desc="training", mininterval=2.0)
        start = time.perf_counter()
        while log.seconds < budget:
            progress = log.seconds / budget
            batches = self.long if progress >= 1.0 - self.arguments.long_share else self.short
            loss = self._backward(batches)
            self.optimizer.step(
                warm_constant_linear(log.steps, progress, WARM_UP_STEPS, HOLD_SHARE)
            )
            self.optimizer.zero_grad()
            log.steps += 1
            log.tokens += self.tokens_per_step
            if log.steps % LOG_EVERY_STEPS == 0:
                self._note(log, float(loss), budget, bar)
            elapsed = time.perf_counter() - start
            bar.update(int(min(elapsed, budget)) - bar.n)
            log.seconds = elapsed
        if self.on_gpu:
            torch.cuda.synchronize()
        log.seconds = time.perf_counter() - start
        bar.close()
        return log

    def _note(self, log: TrainingLog, loss: float, budget: float, bar: tqdm) -> None:
        """Show the loss and store it about sixty times, with a held-out probe ten times."""
        rate = log.tokens / max(log.seconds, 1e-9)
        bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{rate:,.0f}", refresh=False)
        if not np.isfinite(loss):
            raise RuntimeError(f"Loss {loss} at step {log.steps}: lower --muon-lr or --adam-lr.")
        if log.seconds >= budget * len(log.loss_curve) / 60:
            log.loss_curve.append((round(log.seconds, 1), log.steps, round(loss, 4)))
        if log.seconds >= budget * (len(log.held_out_curve) + 1) / 10:
            probe = self._probe_loss()
            log.held_out_curve.append((round(log.seconds, 1), log.steps, probe))
            tqdm.write(f"{log.seconds:.0f} s, step {log.steps}: held-out probe {probe}")


def held_out_streams(
    corpus: Corpus, tokenizer: tokenizers.Tokenizer, max_tokens: int | None
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Per held-out package its token stream [N] uint16 and its bytes of source.

    `max_tokens` keeps the beginning of each stream and that share of the bytes.
    """
    streams, num_bytes = {}, {}
    for row in corpus.packages(corpus.held_out):
        name = str(row["name"])
        files = [file for file in corpus.held_out if file.package.name == name]
        stream = pack(tokenizer, files)
        streams[name] = stream[:max_tokens]
        num_bytes[name] = round(int(row["bytes"]) * len(streams[name]) / len(stream))
    return streams, num_bytes


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
    arguments: argparse.Namespace, device: torch.device, corpus: Corpus, log: TrainingLog
) -> dict[str, Any]:
    """Everything about the run except losses and token counts of the corpus."""
    on_gpu = device.type == "cuda"
    long_rows = arguments.batch_size * arguments.context // arguments.long_context
    how = (
        f"Batches of {arguments.batch_size} x {arguments.context} tokens, for the last "
        f"{arguments.long_share:.0%} of the time {long_rows} x {arguments.long_context}. "
    )
    return {
        "script": "scripts/demo_models/train_base.py",
        "command": shlex.join(["python", *sys.argv]),
        "commit": arguments.commit,
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda if on_gpu else None,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "safetensors": safetensors.__version__,
        },
        "model": asdict(LlamaShape()),
        "training": {
            "steps": log.steps,
            "tokens": log.tokens,
            "seconds": round(log.seconds, 2),
            "compile_seconds": round(log.compile_seconds, 2),
            "tokens_per_s": round(log.tokens / log.seconds),
            "how": how.strip(),
            "muon_lr": arguments.muon_lr,
            "adam_lr": arguments.adam_lr,
            "weight_decay": arguments.weight_decay,
            "seed": arguments.seed,
            "loss_curve": log.loss_curve,
            "held_out_curve": log.held_out_curve,
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
    log = Trainer(arguments, model, stream, probe).run()

    write_model_folder(arguments.out, model, tokenizer)
    results = describe(arguments, device, corpus, log)
    results["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    results["training"]["epochs"] = round(log.tokens / len(stream), 2)
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
