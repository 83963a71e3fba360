"""A packed step, whose rows the device divides, gives each request what a padded one does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.messages.requests import LogprobOptions
from utils import (
    MTP_MAX_ROWS,
    Collected,
    SchedulerHarness,
    Setup,
    WithRoom,
    make_mtp_worker,
    make_runner,
)

MASK = 5
MAX_ROUNDING = 1e-5  # of other numbers of rows: a product may add its terms up in another order
MODES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"mtp_enabled": True, "mtp_k": 4, "temperature": 0.0},
    {"mtp_enabled": True, "mtp_k": 8, "mtp_strategy": ["conf_adapt", 0.4]},
    {"mtp_enabled": True, "mtp_k": 8, "mtp_verify": True, "temperature": 0.0},
    {"mtp_enabled": True, "mtp_k": 5, "mtp_verify": True, "temperature": 1.0, "sampling_seed": 3},
    {"mtp_enabled": True, "mtp_k": 8, "mtp_verify": True, "mtp_strategy": ["conf_adapt", 0.4]},
]


def outputs(model: Path, setup: Setup, packs_rows: bool) -> list[Collected]:
    runner = make_runner(model, setup, setup.context_len, MTP_MAX_ROWS)
    harness = SchedulerHarness(
        setup, make_mtp_worker(runner, MASK, WithRoom(), packs_rows=packs_rows)
    )
    chooser = random.Random(1)
    ids = []
    for mode in MODES * 2:
        prompt = [chooser.randrange(MASK) for _ in range(chooser.randint(1, 40))]
        is_lossless = mode.get("mtp_verify", not mode.get("mtp_enabled"))
        penalties = {"frequency_penalty": 0.3} if is_lossless and len(ids) >= len(MODES) else {}
        ids.append(
            harness.submit(
                prompt,
                logprobs=LogprobOptions(len(prompt) - 1),
                max_new_tokens=30,
                **(mode | penalties),
            )
        )
        harness.step()
    harness.run()
    return [harness.outputs[i] for i in ids]


@pytest.mark.long_matrix
@pytest.mark.parametrize("enable_overlap", [False, True])
@pytest.mark.parametrize("chunk", [3, 2048])
def test_tokens_steps_and_log_probabilities_are_those_of_padded_steps(
    small_model: Path, enable_overlap: bool, chunk: int
) -> None:
    setup = Setup(max_running_requests=8, enable_overlap=enable_overlap, chunked_prefill_size=chunk)
    padded, packed = (outputs(small_model, setup, packs) for packs in (False, True))
    for right, found in zip(padded, packed, strict=True):
        assert found.token_ids == right.token_ids
        assert found.step_lens == right.step_lens
        for ours, theirs in zip(found.output_logprobs, right.output_logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, rel=0.0, abs=MAX_ROUNDING)
