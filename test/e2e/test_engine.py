"""The offline Engine: the same processes and messages as the server."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serving_utils import ENDLESS, environ, in_background, make_model_dir, stopped, wait_until
from sglang import Engine, SamplingParams, ServerArgs

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def make_engine(model_dir: Path, **kwargs: Any) -> Engine:
    return Engine(model_path=str(model_dir), load_format="dummy", **kwargs)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Engine]:
    with make_engine(model_dir) as engine:
        yield engine


def num_running(engine: Engine) -> int:
    return engine.get_server_info()["internal_states"][0]["running_batch_size"]


def wait_idle(engine: Engine) -> None:
    wait_until(lambda: num_running(engine) == 0, timeout_s=5)


def test_prompt_ids_and_batch_agree(engine: Engine) -> None:
    single = engine.generate("hello", GREEDY)
    assert len(single["output_ids"]) == 8
    tokens = engine.generate(["hello", "world"], SamplingParams(**GREEDY))
    assert tokens[0]["output_ids"] == single["output_ids"]
    by_ids = engine.generate(input_ids=[[0, 5], [0, 6]], sampling_params=[GREEDY, GREEDY])
    assert len(by_ids) == 2
    assert len(engine.generate("hello", {**GREEDY, "n": 3})) == 3


def test_list_of_sampling_params_objects_is_one_per_prompt(engine: Engine) -> None:
    params: list[Any] = [SamplingParams(**GREEDY), {**GREEDY, "max_new_tokens": 2}]
    answers = engine.generate(["hello", "world"], params)
    assert [len(answer["output_ids"]) for answer in answers] == [8, 2]
    dicts = [msgspec.to_builtins(SamplingParams(**GREEDY)), params[1]]
    expected = engine.generate(["hello", "world"], dicts)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    with pytest.raises(ValueError, match=r"sampling_params\[1\]"):
        engine.generate(["hello", "world"], [params[0], 5])  # type: ignore[list-item]


def test_stream_is_cumulative_and_ends_like_the_answer(engine: Engine) -> None:
    chunks = list(engine.generate("hello", GREEDY, stream=True))
    assert chunks[-1]["output_ids"] == engine.generate("hello", GREEDY)["output_ids"]
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(chunks))


def test_leaving_a_stream_aborts_it(engine: Engine) -> None:
    for _ in engine.generate("hello", ENDLESS, stream=True):
        break
    wait_idle(engine)


def test_async_calls_run_together_under_a_running_loop(engine: Engine) -> None:
    async def main() -> tuple[list[Any], list[Any], Any]:
        answers = await asyncio.gather(*(engine.async_generate("hello", GREEDY) for _ in range(4)))
        stream = await engine.async_generate("hello", GREEDY, stream=True)
        chunks = [chunk async for chunk in stream]
        blocking = engine.generate("hello", GREEDY)
        return answers, chunks, blocking

    answers, chunks, blocking = asyncio.run(main())
    ids = {tuple(item["output_ids"]) for item in (*answers, chunks[-1], blocking)}
    assert len(ids) == 1


def test_cancelled_async_call_aborts(engine: Engine) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.async_generate("hello", ENDLESS), 0.3)

    asyncio.run(main())
    wait_idle(engine)


def test_abort_by_rid_gives_the_partial_output(engine: Engine) -> None:
    call = in_background(lambda: engine.generate("hello", ENDLESS, rid="mine"))
    wait_until(lambda: engine.abort_request(rid="mine") == 1, call)
    assert call.result()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({}, "text"),
        ({"prompt": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"prompt": "a", "sampling_params": {"foo": 1}}, "foo"),
        ({"input_ids": [10**9]}, r"input_ids\[0\]"),
        ({"prompt": "a", "sampling_params": {"max_new_tokens": 10**6}}, "max_new_tokens"),
        ({"prompt": "a", "rid": 5}, "rid"),
    ],
)
def test_bad_input_is_a_value_error_that_names_the_field(
    engine: Engine, kwargs: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        engine.generate(**kwargs)
    assert engine.generate("hello", GREEDY)["output_ids"]


def test_flush_and_server_info(engine: Engine) -> None:
    engine.generate("hello world the quick brown fox", GREEDY)
    reply = engine.flush_cache()
    assert reply.success
    assert reply.flushed_items > 0
    info = engine.get_server_info()
    assert info["internal_states"][0]["tree_cache_size"] == 0
    assert info["max_req_len"] > 0


@pytest.mark.long_matrix
def test_two_engines_live_side_by_side_and_one_death_is_its_own(
    engine: Engine, model_dir: Path
) -> None:
    other = Engine(ServerArgs(model_path=str(model_dir), load_format="dummy", log_level="error"))
    with other:
        assert other.generate("hello", GREEDY)["output_ids"]
        call = in_background(lambda: other.generate("hello", ENDLESS))
        wait_until(lambda: num_running(other) == 1, call)
        os.kill(other._runtime._tree.pids["scheduler"], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="scheduler"):
            call.result(20)
        with pytest.raises(RuntimeError, match="scheduler"):
            other.generate("hello", GREEDY)
    assert engine.generate("hello", GREEDY)["output_ids"]
    with pytest.raises(RuntimeError, match="shut down"):
        other.generate("hello", GREEDY)
    other.shutdown()


def test_a_stopped_process_is_named_until_it_goes_on(engine: Engine) -> None:
    right = engine.generate("hello", GREEDY)
    for role, pid in engine._runtime._tree.pids.items():
        with stopped(pid), pytest.raises(RuntimeError, match=f"The {role} process is stopped"):
            engine.generate("hello", GREEDY)
    with stopped(engine._runtime._tree.pids["scheduler"]):
        with pytest.raises(RuntimeError, match="The scheduler process is stopped"):
            engine.pause_generation()
        begun = in_background(lambda: list(engine.generate("hello", GREEDY, stream=True)))
        with pytest.raises(RuntimeError, match="The scheduler process is stopped"):
            begun.result(5)
    assert engine.generate("hello", GREEDY)["text"] == right["text"]


def test_missing_model_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--model-path"):
        Engine(model_path=str(tmp_path / "nothing"))


SCRIPT = """
import sys
from sglang import Engine
engine = Engine(model_path=sys.argv[1], load_format="dummy")
stream = engine.generate("hello", {"max_new_tokens": 15000, "ignore_eos": True}, stream=True)
print(len(next(stream)["output_ids"]))
"""


@pytest.mark.long_matrix
def test_script_without_main_guard_or_shutdown_ends_by_itself(
    model_dir: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, str(script), str(model_dir)],
        env=environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert int(result.stdout) >= 1
