"""Requests get a file for their hidden states, and clients its path; then it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_backend import FULL, LENGTH, LIMITS, Backend, answer_of, run
from serving_utils import make_model_dir
from sglang.srt.frontend.errors import RequestError, ServiceError
from sglang.srt.frontend.hidden_files import PREFIX, HiddenFiles
from sglang.srt.messages.requests import FinishReason
from sglang.srt.tokenizer import Tokenizer, load_tokenizer

LAYERS, ROW_BYTES, MOST = [1, 2, 4], 100, 5000
ABORTED = FinishReason(type="abort", message="Aborted.")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("model")))


def test_a_start_removes_what_killed_servers_left_and_nothing_of_running_ones(
    tmp_path: Path,
) -> None:
    running = HiddenFiles(tmp_path, MOST, LAYERS, ROW_BYTES)
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / "7.safetensors").touch()
    other = tmp_path / "other"
    other.mkdir()
    link = tmp_path / f"{PREFIX}link"
    link.symlink_to(other)
    second = HiddenFiles(tmp_path, MOST, LAYERS, ROW_BYTES)
    assert {*tmp_path.iterdir()} == {running.folder, second.folder, other, link}
    second.close()
    second.close()
    assert running.folder.exists()
    running.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[HiddenFiles]:
    made = HiddenFiles(tmp_path, MOST, LAYERS, ROW_BYTES)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def asks(*prompts: list[int], count: int = 6, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": list(prompts) if len(prompts) > 1 else prompts[0],
        "return_hidden_states": "file",
        "sampling_params": {"max_new_tokens": count},
        **more,
    }


def with_files(backend: Backend, files: HiddenFiles) -> None:
    backend.manager.limits = replace(LIMITS, allow_hidden_files=True)
    backend.manager._hidden_files = files


def written(backend: Backend, index: int, size: int = 10) -> Path:
    """The file of a request, as the scheduler leaves it."""
    options = backend.requests[index].hidden_file
    assert options is not None
    assert options.layers == LAYERS
    path = Path(options.path)
    assert path.stat().st_mode & 0o777 == 0o600  # made before the request is sent
    path.write_bytes(bytes(size))
    return path


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_end_of_an_answer_names_the_file(
    tokenizer: Tokenizer, files: HiddenFiles, stream: bool
) -> None:
    async def scenario(backend: Backend) -> None:
        with_files(backend, files)
        answers = backend.manager.generate_request(asks([1, 2], stream=stream))
        first = asyncio.create_task(anext(answers))
        await backend.wait_sent(1)
        req_id = backend.requests[0].req_id
        assert backend.requests[0].hidden_states == "all"
        backend.put(req_id, "x", (1,))
        if stream:
            assert "hidden_states_file" not in (await first)["meta_info"]
            first = asyncio.create_task(anext(answers))
        path = written(backend, 0)
        backend.put(req_id, "y", (2,), LENGTH)
        meta = (await first)["meta_info"]
        assert meta["hidden_states_file"] == str(path)
        assert "hidden_states" not in meta
        await answers.aclose()
        assert path.exists()
        assert path.parent == files.folder
        assert files.folder.stat().st_mode & 0o777 == 0o700

    run(tokenizer, scenario)


def test_files_of_aborted_requests_are_removed(tokenizer: Tokenizer, files: HiddenFiles) -> None:
    async def scenario(backend: Backend) -> None:
        with_files(backend, files)
        call = asyncio.create_task(answer_of(backend, **asks([1], [2])))
        await backend.wait_sent(2)
        paths = [written(backend, index) for index in range(2)]
        backend.put(backend.requests[0].req_id, "x", (1,), LENGTH)
        backend.put(backend.requests[1].req_id, "x", (1,), ABORTED)
        kept, aborted = await call
        assert kept["meta_info"]["hidden_states_file"] == str(paths[0])
        assert "hidden_states_file" not in aborted["meta_info"]
        assert [path.exists() for path in paths] == [True, False]

    run(tokenizer, scenario)


def test_files_that_no_client_is_told_of_are_removed(
    tokenizer: Tokenizer, files: HiddenFiles
) -> None:
    """Covers a client that has left while its requests ran, and a batch that failed."""

    async def scenario(backend: Backend) -> None:
        with_files(backend, files)
        call = asyncio.create_task(answer_of(backend, **asks([1], [2])))
        await backend.wait_sent(2)
        done, running = (written(backend, index) for index in range(2))
        backend.put(backend.requests[0].req_id, "x", (1,), LENGTH)
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not done.exists()
        assert running.exists()  # the scheduler may still write it
        backend.put(backend.requests[1].req_id, "x", (1,), LENGTH)  # ended before it was aborted
        failing = asyncio.create_task(answer_of(backend, **asks([1], [2])))
        while len(backend.requests) < 4:
            await asyncio.sleep(0)
        assert not running.exists()
        path = written(backend, 2)
        backend.put(backend.requests[2].req_id, "x", (1,), LENGTH)
        backend.put(backend.requests[3].req_id, reason=FULL)
        with pytest.raises(ServiceError, match="queue is full"):
            await failing
        assert not path.exists()

    run(tokenizer, scenario)


def test_bytes_are_limited(tokenizer: Tokenizer, files: HiddenFiles) -> None:
    """Those that running requests may need count, then those of their files until they are
    removed."""

    async def scenario(backend: Backend) -> None:
        with_files(backend, files)
        with pytest.raises(RequestError, match=r"5200 bytes.*--max-hidden.*lower max_new_tokens"):
            await answer_of(backend, **asks([1], [2], count=25))
        call = asyncio.create_task(answer_of(backend, **asks([1] * 10, count=30)))  # 4,000 bytes
        await backend.wait_sent(1)
        with pytest.raises(ServiceError, match="remove those that you have read") as full:
            await answer_of(backend, **asks([1] * 5))
        assert full.value.status_code == 503
        path = written(backend, 0, 4500)
        backend.put(backend.requests[0].req_id, "x", (1,), LENGTH)
        await call
        with pytest.raises(ServiceError, match="remove those that you have read"):
            await answer_of(backend, **asks([1]))
        path.unlink()
        async with aclosing(backend.manager.generate_request(asks([1]))) as answers:
            waiting = asyncio.create_task(anext(answers))
            await backend.wait_sent(2)
            backend.put(backend.requests[1].req_id, "x", (1,), ABORTED)
            await waiting

    run(tokenizer, scenario)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [("file", "start the server with --hidden-states-folder"), ("files", '"last" or "file"')],
)
def test_other_wishes_are_refused(tokenizer: Tokenizer, value: str, remedy: str) -> None:
    async def scenario(backend: Backend) -> None:
        with pytest.raises(RequestError, match=remedy) as error:
            await answer_of(backend, input_ids=[1], return_hidden_states=value)
        assert error.value.status_code == 400

    run(tokenizer, scenario)
