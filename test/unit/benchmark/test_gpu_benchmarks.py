"""The pure parts of the benchmarks: loads and prompts."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from typing import Any

import pytest

from benchmark import held_out
from benchmark.command import in_turn
from benchmark.engine_load import (
    Budget,
    LoadResult,
    closed_loop,
    random_prompts,
    varied_lengths,
)
from benchmark.server_process import StartError, running_server
from sglang.bench_one_batch import OneBatch
from sglang.srt.model_config import DEMO_MODELS_DIR
from sglang.srt.server_args import ServerArgs
from training.corpus import is_held_out
from training.tokens import BOS_ID

NEW_TOKENS = 48


class FakeEngine:
    """A prompt [n, k] takes n turns and another for each step of k tokens; all run side by side."""

    def __init__(self) -> None:
        self.num_running = self.most_running = self.now = 0
        self._is_aborted = self.is_over = False
        self.prompt_turns: list[int] = []  # each turn of each prompt

    async def turn_around(self) -> None:
        """One turn for every request between two ticks of the clock."""
        while not self.is_over:
            self.now += 1
            await asyncio.sleep(0)

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any]
    ) -> dict[str, Any]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        num_before, per_step = input_ids
        turns, steps = 0, [per_step] * (sampling_params["max_new_tokens"] // per_step)
        while turns < num_before + len(steps) and not self._is_aborted:
            if turns < num_before:
                self.prompt_turns.append(self.now)
            await asyncio.sleep(0)
            turns += 1
        self.num_running -= 1
        done = steps[: max(0, turns - num_before)]
        reason = {"type": "length" if done == steps else "abort"}
        meta: dict[str, Any] = {"finish_reason": reason}
        if sampling_params.get("mtp_enabled"):
            meta["mtp_effective_k"] = done
        return {"output_ids": [7] * sum(done), "meta_info": meta}

    async def async_abort_request(self, *, abort_all: bool) -> int:
        assert abort_all
        self._is_aborted = True
        return self.num_running


def load_of(
    prompts: list[list[int]],
    num_clients: int,
    num_laps: int = 1,
    lengths: list[int] | None = None,
    **params: Any,
) -> tuple[LoadResult, FakeEngine]:
    async def run() -> tuple[LoadResult, FakeEngine]:
        engine = FakeEngine()
        clock = asyncio.create_task(engine.turn_around())
        asked = {"max_new_tokens": NEW_TOKENS, **params}
        laps, clock_of = (num_clients, num_laps), lambda: engine.now
        load = closed_loop(engine, prompts, asked, *laps, clock_of, lengths=lengths)
        result = await load
        engine.is_over = True
        await clock
        return result, engine

    return asyncio.run(run())


@pytest.mark.parametrize("num_prompts", [1, 4, 16, 128])
def test_varied_lengths_have_the_mean_and_are_the_same_each_time(num_prompts: int) -> None:
    lengths = varied_lengths(num_prompts, 128)
    assert sum(lengths) == 128 * num_prompts
    assert 96 <= min(lengths) <= max(lengths) <= 160
    assert len(set(lengths)) == min(num_prompts, 65)
    assert lengths == varied_lengths(num_prompts, 128)


def test_a_closed_loop_keeps_as_many_requests_running_as_it_has_clients() -> None:
    result, engine = load_of([[4, 1]] * 12, num_clients=3)
    assert engine.most_running == 3
    assert engine.num_running == 0
    assert result.num_tokens >= 12 * NEW_TOKENS


@pytest.mark.parametrize("num_laps", [1, 3])
@pytest.mark.parametrize("num_clients", [1, 2, 3, 12])
def test_requests_in_step_give_what_they_give_in_the_long_run(
    num_clients: int, num_laps: int
) -> None:
    """However many there are: n requests at once, each 12 turns of prompt and 48 of tokens, give
    48 n tokens in 60 turns."""
    result, _ = load_of([[12, 1]] * 12, num_clients, num_laps)
    assert result.tok_s == pytest.approx(num_clients * 48 / 60, rel=0.01)


@pytest.mark.parametrize(
    ("num_clients", "num_prompts", "num_laps"), [(4, 12, 2), (16, 48, 1), (64, 64, 1), (90, 90, 1)]
)
def test_requests_out_of_step_give_what_they_give_in_the_long_run(
    num_clients: int, num_prompts: int, num_laps: int
) -> None:
    """Texts differ in the steps that they take."""
    chooser = random.Random(num_clients)
    prompts = [[chooser.randint(1, 2), chooser.choice([1, 2, 3, 4])] for _ in range(num_prompts)]
    turns = [num_before + NEW_TOKENS / per_step for num_before, per_step in prompts]
    result, _ = load_of(prompts, num_clients, num_laps)
    right = num_clients * NEW_TOKENS / (sum(turns) / num_prompts)
    assert result.tok_s == pytest.approx(right, rel=0.05)


def test_requests_may_differ_in_length() -> None:
    lengths = [5, 20, 48, 11]
    result, _ = load_of([[1, 1]] * 4, num_clients=1, lengths=lengths)
    assert result.num_tokens == sum(lengths)


def test_a_client_alone_goes_through_all_prompts_once() -> None:
    prompts = [[1, 1], [30, 2], [9, 4]]
    result, _ = load_of(prompts, num_clients=1)
    assert result.num_tokens == 3 * NEW_TOKENS
    assert result.seconds == pytest.approx(1 + 30 + 9 + 48 + 24 + 12, abs=1)


def test_requests_that_take_equally_long_are_not_in_step() -> None:
    """Prompts are read all the time, a few at once."""
    _, engine = load_of([[6, 1]] * 18, num_clients=18)
    at_once = Counter(engine.prompt_turns)
    assert at_once[1] == 18, "all begin together"
    later = [at_once[turn] for turn in range(54, 2 * 54)]
    assert sum(later) == pytest.approx(18 * 6, rel=0.2)
    assert max(later) <= 5


def test_a_load_needs_a_prompt_per_client() -> None:
    with pytest.raises(ValueError, match="3 clients"):
        load_of([[4, 1]] * 2, num_clients=3)


def test_steps_are_those_that_the_answers_name_and_else_one_per_token() -> None:
    assert load_of([[8, 2]], num_clients=1)[0].tokens_per_step == 1.0
    assert load_of([[8, 2]], num_clients=1, mtp_enabled=True)[0].tokens_per_step == 2.0


def test_who_begins_takes_turns_round_by_round() -> None:
    assert [in_turn("abc", number) for number in range(3)] == [
        list("abc"),
        list("cba"),
        list("abc"),
    ]


def test_random_prompts_repeat_with_the_seed_and_hold_no_special_token() -> None:
    prompts = random_prompts(20, 30, 50, seed=3)
    assert prompts == random_prompts(20, 30, 50, seed=3) != random_prompts(20, 30, 50, seed=4)
    tokens = {token for prompt in prompts for token in prompt}
    assert (min(tokens), max(tokens)) == (3, 49)


def test_the_first_round_always_fits_and_later_ones_only_if_they_end_in_time() -> None:
    late = Budget(total_s=10.0, start_s=-1e9)
    assert late.has_room(0, 5, 0.0)
    assert not late.has_room(1, 5, 0.0)
    early = Budget(total_s=1e12, start_s=0.0)
    assert early.has_room(4, 5, 60.0)
    assert not early.has_room(5, 5, 60.0)
    assert not early.has_room(1, 5, 1e12)


def test_windows_begin_with_bos_and_lie_within_one_stream() -> None:
    streams = [list(range(100, 140)), [5] * 6, list(range(300, 400))]
    prompts = held_out.draw_windows(streams, 200, 8, seed=1)
    assert prompts == held_out.draw_windows(streams, 200, 8, seed=1)
    assert {prompt[0] for prompt in prompts} == {BOS_ID}
    assert all(prompt[1:] == list(range(prompt[1], prompt[1] + 7)) for prompt in prompts)
    share = sum(prompt[1] >= 300 for prompt in prompts) / len(prompts)
    assert 0.6 < share < 0.85  # 94 of 128 places
    with pytest.raises(ValueError, match="99"):
        held_out.draw_windows([[1, 2]], 1, 100, seed=1)


def test_prompts_come_from_packages_that_training_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Finds all packages; two of them are enough to draw prompts from."""
    found = held_out.find_held_out()
    names = {"stdlib/logging", "stdlib/importlib"}
    assert names <= {package.name for package in found}
    assert all(is_held_out(package.name) for package in found)
    monkeypatch.setattr(
        held_out, "find_held_out", lambda: [each for each in found if each.name in names]
    )
    (first, told), (other, other_told) = (
        held_out.held_out_prompts(DEMO_MODELS_DIR / "tiny-code", 2, 8, seed) for seed in (0, 1)
    )
    assert first != other
    assert told["packages"].keys() == names
    assert told["sha256"] != other_told["sha256"]


def test_a_timed_batch_runs_to_its_end() -> None:
    batch = OneBatch(ServerArgs(model_path="demo", device="cpu", context_length=64))
    assert batch.wall_s([[5, 6], [7]], 5) > 0.0
    assert [len(token_ids) for token_ids in batch.outputs.values()] == [5, 5]


def test_a_server_that_cannot_start_is_reported_with_its_last_lines() -> None:
    command = [sys.executable, "-c", "import sys; print('no such flag'); sys.exit(2)"]
    with (
        pytest.raises(StartError, match=r"ended with 2(.|\n)*no such flag"),
        running_server(command, {}, limit_s=30),
    ):
        pass
