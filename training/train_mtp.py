"""Teaches the demo model `tiny-code` to predict several tokens per step.

    python -m training.train_mtp --base build/tiny-code --out build/tiny-code-mtp

Starts from a base model of train_base, trains on the same corpus, evaluates on the same held-out
packages, exports in the Hugging Face layout, and writes model card and results. One GPU, or a CPU
with small settings. `mtp_layout.py` says what is trained, `evaluate_mtp.py` what is measured.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from training.command import describe_run, is_compiled, make_optimizer, make_parser, pick_device
from training.corpus import collect_corpus
from training.evaluate import draw_samples, score_packages
from training.evaluate_mtp import evaluate_prediction, teacher_forced
from training.export import sample_texts, write_json, write_model_folder
from training.export_mtp import extend_card, read_base_card
from training.model import Llama
from training.mtp_layout import (
    holding_loss,
    make_layout,
    mask_loss,
    region_rows,
    row_weights,
    slot_tokens,
    with_slots,
)
from training.optim import warm_constant_linear
from training.timed_loop import TimedLoop
from training.tokens import MASK_ID, held_out_streams, pack, training_windows

CURRICULUM = ((0.10, 1), (0.25, 3), (1.0, 7))  # (share of the time, masks per region)
WARM_UP_STEPS = 50
HOLD_SHARE = 0.4


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--base", type=Path, required=True, help="folder that train_base wrote")
    add("--masks", type=int, default=256, help="mask rows per sequence")
    add("--long-rows", type=int, default=12, help="long windows per step of them, without masks")
    add("--long-every", type=int, default=4, help="one such step after so many others")
    add("--mask-weight", type=float, default=0.45, help="of the mask rows' loss")
    add("--prompts", type=int, default=512, help="held-out prompts that are continued")
    parser.set_defaults(minutes=5.2, seed=1, batch_size=64, context=512)
    parser.set_defaults(muon_lr=0.006, adam_lr=9e-4, weight_decay=0.02)
    return parser.parse_args()


class MTPTrainer:
    """The training loop for a time budget."""

    def __init__(
        self, arguments: argparse.Namespace, model: Llama, stream: np.ndarray, probe: np.ndarray
    ) -> None:
        self.arguments, self.model, self.probe = arguments, model, probe
        self.device = model.embed_tokens.weight.device
        self.on_gpu = self.device.type == "cuda"
        compiled = is_compiled(arguments, self.device)
        self.optimizer = make_optimizer(arguments, model)

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
        """Compiles without changing a weight; seconds."""
        start = time.perf_counter()
        for _ in range(2):
            for _, width in CURRICULUM:
                self._backward(width)
            self._plain_backward()
            self.optimizer.warm_up()
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def run(self) -> TimedLoop:
        """Trains until the time is used."""
        arguments = self.arguments
        loop = TimedLoop(arguments.minutes, "accepted by offset", self.warm_up())
        for progress in loop.progress():
            width = next(width for share, width in CURRICULUM if progress < share)
            factor = warm_constant_linear(loop.steps, progress, WARM_UP_STEPS, HOLD_SHARE)
            loss, hits = self._backward(width)
            self._step(factor)
            loop.tokens += arguments.batch_size * arguments.context
            if loop.steps % arguments.long_every == 0:
                self._plain_backward()
                self._step(factor)
                loop.tokens += arguments.long_rows * arguments.long_context
            loop.steps += 1
            loop.note({"loss": loss, "first_right": hits}, self._accepted)
        return loop

    def _accepted(self) -> list[float]:
        return list(teacher_forced(self.model, self.probe, self.device)["accepted"])


def describe(
    arguments: argparse.Namespace, device: torch.device, loop: TimedLoop
) -> dict[str, Any]:
    """Everything about the run except what was measured after it."""
    return {
        **describe_run("train_mtp", arguments.commit, device),
        "training": {
            "settings": {
                key: value for key, value in vars(arguments).items() if not isinstance(value, Path)
            },
            "curriculum": CURRICULUM,
            "steps": loop.steps,
            "real_tokens": loop.tokens,
            "seconds": round(loop.seconds, 2),
            "compile_seconds": round(loop.compile_seconds, 2),
            "loss_curve": loop.loss_curve,
            "acceptance_curve": loop.probe_curve,
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
    tokenizer = Tokenizer.from_file(str(arguments.base / "tokenizer.json"))
    stream = pack(tokenizer, corpus.train, label="training files")
    streams, num_bytes = held_out_streams(corpus, tokenizer, arguments.max_eval_tokens)
    print(f"{len(stream):,} training tokens; held out: {', '.join(streams)}")

    model = Llama.from_hf_folder(arguments.base).to(device)
    before = plain_losses(model, streams, num_bytes, device)
    probe = np.concatenate([part[:1024] for part in streams.values()])
    loop = MTPTrainer(arguments, model, stream, probe).run()

    results = describe(arguments, device, loop)
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
