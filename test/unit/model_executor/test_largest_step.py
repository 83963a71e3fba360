"""Tests how many prompt tokens a step may feed: as many as a run at the start finds memory for."""

from __future__ import annotations

import random
import weakref

import pytest
import torch

from sglang.srt.model_executor.largest_step import largest_step, most_that_fits

CPU = torch.device("cpu")


class Device:
    """Has memory for steps of up to `room` rows."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tried: list[int] = []
        self.held: list[weakref.ref[torch.Tensor]] = []

    def run(self, rows: int) -> None:
        assert all(each() is None for each in self.held), "A step that failed holds its memory."
        activations = torch.zeros(rows)
        self.held.append(weakref.ref(activations))
        self.tried.append(rows)
        if rows > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("room", "tried"),
    [
        (8192, [8192]),
        (8191, [8192, 4096]),
        (1000, [8192, 4096, 2048, 1024, 512]),
        (256, [8192, 4096, 2048, 1024, 512, 256]),
    ],
)
def test_halves_are_tried_until_one_fits(room: int, tried: list[int]) -> None:
    device = Device(room)
    assert most_that_fits(device.run, 8192, 256, CPU) == tried[-1]
    assert device.tried == tried


def test_too_little_for_the_least_is_an_error() -> None:
    device = Device(255)
    with pytest.raises(torch.OutOfMemoryError):
        most_that_fits(device.run, 1000, 256, CPU)
    assert device.tried == [1000, 500, 256]


def test_a_wish_below_the_least_is_tried_alone() -> None:
    device = Device(100)
    assert most_that_fits(device.run, 100, 256, CPU) == 100
    device = Device(99)
    with pytest.raises(torch.OutOfMemoryError):
        most_that_fits(device.run, 100, 256, CPU)
    assert device.tried == [100]


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def run(rows: int) -> None:
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        most_that_fits(run, 8192, 256, CPU)


def test_the_largest_step_feeds_all_prompt_tokens_and_every_other_request() -> None:
    assert largest_step(8192, 1, 4, 10_000) == [8192, 1, 1, 1]
    assert largest_step(8192, 15, 4, 4096) == [4096, 4096, 15, 15]
    assert largest_step(8192, 1, 1, 10_000) == [8192]
    assert largest_step(8192, 1, 3, 1000) == [1000, 1000, 1000]


def test_no_step_that_can_be_planned_has_more_rows() -> None:
    chooser = random.Random(0)
    for _ in range(2000):
        row_width, decode_rows = chooser.randint(30, 300), chooser.randint(1, 15)
        max_requests, budget = chooser.randint(1, 8), chooser.randint(1, 900)
        largest = largest_step(budget, decode_rows, max_requests, row_width)
        assert len(largest) == max_requests
        assert max(largest) <= row_width
        prompts, rest = [], budget
        for _ in range(chooser.randint(1, max_requests)):
            prompts.append(min(rest, chooser.randint(1, row_width)))
            rest -= prompts[-1]
        planned = [rows for rows in prompts if rows]
        planned += [decode_rows] * (max_requests - len(planned))
        assert sum(planned) <= sum(largest)
