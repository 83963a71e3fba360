"""Tests how a server ends: a signal, a dead child, its own death, a start that cannot succeed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from serving_utils import (
    DUMMY,
    ENDLESS,
    MASK,
    RunningServer,
    environ,
    events,
    free_port,
    in_background,
    make_model_dir,
    running_server,
    server_command,
    stream_body,
    wait_for_running,
    wait_for_waiting,
    wait_until,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def gone(pids: list[int], timeout_s: float = 10.0) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return not alive


@pytest.mark.long_matrix
@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_death_of_a_child_ends_the_server_with_an_error(
    model_dir: Path, victim: str, tmp_path: Path
) -> None:
    """Whoever streams, waits for an answer, for a place or for a pause is told."""
    flags = ("--skip-server-warmup", "--max-running-requests", "2")
    body = {"text": "a", "sampling_params": ENDLESS}
    with running_server(model_dir, *DUMMY, *flags, TMPDIR=str(tmp_path)) as server:
        children = server.children()
        answers = [in_background(lambda: server.post("/generate", body))]
        with server.client.stream("POST", "/generate", json=stream_body()) as response:
            chunks = events(response.iter_lines())
            next(chunks)
            wait_for_running(server, 2, *answers)
            answers.append(in_background(lambda: server.post("/generate", body)))
            wait_for_waiting(server, 1, *answers)
            pause = {"mode": "drain"}
            answers.append(in_background(lambda: server.post("/pause_generation", pause)))
            wait_until(lambda: server.client.get("/ready").status_code == 503, *answers)
            os.kill(children[victim], signal.SIGKILL)
            *_, error, done = chunks
        assert victim in error["error"]["message"]
        assert done == "[DONE]"
        for answer in answers:
            assert answer.result().status_code == 503
            assert victim in answer.result().json()["message"]
        assert server.exit_code(10) == 1
        assert gone(list(children.values()))
        assert not list(tmp_path.glob("sglang-*"))


@pytest.mark.long_matrix
def test_sigterm_finishes_what_runs_and_exits_0(model_dir: Path) -> None:
    """After the first signal a short request finishes and new ones get 503; the second aborts."""
    flags = ("--shutdown-timeout-s", "60", "--skip-server-warmup")
    with running_server(model_dir, *DUMMY, *flags, SGLANG_STRICT_INVARIANTS="0") as server:
        children = list(server.children().values())
        short_body = stream_body(max_new_tokens=500)
        with (
            server.client.stream("POST", "/generate", json=stream_body()) as response,
            server.client.stream("POST", "/generate", json=short_body) as short_response,
        ):
            chunks, short = events(response.iter_lines()), events(short_response.iter_lines())
            next(chunks)
            next(short)
            server.process.send_signal(signal.SIGTERM)
            while server.client.get("/ready").status_code == 200:
                time.sleep(0.02)
            assert server.client.get("/health").status_code == 503
            refused = server.generate()
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            *_, last, done = short
            assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 500}
            assert done == "[DONE]"
            server.process.send_signal(signal.SIGTERM)
            *_, last, done = chunks
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert done == "[DONE]"
        assert server.exit_code() == 0
        assert gone(children)


@pytest.mark.long_matrix
def test_sigterm_of_a_paused_server_does_not_wait_for_what_is_frozen(model_dir: Path) -> None:
    """A frozen request ends with its partial output, a control call that still waits with 503."""
    flags = ("--shutdown-timeout-s", "60", "--skip-server-warmup")
    nobody = {"master_address": "127.0.0.1", "master_port": str(free_port()), "timeout_s": 60}
    group = {**nobody, "rank_offset": 1, "world_size": 2}
    with running_server(model_dir, *DUMMY, *flags, SGLANG_STRICT_INVARIANTS="0") as server:
        with server.client.stream("POST", "/generate", json=stream_body()) as response:
            chunks = events(response.iter_lines())
            next(chunks)
            assert server.post("/pause_generation", {"mode": "in_place"}).json()["running"] == 1
            joining = in_background(lambda: server.post("/init_weights_update_group", group))
            time.sleep(0.5)
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            *_, last, done = chunks
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert done == "[DONE]"
        answer = joining.result()
        assert (answer.status_code, answer.json()["success"]) == (503, False)
        assert "shutting down" in answer.json()["message"]
        assert server.exit_code() == 0
        assert time.monotonic() - begin < 20


@pytest.mark.long_matrix
def test_end_of_text_ids_that_the_model_lacks_are_named_once_and_end_nothing(
    tmp_path: Path,
) -> None:
    """The tokenizer's own, of another folder, does."""
    model, tokenizer = make_model_dir(tmp_path / "model"), make_model_dir(tmp_path / "tokenizer")
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [99_999, -1], "top_k": 1})
    )
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": MASK}))
    flags = ("--tokenizer-path", str(tokenizer), "--skip-server-warmup")
    with running_server(model, *DUMMY, *flags) as server:
        for ignore_eos in (False, True):
            answer = server.generate(min_new_tokens=1, ignore_eos=ignore_eos)
            assert answer.status_code == 200
        ended = server.generate(min_new_tokens=3, ignore_eos=False, logit_bias={"2": 1000}).json()
        assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
        assert len(ended["output_ids"]) == 4
        # generation_config.json says top_k 1.
        bodies = [{"prompt": "hello", **more} for more in ({}, {}, {"temperature": 0})]
        texts = [server.post("/v1/completions", body).json()["choices"] for body in bodies]
        assert texts[0] == texts[1] == texts[2]
        server.process.terminate()
        errors = server.process.communicate(timeout=15)[1]
    assert errors.count("eos_token_id: ignoring [99999, -1] in") == 1
    assert errors.count("top_k 1 of generation_config.json") == 1


@pytest.fixture(scope="module")
def chat_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text("{{ messages[0].content }}")
    return path


def chat(server: RunningServer) -> int:
    """Has a chat, for which a process renders; returns that one's id."""
    before = {child.pid for child in psutil.Process(server.process.pid).children()}
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert server.post("/v1/chat/completions", body).status_code == 200
    children = psutil.Process(server.process.pid).children()
    (renderer,) = [child for child in children if child.pid not in before]
    assert "render_process" in " ".join(renderer.cmdline())
    return renderer.pid


def test_killed_server_leaves_no_children_and_no_sockets(
    model_dir: Path, chat_template: Path, tmp_path: Path
) -> None:
    flags = ("--skip-server-warmup", "--chat-template", str(chat_template))
    with running_server(model_dir, *DUMMY, *flags, TMPDIR=str(tmp_path)) as server:
        assert list(tmp_path.glob("sglang-*"))
        children = [*server.children().values(), chat(server)]
        assert len(children) == 3
        server.process.kill()
        assert gone(children)
        assert not list(tmp_path.glob("sglang-*"))


@pytest.mark.long_matrix
def test_keys_guard_a_real_server_and_are_told_to_nobody(
    model_dir: Path, chat_template: Path
) -> None:
    """Not in answers, not in the log, not in what the process list shows of the children, that
    renders chats too; the latter ends with SIGTERM."""
    keys = {"--api-key": "user-Kkey", "--admin-api-key": "admin-Kkey"}
    flags = [word for pair in keys.items() for word in pair]
    flags += ["--skip-server-warmup", "--chat-template", str(chat_template)]
    with running_server(model_dir, *DUMMY, *flags, SGLANG_STRICT_INVARIANTS="0") as server:
        client, user, admin = server.client, *(f"Bearer {key}" for key in keys.values())

        def status(path: str, **headers: str) -> int:
            return client.get(path, headers=headers).status_code

        assert (status("/health"), status("/ping")) == (200, 401)
        assert status("/flush_cache", authorization=user) == 401
        assert status("/flush_cache", authorization=admin) == 200
        page = {"accept-language": "en", "sec-fetch-site": "cross-site"}
        assert status("/flush_cache", authorization=admin, **page) == 403
        client.headers["authorization"] = user
        with client.stream("POST", "/generate", json=stream_body(max_new_tokens=3)) as response:
            assert len(list(events(response.iter_lines()))) >= 2
        texts = [client.get("/server_info").text]
        children = [*server.children().values(), chat(server)]
        for pid in children:
            child = psutil.Process(pid)
            texts += [str(child.cmdline()), str(child.environ())]
        server.process.send_signal(signal.SIGTERM)
        texts.append(server.process.communicate(timeout=20)[1])
        assert gone(children)
    assert "Start-up summary" in texts[-1]
    assert not [text for text in texts if "Kkey" in text]


@pytest.mark.long_matrix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_the_start_exits_0(model_dir: Path, number: int) -> None:
    process = subprocess.Popen(
        server_command(model_dir, free_port(), *DUMMY),
        env=environ(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        while "starting the scheduler" not in process.stderr.readline():
            pass
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert errors.endswith("Stopped before the server was ready.\n")


@pytest.mark.long_matrix
def test_sigterm_before_the_flags_are_checked_exits_0(model_dir: Path) -> None:
    command = server_command(model_dir, free_port(), *DUMMY)
    process = subprocess.Popen(command, env=environ(), stderr=subprocess.PIPE, text=True)
    try:
        while not (children := psutil.Process(process.pid).children()):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    assert not psutil.wait_procs(children, timeout=10)[1]


def run_to_end(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environ(), capture_output=True, text=True, timeout=60, check=False
    )


def check_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 1
    (line,) = [text for text in result.stderr.splitlines() if "error" in text]
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in line


@pytest.mark.long_matrix
def test_taken_port_is_one_clear_line(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check_one_line(run_to_end(server_command(model_dir, port, *DUMMY)), str(port), "--port")


@pytest.mark.long_matrix
def test_broken_model_directory_is_one_clear_line(tmp_path: Path) -> None:
    broken = make_model_dir(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    check_one_line(run_to_end(server_command(broken, free_port())), "config.json")


@pytest.mark.long_matrix
def test_child_that_cannot_start_is_one_clear_line(tmp_path: Path) -> None:
    """No weights: only the scheduler finds out."""
    model = make_model_dir(tmp_path / "model")
    result = run_to_end(server_command(model, free_port()))
    check_one_line(result, "safetensors")
