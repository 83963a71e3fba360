"""What a model runner does before the first step."""

from __future__ import annotations

import pytest

from sglang.srt.model_config import resolve_model_path
from sglang.srt.worker_factory import make_worker
from utils import SchedulerHarness, Setup, make_runner


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_warm_up_leaves_no_trace(page_size: int) -> None:
    setup = Setup(num_pages=640 // page_size, page_size=page_size)
    outputs = []
    for warms_up in (False, True):
        runner = make_runner(resolve_model_path("demo"), setup)
        if warms_up:
            runner.warm_up()
        harness = SchedulerHarness(setup, make_worker(runner, None))
        prompts = [[5, 6, 7], [8], list(range(5, 80))]
        outputs.append(harness.generate(prompts, max_new_tokens=12, temperature=0.0))
    assert outputs[0] == outputs[1]
