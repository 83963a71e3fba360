"""Raw weights of `/update_weights_from_tensor`: they go to a private file as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fake_server import MAX_WEIGHT_BYTES, RAW, Server
from serving_utils import make_model_dir
from sglang.srt.entrypoints import tensor_file
from sglang.srt.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model_path: Path) -> Server:
    return Server(str(model_path), load_tokenizer(model_path))


@pytest.fixture
def spool(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory that weights can go to."""
    monkeypatch.setattr(tensor_file, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(tensor_file, "WRITE_BYTES", 7)
    server.state.private_directory = tmp_path
    return tmp_path


async def chunks(count: int) -> AsyncIterator[bytes]:
    """A body of unknown length."""
    for index in range(count):
        yield bytes([index % 256]) * 5


def test_raw_weights_are_written_as_they_arrive(server: Server, spool: Path) -> None:
    content = chunks(MAX_WEIGHT_BYTES // 5)
    answer = server.request("POST", "/update_weights_from_tensor", content=content, headers=RAW)
    assert answer.status_code == 200, answer.text
    assert server.files[0].parent == spool
    expected = b"".join(bytes([i]) * 5 for i in range(MAX_WEIGHT_BYTES // 5))
    assert server.contents == [expected]
    assert not list(spool.iterdir())


def test_raw_weights_without_a_length_are_limited(server: Server, spool: Path) -> None:
    content = chunks(MAX_WEIGHT_BYTES // 5 + 1)
    answer = server.request("POST", "/update_weights_from_tensor", content=content, headers=RAW)
    assert answer.status_code == 413
    assert "--max-weight-bytes" in answer.json()["message"]
    assert not server.sent
    assert not list(spool.iterdir())


@pytest.mark.parametrize("status_code", [400, 500])
def test_file_of_a_failed_update_is_gone(server: Server, spool: Path, status_code: int) -> None:
    server.reply = {"success": False, "message": "No such name.", "status_code": status_code}
    answer = server.request("POST", "/update_weights_from_tensor", content=b"x", headers=RAW)
    assert answer.status_code == status_code
    assert len(server.files) == 1
    assert not list(spool.iterdir())


def test_weights_that_cannot_be_stored_are_a_503(server: Server, spool: Path) -> None:
    server.state.private_directory = spool / "missing"
    answer = server.request("POST", "/update_weights_from_tensor", content=b"x", headers=RAW)
    assert answer.status_code == 503
    assert "cannot be stored" in answer.json()["message"]
    assert str(spool) not in answer.text
    assert not server.sent


def test_client_that_leaves_in_the_middle_of_its_weights_leaves_no_file(
    server: Server, spool: Path
) -> None:
    seen: list[int] = []

    async def scenario() -> None:
        part = {"type": "http.request", "body": b"x" * 20, "more_body": True}
        messages = iter([part, part])

        async def receive() -> dict[str, Any]:
            seen.append(len(list(spool.iterdir())))
            return next(messages, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            assert message.get("status", 499) == 499

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/update_weights_from_tensor",
            "raw_path": b"/update_weights_from_tensor",
            "query_string": b"",
            "headers": [(b"content-type", b"application/octet-stream")],
        }
        await server.app(scope, receive, send)

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert seen == [1, 1, 1]
    assert not server.sent
    assert not list(spool.iterdir())


def test_starting_server_takes_no_raw_weights(server: Server, spool: Path) -> None:
    server.state.manager = None
    answer = server.request("POST", "/update_weights_from_tensor", content=b"x", headers=RAW)
    assert answer.status_code == 503
    assert not list(spool.iterdir())
