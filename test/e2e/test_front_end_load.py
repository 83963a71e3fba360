"""The front end with real processes: busy servers, dead tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving_utils import (
    DUMMY,
    ENDLESS,
    RunningServer,
    in_background,
    make_model_dir,
    running_server,
    wait_for_running,
    wait_for_waiting,
    wait_until,
)
from sglang import Engine

pytestmark = pytest.mark.long_matrix

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


PREFERRED = ("--preferred-sampling-params", '{"min_new_tokens": 10, "n": 2}')


@pytest.fixture(scope="module")
def unusual_server(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, Path]]:
    """With preferred parameters, and a temporary directory too long for sockets."""
    directory = tmp_path_factory.mktemp("x" * 100)
    with running_server(model_dir, *DUMMY, *PREFERRED, TMPDIR=str(directory)) as server:
        yield server, directory
    assert not list(directory.glob("sglang-*"))


# ---------------------------------------------------------------- the server


def test_full_server_of_requests_that_do_not_stream_is_healthy(model_dir: Path) -> None:
    """One runs, one waits, and the next would be refused: probes too, yet tokens are made."""
    flags = ("--max-running-requests", "1", "--max-queued-requests", "1", "--skip-server-warmup")
    with running_server(model_dir, *DUMMY, *flags, SGLANG_STRICT_INVARIANTS="0") as server:
        body = {"text": "hello", "sampling_params": ENDLESS}
        calls = []
        for _ in range(2):
            calls.append(in_background(lambda: server.post("/generate", body)))
            wait_for_running(server, 1, *calls)
        wait_for_waiting(server, 1, *calls)
        assert server.generate().status_code == 503
        assert server.client.get("/health_generate").status_code == 200
        server.post("/abort_request", {"abort_all": True})
        for call in calls:
            assert call.result().status_code == 200


LARGEST = [".{2400}\x01", "[a-z]{90}\x01", "(?:a|b){600}\x01", "(?:(?:x?){9}){30}\x01"]


def test_server_lives_on_with_the_largest_stop_expressions_and_with_larger_ones(
    unusual_server: tuple[RunningServer, Path],
) -> None:
    server, _ = unusual_server
    for expression in (".{999999999}", ".{2000000}", "(?:(?:.{99}){99}){99}"):
        refused = server.generate(stop_regex=expression, min_new_tokens=0)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "sampling_params.stop_regex"
    params = {**ENDLESS, "n": 4, "min_new_tokens": 0, "stop_regex": LARGEST}
    body = {"text": "hello", "sampling_params": params}
    call = in_background(lambda: server.post("/generate", body))
    assert server.client.get("/health").status_code == 200
    wait_for_running(server, 4, call)
    assert server.client.get("/health_generate").status_code == 200
    assert not call.done()
    server.post("/abort_request", {"abort_all": True})
    assert call.result().status_code == 200


def test_preferred_parameters_do_not_break_warm_up_and_probes(
    unusual_server: tuple[RunningServer, Path],
) -> None:
    server, _ = unusual_server
    assert server.client.get("/health_generate").status_code == 200
    assert len(server.generate(max_new_tokens=12).json()) == 2


def test_server_starts_with_a_temporary_directory_too_long_for_sockets(
    unusual_server: tuple[RunningServer, Path],
) -> None:
    """The fixture looks at what is left in it."""
    server, directory = unusual_server
    assert len(str(directory)) > 108  # bytes of a socket's path
    assert server.generate(min_new_tokens=0).status_code == 200


# ---------------------------------------------------------------- the Engine


def test_engine_whose_receiving_ends_answers_everyone(model_dir: Path) -> None:
    with Engine(model_path=str(model_dir), load_format="dummy") as engine:
        check_that_everyone_is_answered(engine)


def check_that_everyone_is_answered(engine: Engine) -> None:
    call = in_background(lambda: engine.generate("hello", ENDLESS))
    wait_until(
        lambda: engine.get_server_info()["internal_states"][0]["running_batch_size"] == 1, call
    )

    def broken(message: Any) -> None:
        raise ValueError("broken")

    manager = engine._runtime.manager
    manager.handle = broken  # type: ignore[method-assign]
    engine._runtime.submit(_ping(manager))
    with pytest.raises(RuntimeError, match="receive"):
        call.result(20)
    with pytest.raises(RuntimeError, match="receive"):
        engine.generate("hello", GREEDY)


async def _ping(manager: Any) -> None:
    await manager.health_ping()
