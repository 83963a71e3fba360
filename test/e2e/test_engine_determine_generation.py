"""Interrupted generation gives the tokens of uninterrupted generation: the four cases of the
founding document, and the same for a pause in place."""

from __future__ import annotations

from typing import Any

import pytest

from pause_target import KINDS, Requests, Target, baseline

NUM_NEW = 48


def interrupted(target: Target, kind: str, num_requests: int, mode: str) -> list[dict[str, Any]]:
    requests = Requests(target, kind, num_requests, NUM_NEW, return_logprob=True)
    requests.wait_until_running()
    target.pause(mode=mode)
    target.resume()
    return requests.results()


def check_same(target: Target, kind: str, num_requests: int, mode: str) -> None:
    right = baseline(target, kind, num_requests, NUM_NEW)
    for result, other in zip(interrupted(target, kind, num_requests, mode), right, strict=True):
        assert result["output_ids"] == other["output_ids"]
        assert result["text"] == other["text"]


def check_abort(target: Target, kind: str, num_requests: int) -> None:
    right = baseline(target, kind, num_requests, NUM_NEW)
    partial = interrupted(target, kind, num_requests, "abort")
    again = baseline(target, kind, num_requests, NUM_NEW)
    num_aborted = 0
    for part, whole, second in zip(partial, right, again, strict=True):
        assert whole["output_ids"][: len(part["output_ids"])] == part["output_ids"]
        assert whole["text"].startswith(part["text"])
        assert len(part["meta_info"]["output_token_logprobs"]) == len(part["output_ids"])
        assert second["output_ids"] == whole["output_ids"]
        num_aborted += part["meta_info"]["finish_reason"]["type"] == "abort"
    assert num_aborted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_1_single_request_retract_vs_no_pause(target: Target, kind: str) -> None:
    check_same(target, kind, 1, "retract")


@pytest.mark.parametrize("kind", KINDS)
def test_2_single_request_abort_vs_no_pause(target: Target, kind: str) -> None:
    check_abort(target, kind, 1)


def test_3_multiple_requests_retract_vs_no_pause(target: Target) -> None:
    check_same(target, "mixed", 8, "retract")


def test_4_multiple_requests_abort_vs_no_pause(target: Target) -> None:
    check_abort(target, "mixed", 8)


def test_5_multiple_requests_in_place_vs_no_pause(target: Target) -> None:
    check_same(target, "mixed", 8, "in_place")
