"""Teach the demo model `tiny-code` to predict several tokens per step.

    python scripts/demo_models/train_mtp.py --base build/tiny-code --out build/tiny-code-mtp

Starts from a base model of train_base.py, trains on the same corpus, evaluates on the same held-out
packages, exports in the Hugging Face layout, and writes model card and results. One GPU, or a CPU
with small settings. `mtp_layout.py` says what is trained, `evaluate_mtp.py` what is measured.
"""

from __future__ import annotations

import argparse
import copy
import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import tokenizers
import torch
import transformers
from data import MASK_ID, collect_corpus, pack
from evaluate import draw_samples, score_packages
from evaluate_mtp import evaluate_prediction, teacher_forced
from export import sample_texts, write_json, write_model_folder
from export_mtp import extend_card, read_base_card
from model import Llama
from mtp_layout import (
    holding_loss,
    make_layout,
    mask_loss,
    region_rows,
    row_weights,
    slot_tokens,
    with_slots,
)
from optim import MuonAdamW, warm_constant_linear
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from train_base import held_out_streams, pick_device, training_windows

CURRICULUM = ((0.10, 1), (0.25, 3), (1.0, 7))  # (share of the time, masks per region)
WARM_UP_STEPS = 50
HOLD_SHARE = 0.4
LOG_EVERY_STEPS = 20


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, default=5.2, help="training time, compilation not counted")
    add("--base", type=Path, required=True, help="folder that train_base.py wrote")
    add("--out", type=Path, required=True, help="folder for the exported model")
    add("--results", type=Path, help="results JSON (default: results.json beside --out)")
    add("--commit", default="uncommitted", help="commit hash to store with the results")
    add("--seed", type=int, default=1)
    add("--device", default="auto", help="auto, cuda or cpu")
    add("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU only")
    add("--batch-size", type=int, default=64, help="sequences per step")
    add("--context", type=int, default=512, help="real tokens per sequence")
    add("--masks", type=int, default=256, help="mask rows per sequence")
    add("--long-context", type=int, default=4096, help="window of steps without masks")
    add("--long-rows", type=int, default=12, help="windows per such step")
    add("--long-every", type=int, default=4, help="one such step after so many others")
    add("--mask-weight", type=float, default=0.45, help="of the mask rows' loss")
    add("--muon-lr", type=float, default=0.006)
    add("--adam-lr", type=float, default=9e-4)
    add("--weight-decay", type=float, default=0.02, help="of the matrices, per unit of lr")
    add("--max-corpus-bytes", type=int, help="use about this much of the corpus (quick runs)")
    add("--max-eval-tokens", type=int, help="per held-out package (quick runs)")
    add("--prompts", type=int, default=512, help="held-out prompts that are continued")
    return parser.parse_args()


@dataclass
class TrainingLog:
    """What happened: counts, and curves of (seconds, step, value)."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    loss_curve: list[tuple[float, int, float, float]] = field(default_factory=list)
    acceptance_curve: list[tuple[float, int, list[float]]] = field(default_factory=list)


class MTPTrainer:
    """The training loop for a time budget."""

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

        def maybe_compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return torch.compile(function, dynamic=False) if compiled else function

        self.hidden_of = maybe_compile(model.forward)
        self.base = copy.deepcopy(model)
        self.base_hidden_of = maybe_compile(self.base.forward)
        self.best_of = maybe_compile(self._best_tokens)
        self.mask_loss_of = maybe_compile(self._mask_loss)
        self.holding_loss_of = maybe_compile(self._holding_loss)
        tokens = torch.from_numpy(stream.astype(np.int32)).to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(arguments.seed)
        with torch.no_grad():
            model.embed_tokens.weight[MASK_ID] = model.embed_tokens.weight.mean(dim=0)
        self.windows = training_windows(
            tokens, arguments.context, arguments.batch_size, self.generator
        )
        self.long_windows = training_windows(
            tokens, arguments.long_context, arguments.long_rows, self.generator
        )

    def _best_tokens(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        is_mask = torch.arange(logits.shape[-1], device=logits.device) == MASK_ID
        return logits.masked_fill(is_mask, float("-inf")).argmax(dim=-1)

    def _mask_loss(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return mask_loss(self.model.logits(hidden), labels, weights)

    def _holding_loss(self, hidden: Tensor, base_hidden: Tensor) -> Tensor:
        return holding_loss(self.model.logits(hidden), self.base.logits(base_hidden))

    def _backward(self, width: int) -> tuple[Tensor, Tensor]:
        """One step's gradients; returns the loss and the share of right first predictions."""
        arguments = self.arguments
        real, _ = next(self.windows)
        batch, num_real = real.shape
        num_regions = arguments.masks // width
        anchors = torch.randint(
            num_real, (batch, num_regions), generator=self.generator, device=self.device
        )
        layout = make_layout(anchors, num_real, arguments.masks, width)
        masks = real.new_full((batch, arguments.masks), MASK_ID)
        tokens = torch.cat((real, masks), dim=1)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            hidden = self.hidden_of(tokens, layout.positions, layout.visible)
            with torch.no_grad():
                predicted = self.best_of(hidden.detach())
                own = with_slots(layout, tokens, slot_tokens(layout, predicted))
                judged = self.best_of(self.hidden_of(own, layout.positions, layout.visible))
                labels = region_rows(layout, judged)
                guesses = region_rows(layout, predicted)
                weights = row_weights(guesses, labels).flatten(1)
                base_hidden = self.base_hidden_of(real)
            # Rows left over are scored too, without weight, so that all widths have one shape.
            unused = (0, arguments.masks - weights.shape[1])
            labels_of_rows = functional.pad(labels.flatten(1), unused)
            loss = self.holding_loss_of(hidden[:, :num_real], base_hidden)
            loss = loss + arguments.mask_weight * self.mask_loss_of(
                hidden[:, num_real:], labels_of_rows, functional.pad(weights, unused)
            )
        loss.backward()
        return loss.detach(), (guesses[:, :, 0] == labels[:, :, 0]).float().mean()

    def _plain_backward(self) -> Tensor:
        inputs, _ = next(self.long_windows)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            with torch.no_grad():
                base_hidden = self.base_hidden_of(inputs)
            loss = self.holding_loss_of(self.hidden_of(inputs), base_hidden)
        loss.backward()
        return loss.detach()

    def _step(self, factor: float) -> None:
        self.optimizer.step(factor)
        self.optimizer.zero_grad()

    def warm_up(self) -> float:
        """Compile without changing a weight; returns seconds."""
        start = time.perf_counter()
        for _ in range(2):
            for _, width in CURRICULUM:
                self._backward(width)
            self._plain_backward()
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            self._step(0.0)
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def run(self) -> TrainingLog:
        """Train until the budget is used."""
        arguments, log = self.arguments, TrainingLog()
        log.compile_seconds = self.warm_up()
        budget = arguments.minutes * 60.0
        bar = tqdm(total=int(budget), unit="s", desc="training", mininterval=2.0)
        start = time.perf_counter()
        while log.seconds < budget:
            progress = log.seconds / budget
            width = next(width for share, width in CURRICULUM if progress < share)
            factor = warm_constant_linear(log.steps, progress, WARM_UP_STEPS, HOLD_SHARE)
            loss, hits = self._backward(width)
            self._step(factor)
            log.tokens += arguments.batch_size * arguments.context
            if log.steps % arguments.long_every == 0:
                self._plain_backward()
                self._step(factor)
                log.tokens += arguments.long_rows * arguments.long_context
            log.steps += 1
            if log.steps % LOG_EVERY_STEPS == 0:
                self._note(log, float(loss), float(hits), budget, bar)
            log.seconds = time.perf_counter() - start
            bar.update(int(min(log.seconds, budget)) - bar.n)
        if self.on_gpu:
            torch.cuda.synchronize()
        log.seconds = time.perf_counter() - start
        bar.close()
        return log

    def _note(self, log: TrainingLog, loss: float, hits: float, budget: float, bar: tqdm) -> None:
        """Show the loss and store it about sixty times, with acceptance on held-out text ten
        times."""
        bar.set_postfix(loss=f"{loss:.3f}", first_right=f"{hits:.3f}", refresh=False)
        if not np.isfinite(loss):
            raise RuntimeError(f"Loss {loss} at step {log.steps}: lower --muon-lr or --adam-lr.")
        if log.seconds >= budget * len(log.loss_curve) / 60:
            log.loss_curve.append(
                (round(log.seconds, 1), log.steps, round(loss, 4), round(hits, 4))
            )
        if log.seconds >= budget * (len(log.acceptance_curve) + 1) / 10:
            accepted = teacher_forced(self.model, self.probe, self.device)["accepted"]
            log.acceptance_curve.append((round(log.seconds, 1), log.steps, accepted))
            tqdm.write(f"{log.seconds:.0f} s, step {log.steps}: accepted by offset {accepted}")


def describe(
    arguments: argparse.Namespace, device: torch.device, log: TrainingLog
) -> dict[str, Any]:
    """Everything about the run except what was measured after it."""
    on_gpu = device.type == "cuda"
    return {
        "script": "scripts/demo_models/train_mtp.py",
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
        "training": {
            "settings": {
                key: value for key, value in vars(arguments).items() if not isinstance(value, Path)
            },
            "curriculum": CURRICULUM,
            "steps": log.steps,
            "real_tokens": log.tokens,
            "seconds": round(log.seconds, 2),
            "compile_seconds": round(log.compile_seconds, 2),
            "loss_curve": log.loss_curve,
            "acceptance_curve": log.acceptance_curve,
        },
    }


def plain_losses(
    model: Llama, streams: dict[str, np.ndarray], num_bytes: dict[str, int], device: torch.device
) -> dict[str, Any]:
    """Next-token losses of held-out packages in windows of 512 and of the whole context."""

    def logits_of(tokens: Tensor) -> Tensor:
        return model.logits(model(tokens))

    contexts = (512, model.shape.max_position_embeddings)
    return {str(c): score_packages(logits_of, streams, num_bytes, c, device) for c in contexts}


def main() -> None:
    """Corpus, training, evaluation, export, card, results."""
    arguments = parse_arguments()
    device = pick_device(arguments.device)
    card = read_base_card(arguments.base)
    torch.manual_seed(arguments.seed)
    corpus = collect_corpus(0, arguments.max_corpus_bytes)
    tokenizer = tokenizers.Tokenizer.from_file(str(arguments.base / "tokenizer.json"))
    stream = pack(tokenizer, corpus.train, label="training files")
    streams, num_bytes = held_out_streams(corpus, tokenizer, arguments.max_eval_tokens)
    print(f"{len(stream):,} training tokens; held out: {', '.join(streams)}")

    model = Llama.from_hf_folder(arguments.base).to(device)
    before = plain_losses(model, streams, num_bytes, device)
    probe = np.concatenate([part[:1024] for part in streams.values()])
    log = MTPTrainer(arguments, model, stream, probe).run()

    results = describe(arguments, device, log)
    write_model_folder(arguments.out, model, tokenizer)
    exported = Llama.from_hf_folder(arguments.out).to(device)  # what is shipped, rounded to bf16
    after = plain_losses(exported, streams, num_bytes, device)
    results["held_out_loss"] = {"before": before, "after": after}
    results["prediction"] = evaluate_prediction(exported, streams, arguments.prompts, device)
    write_json(arguments.results or arguments.out.parent / "results.json", results)
    samples = sample_texts(draw_samples(arguments.out, device, arguments.seed))
    (arguments.out / "README.md").write_text(extend_card(card, results, samples))
    summary = {
        k: v["512"]["overall"]["nats_per_token"] for k, v in results["held_out_loss"].items()
    }
    print(f"k=1 loss {summary}\n{results['prediction']}\nwritten: {arguments.out}")


if __name__ == "__main__":
    main()
