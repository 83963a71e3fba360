"""A drafter that knows the answer, for benchmarks alone: the bound of what drafts can gain.

It drafts what the same prompt was answered with before. No model runs and nothing is searched, so a
round costs what the target's own step costs. A chosen share of its drafts is spoilt, always the
same ones of a prompt: with a share p, a round accepts each draft with probability 1 - p if those
before it were right.

`python -m benchmark.replay` is a scheduler's process in which it stands in NGRAM's place, with the
flags of NGRAM (`replaying` starts Engines with it).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch

from sglang.srt.device_copies import to_device
from sglang.srt.entrypoints.children import CHILD_MODULES
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.processes import scheduler_process
from sglang.srt.speculative import ngram_worker
from sglang.srt.speculative.drafter import Drafter, DrafterParts, ExtendedStep, PlannedDrafter
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ngram_worker import NgramDrafter
from sglang.srt.speculative.rounds import planner_of_rounds
from sglang.srt.step.worker import EndedText, ScheduleBatch

ERROR_RATE = "SGLANG_REPLAY_ERROR_RATE"
MODULE = "benchmark.replay"
MAX_PROMPTS = 1024
NOTHING = 0, 0  # what is known of other prompts


class ReplayDrafter(Drafter):
    """Chains of what is known behind the certain token; no drafts where nothing is.

    A prompt is all that a request is admitted with. Of its answers that have ended the first of the
    longest ones is known to all requests with this prompt.

    Args:
        error_rate: share of drafts that are spoilt, 0 to 1.
    """

    def __init__(self, parts: DrafterParts, error_rate: float) -> None:
        self._state, self._ops = parts.state, parts.runners.target.step_ops
        self._error_rate = error_rate
        tokens = parts.state.tokens
        shape, device = (1 + MAX_PROMPTS, tokens.shape[1]), tokens.device
        self._texts = torch.zeros(shape, dtype=torch.int64, device=device)  # with spoilt tokens
        self._ends = torch.zeros(len(self._texts), dtype=torch.int64, device=device)
        self._place_of_row = torch.zeros(len(tokens), dtype=torch.int64, device=device)
        self._known = dict[bytes, tuple[int, int]]()  # place and end of the text, by prompt
        self._prompts = dict[int, np.ndarray]()  # by row
        parts.state.on_end.append(self.learn)

    needs = staticmethod(NgramDrafter.needs)
    models = staticmethod(NgramDrafter.models)

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        drafter = cls(parts, float(os.environ[ERROR_RATE]))
        return PlannedDrafter(planner_of_rounds(parts.options.rounds, parts, None), drafter)

    def prepare(self, batch: ScheduleBatch, plan: StepPlan) -> None:
        if not batch.new_rows:
            return
        self._prompts |= {new.row: new.tokens for new in batch.new_rows}
        pairs = [
            (new.row, self._known.get(new.tokens.tobytes(), NOTHING)[0]) for new in batch.new_rows
        ]
        rows, places = to_device(pairs, self._ends.device, torch.int64).T
        self._place_of_row[rows] = places

    def learn(self, texts: list[EndedText]) -> None:
        """Keeps texts that are longer than what is known."""
        for text in texts:
            prompt, end = self._prompts[text.row], text.end
            place, known = self._known.get(prompt.tobytes(), (1 + len(self._known), 0))
            if end <= known or place > MAX_PROMPTS:
                continue
            self._known[prompt.tobytes()] = place, end
            errors = to_device(spoilt(prompt, end, self._error_rate), self._ends.device)
            said = self._state.tokens[text.row, :end].to(torch.int64)
            self._texts[place, :end] = (said + errors) % self._state.vocab_size
            self._ends[place : place + 1] = end  # writing to one index waits for a GPU

    def propose(self, step: ExtendedStep) -> None:
        num_drafts, rows = max(step.plan.next_drafts), step.rows
        if num_drafts == 0:
            return
        places, first = self._place_of_row[rows], self._state.num_tokens[rows]
        columns = first[:, None] + torch.arange(num_drafts, device=rows.device)
        columns = columns.clamp(max=self._texts.shape[1] - 1)
        counts = (self._ends[places] - first).clamp(0, num_drafts)
        if min(step.plan.next_drafts) < num_drafts:
            asked = to_device(list(step.plan.next_drafts), rows.device, torch.int64)
            counts = torch.minimum(counts, asked)
        tokens = self._texts[places[:, None], columns]
        drafts = EagleVerifyInput(tokens, per_request_draft_token_num=counts)
        drafts.write(self._ops, self._state, rows)


def spoilt(prompt: np.ndarray, num_tokens: int, error_rate: float) -> np.ndarray:
    """[num_tokens] bool; which drafts behind a prompt are spoilt, by their positions in the text.
    The same in every run."""
    seed = np.asarray(prompt, dtype=np.uint32).tolist()
    return np.random.default_rng(seed).random(num_tokens) < error_rate


@contextmanager
def replaying(error_rate: float | None) -> Iterator[None]:
    """Engines that start meanwhile replay in place of NGRAM; None: they do not."""
    if error_rate is None:
        yield
        return
    with (
        mock.patch.dict(CHILD_MODULES, scheduler=MODULE),
        mock.patch.dict(os.environ, {ERROR_RATE: str(error_rate)}),
    ):
        yield


def main() -> int:
    """Runs a scheduler's process."""
    with mock.patch.object(ngram_worker, "NgramDrafter", ReplayDrafter):
        return scheduler_process.main()


if __name__ == "__main__":
    sys.exit(main())
