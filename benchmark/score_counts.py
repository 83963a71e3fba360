"""How often drafts are confirmed, by their score, and what `Calibration` makes of that.

The bundled model with its EAGLE-3 head serves held-out code in this process. Each request drafts
chains of so many tokens, and all of them are verified: none is left out for its score.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from benchmark.held_out import held_out_prompts
from sglang.bench_one_batch import OneBatch
from sglang.srt.model_config import resolve_model_path
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.tile_spec.core import NUM_BINS, Calibration, Floats, bounded_scores

MODEL, HEAD = "demo", "demo-eagle3"
VERIFIED = "SGLANG_TILE_SPEC_DRAFTS"  # of each request


class ScoreCounts:
    """Drafts that were verified, and those that were confirmed with all before them, by score in
    NUM_BINS bins of equal width.

    Attributes:
        tried, confirmed: [NUM_BINS] int64.
        calibration: has been told all of it, step by step.
    """

    def __init__(self) -> None:
        self.tried = np.zeros(NUM_BINS, np.int64)
        self.confirmed = np.zeros(NUM_BINS, np.int64)
        self.calibration = Calibration()
        self._told: torch.Tensor | None = None

    def note(self, step: ComputedStep) -> None:
        """Hears of each step, in order. The probabilities of the drafts that it verified are those
        that the step before left in the device rows."""
        told, confidence = self._told, step.state.confidence
        assert confidence is not None, "Scores are kept with --tile-spec."
        self._told = confidence.drafts.clone()
        num_fed, num_taken = step.accepted.num_drafts, step.accepted.accept_lens
        if told is None or num_fed is None:
            return
        chains = bounded_scores(told[step.batch.rows].cpu().numpy())
        position = np.arange(chains.shape[1])
        was_fed = position < num_fed.cpu().numpy()[:, None]
        was_confirmed = position < num_taken.cpu().numpy()[:, None] - 1
        self.add(np.cumprod(chains, axis=1)[was_fed], was_confirmed[was_fed])

    def add(self, scores: Floats, confirmed: NDArray[np.bool_]) -> None:
        """Hears of drafts of one step; both [n]."""
        self.calibration.observe(scores, confirmed)
        bins = np.minimum((scores * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        self.tried += np.bincount(bins, minlength=NUM_BINS)
        self.confirmed += np.bincount(bins[confirmed], minlength=NUM_BINS)

    def result(self) -> dict[str, Any]:
        """`rows` has of each bin its middle score, how many drafts were tried, the share of them
        that was confirmed (None where none was tried), and the chance that is predicted in the end.
        Mean errors are those of the chances, and of the scores themselves, to the shares confirmed,
        weighted by drafts."""
        scores = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
        chances = self.calibration.predict(scores)
        num_drafts = int(self.tried.sum())
        shares = self.confirmed / np.maximum(self.tried, 1)

        def mean_error(of: Floats) -> float:
            return round(float((self.tried * np.abs(of - shares)).sum() / max(num_drafts, 1)), 4)

        columns = (each.tolist() for each in (scores, self.tried, shares, chances))
        return {
            "num_drafts": num_drafts,
            "mean_error": mean_error(chances),
            "mean_error_of_scores": mean_error(scores),
            "rows": [
                [score, tried, round(share, 4) if tried else None, round(chance, 4)]
                for score, tried, share, chance in zip(*columns, strict=True)
            ],
        }


def count_drafts(
    args: ServerArgs, prompts: list[list[int]], num_new: int, counts: ScoreCounts
) -> None:
    """Serves a batch of prompts, of each so many new tokens, greedy."""
    batch = OneBatch(args, partial(make_worker, on_step=counts.note))
    batch.run(prompts, num_new)


def measured_calibration(arguments: argparse.Namespace, num_steps: int) -> dict[str, Any]:
    """`ScoreCounts.result` of chains of so many drafts, with the prompts that were served and the
    seconds that it took. What it used of the device is given back."""
    start = time.perf_counter()
    prompts, source = held_out_prompts(
        resolve_model_path(MODEL),
        arguments.calibration_prompts,
        arguments.prompt_tokens,
        arguments.seed + 1,
    )
    counts = ScoreCounts()
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, {VERIFIED: str(num_steps)}),
    ):
        args = ServerArgs(
            model_path=MODEL,
            device=arguments.device,
            attention_backend=arguments.attention_backend,
            disable_radix_cache=True,
            disable_cuda_graph=True,
            max_running_requests=len(prompts),
            context_length=arguments.prompt_tokens + arguments.new_tokens + 16,
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=HEAD,
            speculative_num_steps=num_steps,
            speculative_load_aware="off",
            tile_spec=True,
            tile_spec_cache_dir=cache,
        )
        count_drafts(args, prompts, arguments.new_tokens, counts)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    seconds = round(time.perf_counter() - start, 1)
    return {
        "model": MODEL,
        "head": HEAD,
        "num_steps": num_steps,
        "prompts": source,
        "seconds": seconds,
        **counts.result(),
    }
