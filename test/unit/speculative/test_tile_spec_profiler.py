"""Prices of steps are kept for the next start, and whatever else is in the cache does no harm."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kept_prices import CURVE, Start, contents, measured, runner_of, signed
from sglang.srt.shard import WHOLE
from sglang.srt.speculative.tile_spec import profiler
from sglang.srt.speculative.tile_spec.profiler import cliffs, folder_of
from sglang.srt.step.price_table import Curve, PriceTable
from utils import make_random_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "some model"
    make_random_llama(path, 0)
    return path


@pytest.fixture
def runners(model: Path) -> tuple[Any, Any]:
    return runner_of(model), runner_of(model, hidden_width=32)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_the_second_start_measures_nothing_and_has_the_same_prices(
    tmp_path: Path, runners: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (Start(tmp_path, *runners) for _ in range(2))
    assert (first.measured, second.measured) == (["target", "head"], [])
    assert (second.target, second.head) == (first.target, first.head)
    assert not warnings_of(caplog)
    assert len([*tmp_path.iterdir()]) == 2
    (tmp_path / "other").touch()  # servers of other users may read what is kept
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_prices_that_were_disturbed_are_measured_again(
    tmp_path: Path, runners: tuple[Any, Any]
) -> None:
    """A start that is disturbed has the prices of one that was not."""
    Start(tmp_path, *runners, slowness=1.25)
    starts = [Start(tmp_path, *runners, slowness=slowness) for slowness in (1.0, 1.0, 1.8)]
    assert [each.measured for each in starts] == [["target"], [], []]
    assert {each.target == contents(measured(runners[0])) for each in starts} == {True}


def test_cliffs_are_those_of_the_cheapest_graph_of_each_size(model: Path) -> None:
    keys = runner_of(model).graph_keys
    costs = {key: 10.0 * key.num_reqs + (5 if key.num_tokens > 24 else 1) for key in keys.all}
    eager = Curve((1, 96), (500.0, 30.0))
    prices = PriceTable(keys.find_shape, costs, eager, CURVE)
    least: dict[int, float] = {1: 500.0, 96: 30.0}
    for rows in {key.num_tokens for key in keys.all}:
        least[rows] = min(cost for key, cost in costs.items() if key.num_tokens == rows)
    sizes = sorted(least)
    expected = [a for a, b in pairwise(sizes) if least[b] > 1.15 * least[a]]
    assert cliffs(prices) == expected
    assert len(expected) > 1


def test_a_model_may_be_called_anything(tmp_path: Path, model: Path) -> None:
    for name in ("..", "a/b", "x" * 400, "_é\n", "."):
        target = runner_of(model)
        path = SimpleNamespace(name=name)
        config = SimpleNamespace(path=path, shard=WHOLE)
        target.config = SimpleNamespace(model=config, device="cpu")
        folder = folder_of(tmp_path, target)
        assert folder.parent == tmp_path
        folder.mkdir(exist_ok=True)
    assert folder_of(tmp_path, runner_of(model)).name == "some-model_cpu_tp1"


def ranks_of(rank: int, one_shot: object | None = None) -> Any:
    shard = SimpleNamespace(rank=rank)
    return SimpleNamespace(shard=shard, one_shot=one_shot, from_first=lambda data: data)


def test_of_several_ranks_the_first_one_keeps_prices(
    tmp_path: Path, runners: tuple[Any, Any]
) -> None:
    for rank, num_files in ((1, 0), (0, 2)):
        for runner in runners:
            runner.ranks = ranks_of(rank)
        assert Start(tmp_path, *runners).measured == ["target", "head"]
        assert len([*tmp_path.glob("*")]) == num_files


def test_the_newest_files_stay_and_what_is_no_price_does(
    tmp_path: Path, runners: tuple[Any, Any]
) -> None:
    names = [f"{number:016x}.json" for number in range(70)]
    for number, name in enumerate(names):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (1000 - number,) * 2)
    (tmp_path / "mine.json").write_text("{}")
    Start(tmp_path, *runners)
    left = {path.name for path in tmp_path.iterdir()}
    assert left > {"mine.json", *names[:62]}
    assert len(left) == 1 + 64
    assert Start(tmp_path, *runners).measured == []


CHANGES: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "triton", "ops": "triton"}
CHANGES |= {"poisons_graphs": False, "page_size": 16, "max_running_requests": 9, "num_threads": 3}
CHANGES |= {f"max_graph_{name}": 7 for name in ("rows", "width")} | {"max_prompt_rows": 70}
CHANGES |= {"row_width": 99, "max_decode_rows": 3, "may_rest": True, "has_both_orders": True}
VERSIONS = ("driver_version", "code_digest", "version_of")


def test_another_setting_model_code_way_of_sums_driver_or_kernel_has_prices_of_its_own(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `--model-impl`, `--tp-size` and SGLANG_NCCL_SUMS say. A head's depend on its target."""

    def start(
        impl: str = "own",
        ranks: object = None,
        other: str = "",
        of_head: dict[str, Any] | None = None,
        **changes: Any,
    ) -> list[str]:
        head = runner_of(model, 32, **(changes if of_head is None else of_head))
        target = runner_of(model, **changes)
        target.config = replace(target.config, model=replace(target.config.model, impl=impl))
        target.ranks = ranks
        with ExitStack() as known:
            for name in VERSIONS:
                value = "other" if name == other else "this one"
                known.enter_context(mock.patch(f"{profiler.__name__}.{name}", return_value=value))
            return Start(tmp_path, target, head).measured

    settings: list[dict[str, Any]] = [
        {},
        {"impl": "transformers"},
        *({"ranks": ranks_of(0, SimpleNamespace(room=room))} for room in ("lines", "blocks")),
    ]
    settings += [{"other": name} for name in VERSIONS]
    settings += [{key: value} for key, value in CHANGES.items()]
    both = [start(**each) for each in settings * 2]
    assert both == [["target", "head"]] * len(settings) + [[]] * len(settings)
    more_steps = {"draft_steps": {1: (), 2: (), 3: ()}}
    assert start(of_head=more_steps) == ["head"]
    assert start(row_width=98, of_head={}) == ["target", "head"]
    assert start(max_total_tokens=99, load_format="dummy") == [], "they change no time"
    assert not warnings_of(caplog), "files of other settings are no damaged ones"


def entry(path: list[Any], value: Any, is_signed: bool = True) -> Callable[[Path], None]:
    """Writes a value into the file, at a place of its JSON; signed as if it had been there."""

    def spoil(file: Path) -> None:
        whole = json.loads(file.read_text())
        place = whole
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        raw = json.dumps(whole).encode()
        file.write_bytes(signed(raw) if is_signed else raw)

    return spoil


def text(value: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(value)


def instead(make: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda file: [file.unlink(), make(file)].clear()


SPOILED: dict[str, Callable[[Path], object]] = {
    "empty": text(b""),
    "a flag": entry(["kv_ms"], True),
    "no text": text(bytes(range(256))),
    "deep": text(b"[" * 200_000),
    "huge": text(b" " * (5 << 20)),
    "foreign": entry(["measured_with", "model"], "another"),
    "beyond all numbers": lambda file: text(file.read_bytes().replace(b": 0.01", b": 1e999"))(file),
    "negative": entry(["spread"], -1),
    "another time": entry(["kv_ms"], 2e-6, is_signed=False),
    "free rows": entry(["eager"], {"sizes": [1], "costs_ms": [0.0]}),
    "no sizes": entry(["eager"], {"sizes": [], "costs_ms": []}),
    "sizes that fall": entry(["head"], {"sizes": [8, 4], "costs_ms": [1, 1]}),
    "a time below 0": entry(["head"], {"sizes": [8], "costs_ms": [-1]}),
    "a size without a time": entry(["head", "sizes"], [1, 2, 3, 4]),
    "graphs lack": entry(["graphs_ms"], []),
    "one graph twice": lambda file: entry(
        ["graphs_ms", 0], json.loads(file.read_text())["graphs_ms"][1]
    )(file),
    "more entries": entry(["more"], 1),
    "a pipe": instead(os.mkfifo),
    "a device": instead(lambda file: file.symlink_to("/dev/zero")),
}
SPOILED_HEADS: dict[str, Callable[[Path], object]] = {
    "passes lack": entry(["passes"], [[1, [{"sizes": [1], "costs_ms": [1.0]}, 0.0]]]),
    "the head's graphs lack": entry(["graphs_ms"], []),
}


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", [*SPOILED, *SPOILED_HEADS])
def test_a_spoiled_cache_is_measured_again_with_one_warning_and_replaced(
    tmp_path: Path, runners: tuple[Any, Any], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    first = Start(tmp_path, *runners)
    which = "target" if name in SPOILED else "head"
    files = {bool(json.loads(each.read_text())["passes"]): each for each in tmp_path.iterdir()}
    (SPOILED | SPOILED_HEADS)[name](files[which == "head"])
    second = Start(tmp_path, *runners)
    assert second.measured == [which]
    assert (second.target, second.head) == (first.target, first.head)
    [warning] = warnings_of(caplog)
    assert "\n" not in warning
    assert Start(tmp_path, *runners).measured == []


def test_a_file_that_cannot_be_read_is_measured_again_with_a_warning(
    tmp_path: Path, runners: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    Start(tmp_path, *runners)
    error = OSError(5, "Input/output error")
    with mock.patch("sglang.srt.plain_files.open_regular", side_effect=error):
        assert Start(tmp_path, *runners).measured == ["target", "head"]
    assert len(warnings_of(caplog)) == 2
    assert all("Input/output error; measured again" in each for each in warnings_of(caplog))


def test_a_changed_kernel_changes_the_digest_of_code_which_has_cuda_sources(tmp_path: Path) -> None:
    folders, digests = profiler.timed_folders(), []
    names = {path.name for folder in folders for path in folder.rglob("*")}
    assert {"model_runner.py", "llama.py"} <= names
    assert {"argmax_logprob.py", "argmax_logprob.cu", "argmax_logprob.cuh"} <= names
    for text in ("one", "two"):
        (tmp_path / "kernel.cu").write_text(text)
        profiler.code_digest.cache_clear()
        with mock.patch.object(profiler, "timed_folders", return_value=[tmp_path]):
            digests.append(profiler.code_digest())
    profiler.code_digest.cache_clear()
    assert digests[0] != digests[1]


NOT_KEPT: dict[str, Callable[[Path], Path]] = {
    "a part of a file": lambda cache: [cache.write_text(""), cache / "below"][1],
    "no path": lambda cache: cache / "\0",
    "a folder": lambda cache: cache,
    "full": lambda cache: cache,
    "read only": lambda cache: cache,
}
ERRORS = {
    "full": OSError(28, "No space left on device"),
    "read only": PermissionError(30, "Read-only file system"),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_where_nothing_can_be_kept_a_warning_says_so(
    tmp_path: Path, runners: tuple[Any, Any], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    cache = NOT_KEPT[name](tmp_path / "cache")
    if name == "a folder":
        Start(cache, *runners)
        for file in [*cache.iterdir()]:
            instead(Path.mkdir)(file)
    replace_file = mock.patch.object(
        profiler.os, "replace", side_effect=ERRORS.get(name, os.replace)
    )
    with replace_file:
        assert Start(cache, *runners).measured == ["target", "head"]
    assert not [*tmp_path.rglob(".*")], "A part of a file was left."
    assert len(warnings_of(caplog)) == 2
    assert all("so each start measures them" in each for each in warnings_of(caplog))
