"""Two servers behind the router of the package sglang-router, started by one command."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from serving_utils import (
    DUMMY,
    READY_LIMIT_S,
    environ,
    events,
    free_port,
    make_model_dir,
    server_command,
    stream_body,
)

pytest.importorskip("sglang_router", reason="the package sglang-router is not installed")
pytestmark = pytest.mark.long_matrix

KEYS = ("--api-key", "client", "--admin-api-key", "operator")
CLIENT = {"Authorization": "Bearer client"}
OPERATOR = {"Authorization": "Bearer operator"}
ENDS_S = 20.0


@dataclass(frozen=True)
class Launched:
    """A launcher that has said that all is ready.

    Attributes:
        client: of the router.
        family: all processes, the launcher's own among them.
    """

    process: subprocess.Popen[str]
    client: httpx.Client
    server_urls: list[str]
    family: list[psutil.Process]

    def end(self) -> tuple[int, str]:
        """Waits for the end of all processes; returns the launcher's exit code and last lines."""
        said = self.process.communicate(timeout=ENDS_S)[1]
        _, alive = psutil.wait_procs(self.family, timeout=ENDS_S)
        assert not alive
        return self.process.returncode, said


@contextmanager
def launched(model: Path, folder: Path, *flags: str) -> Iterator[Launched]:
    port = free_port()
    process = subprocess.Popen(
        server_command(model, port, *DUMMY, "--dp-size", "2", *flags),
        env=environ(TMPDIR=str(folder)),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "Ready: 2 servers" in line:
                break
        else:
            raise AssertionError("".join(lines))
        urls = re.findall(r"http://127\.0\.0\.1:\d+", lines[-1])
        assert urls[0] == f"http://127.0.0.1:{port}"
        whole = psutil.Process(process.pid)
        with httpx.Client(base_url=urls[0], timeout=READY_LIMIT_S, headers=CLIENT) as client:
            yield Launched(process, client, urls[1:], [whole, *whole.children(recursive=True)])
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=ENDS_S)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path / "model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t").mkdir()
    return tmp_path / "t"


def num_requests(url: str) -> int:
    """Counts the requests that a server has finished."""
    text = httpx.get(f"{url}/metrics", headers=CLIENT).text
    found = re.search(r"^sglang:num_requests_total\S* (\d+)", text, re.M)
    return int(found[1]) if found else 0


def test_requests_reach_both_servers_and_an_interrupt_leaves_nothing(
    model: Path, folder: Path
) -> None:
    flags = ("--router-policy", "round_robin", "--shutdown-timeout-s", "0.5", *KEYS)
    with launched(model, folder, *flags) as launcher:
        for process in launcher.family[1:]:
            assert not {"client", "operator"} & {*process.cmdline()}
        client = launcher.client
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        before = [num_requests(url) for url in launcher.server_urls]
        for _ in range(4):
            answer = client.post("/generate", json=body)
            assert len(answer.json().get("output_ids", ())) == 3, (answer.status_code, answer.text)
        after = [num_requests(url) for url in launcher.server_urls]
        assert [b - a for a, b in zip(before, after, strict=True)] == [2, 2]

        strangers = {"Authorization": "Bearer other"}
        assert client.post("/generate", json=body, headers=strangers).status_code == 401
        assert client.get("/workers").status_code == 401
        assert client.get("/workers", headers=OPERATOR).json()["total"] == 2
        with client.stream("POST", "/generate", json=stream_body()) as response:
            chunks = events(response.iter_lines())
            next(chunks)
            launcher.process.send_signal(signal.SIGINT)
            *_, last, done = chunks
        assert (last["meta_info"]["finish_reason"]["type"], done) == ("abort", "[DONE]")
        assert launcher.end()[0] == 0
        assert not list(folder.glob("sglang-*"))


def test_a_launcher_that_is_killed_takes_all_with_it(model: Path, folder: Path) -> None:
    with launched(model, folder) as launcher:
        launcher.process.kill()
        assert launcher.end()[0] == -signal.SIGKILL
