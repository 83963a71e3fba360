"""The pure parts of the benchmark of NGRAM, and its steps of one batch on a CPU."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from benchmark.measure.ngram_rounds import (
    KNOWN,
    NGRAM,
    NOVEL,
    PLAIN,
    REPEATS,
    Salted,
    host_row,
    parse,
    print_result,
    repeated,
    work_run,
    works_of,
)
from benchmark.paired import Paired


class FakeEngine:
    """Answers at once, with so many tokens of steps that verified two drafts each."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.salts: list[Any] = []

    async def async_generate(self, **given: Any) -> Any:
        self.salts.append(given.get("cache_salt"))
        await asyncio.sleep(0)
        info = {"spec_num_proposed_drafts": 20, "spec_verify_ct": 10, "finish_reason": None}
        return {"output_ids": [1] * self.num_tokens, "meta_info": info}

    async def async_abort_request(self, *, abort_all: bool) -> int:
        return 0


def test_a_prompt_that_repeats_code_has_it_several_times() -> None:
    assert repeated([0, *range(10, 19)]) == [0, *[10, 11] * 4]
    works = works_of([[0, *range(10, 19)]], num_new=7)
    assert works[REPEATS].params["temperature"] == works[KNOWN].params["temperature"] == 0
    assert works[NOVEL].params["temperature"] > 1


def test_each_request_of_a_salted_engine_has_a_salt_of_its_own() -> None:
    engine = FakeEngine(1)
    salted = Salted(cast(Any, engine))
    for _ in range(3):
        asyncio.run(salted.async_generate(input_ids=[1], sampling_params={}))
    assert engine.salts == ["0", "1", "2"]


def test_each_work_is_measured_at_each_load_with_both() -> None:
    works = works_of([[0, *range(10, 19)]] * 8, num_new=7)
    both = {kind: cast(Any, FakeEngine(count)) for kind, count in ((PLAIN, 2), (NGRAM, 6))}
    engines = {kind: dict.fromkeys(works, engine) for kind, engine in both.items()}
    run, name_of = work_run(works, engines)
    loads = [name_of(name, count) for name in works for count in (1, 4)]
    paired = Paired(run, loads, [(NGRAM, PLAIN)])
    for number in range(3):
        paired.round(number)
    rows = paired.rows()
    assert [row["load"] for row in rows] == [
        f"{work}, {load}" for work in (REPEATS, NOVEL, KNOWN) for load in (1, 4)
    ]
    assert all(len(row["ratios"]["ngram / plain"]["ratios"]) == 2 for row in rows)
    assert {count for row in rows for count in row["ways"][NGRAM]["verified_drafts"]} == {2.0}


def test_the_host_is_timed_with_drafts_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse(["--device", "cpu", "--host-batch", "2", "--host-steps", "3"])
    row = host_row(arguments)
    assert min(row["ngram_us"], row["plain_us"]) > 0
    assert row["added_us"] == pytest.approx(row["ngram_us"] - row["plain_us"], abs=0.2)
    for added_us, verdict in ((299.0, "ok   host"), (301.0, "MISS host")):
        print_result({"host": row | {"added_us": added_us}, "rows": []})
        assert f"{verdict}, batch 2" in capsys.readouterr().out
