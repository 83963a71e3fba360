"""Milliseconds of a round of EAGLE by batch size, and tokens per second of a full load.

Random weights: a head of one layer that shares the target's output head drafts NUM_STEPS tokens in
a chain. How many are accepted is pinned by SGLANG_SIMULATE_ACC_LEN, since random weights agree in
nothing. A round is (wall(256 new tokens) - wall(1 new token)) / rounds.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from unittest import mock

import sglang
from benchmark.engine_load import batch_wall_s, random_prompts
from benchmark.random_model import GEOMETRIES, dummy_flags, random_head, random_model

INPUT_LEN, OUTPUT_LEN = 128, 256
NUM_STEPS = 3
ACCEPT_LEN = 3.0  # tokens of a round on average, the model's own one counted
LOAD = (512, 512, 128)  # prompts, tokens in, tokens out
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
WallTime = Callable[[int, int, int], float]  # seconds of requests, tokens in, tokens out


def _round_ms(wall_s: WallTime, num_rounds: int, size: int, repeats: int) -> list[float]:
    """Measures a round of a batch of `size` requests, `repeats` times."""
    wall_s(size, INPUT_LEN, 8)  # warms up
    found = []
    for _ in range(repeats):
        decoding_s = wall_s(size, INPUT_LEN, OUTPUT_LEN) - wall_s(size, INPUT_LEN, 1)
        found.append(decoding_s / num_rounds * 1e3)
    return found


def measure(
    geometry: str, sizes: Sequence[int], repeats: int, has_load: bool
) -> tuple[dict[int, list[float]], list[float]]:
    """Starts an Engine and measures it.

    Returns:
        Milliseconds of a round by batch size, and tokens per second of LOAD, if it is asked for.
    """
    with (
        mock.patch.dict(os.environ, {SIMULATED: str(ACCEPT_LEN)}),
        random_model(geometry) as folder,
        random_head(folder) as head,
        sglang.Engine(
            **dummy_flags(folder),
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=head,
            speculative_num_steps=NUM_STEPS,
        ) as engine,
    ):
        seeds, vocab_size = itertools.count(), GEOMETRIES[geometry].vocab_size

        def wall_s(count: int, input_len: int, num_new: int) -> float:
            prompts = random_prompts(count, input_len, vocab_size, next(seeds))
            return batch_wall_s(engine, prompts, num_new)

        prompts = random_prompts(1, INPUT_LEN, vocab_size, next(seeds))
        params = {"temperature": 0, "max_new_tokens": OUTPUT_LEN, "ignore_eos": True}
        [answer] = engine.generate(input_ids=prompts, sampling_params=params)
        num_rounds = int(answer["meta_info"]["spec_verify_ct"])
        found = {}
        for size in sizes:
            found[size] = _round_ms(wall_s, num_rounds, size, repeats)
            print(f"EAGLE, {size} at once: {found[size][0]:.2f} ms/round", flush=True)
        count, input_len, num_new = LOAD
        load = [count * num_new / wall_s(count, input_len, num_new)] if has_load else []
        return found, load
