"""Faults at every stage of a server's processes: each server recovers, or ends with an error.

    python test/faults.py                    # all, one after the other
    python test/faults.py --only scheduler   # those whose name has it

A server gets one fault (`support/injected_faults.py`) while clients of every kind are asking:
streams, chats, grammars, a pause, an update of weights. Every client must get an answer in time.
Then the server must give the right tokens and have all memory free, or end in time with another
exit code than 0 and name the process. No process, socket, folder or shared memory may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent / "support"))

from injected_faults import Injected
from ledger import commit_of_tree
from serving_utils import RunningServer, environ, events, free_port, running_server, server_command

WATCHDOG_S = 3
ENDS_S, ANSWERS_S = 20.0, 45.0  # a check of a grammar that hangs has 30 s
GOES_ON, ENDS, NO_START = "goes on", "ends", "does not start"
SCHEDULER, DETOKENIZER, FRONT_END = "scheduler_process", "detokenizer_process", "launch_server"
RANK, GRAMMARS, CHATS = "rank_process", "grammar_process", "render_process"
FATAL = ("error", "no memory", "kill", "stop", "hang")
RANKS = ("--tp-size", "2", "--num-threads", "1")


REASONS = {"error": "injected", "no memory": "injected", "full disk": "No space left on device"}


class Fault(NamedTuple):
    """A fault, and what must become of the server.

    Attributes:
        flags: of the server.
    """

    process: str
    place: str
    action: str
    outcome: str
    flags: tuple[str, ...] = ()

    @property
    def stage(self) -> str:
        return f"{self.process.removesuffix('_process')}: {self.place.partition(':')[2]}"

    @property
    def name(self) -> str:
        return self.stage.replace(": ", f": {self.action} in ")


def _faults() -> Iterator[Fault]:
    srt = "sglang.srt"
    steps = (
        f"{srt}.managers.scheduler:Scheduler.receive",
        f"{srt}.scheduling.batch_planner:BatchPlanner.next_step",
        f"{srt}.workers.tp_worker:TpModelWorker.begin",
        f"{srt}.model_executor.model_runner:ModelRunner.forward",
        f"{srt}.scheduling.batch_result_processor:BatchResultProcessor.process",
        f"{srt}.messages.ipc:Sender.send",
        f"{srt}.control.engine_state:BetweenStepsQueue.run",
    )
    for place in steps:
        for action in FATAL:
            yield Fault(SCHEDULER, place, action, ENDS)
    yield Fault(SCHEDULER, steps[3], "no GPU memory", ENDS)
    yield Fault(SCHEDULER, steps[5], "broken pipe", ENDS)
    for action in ("slow", "clock"):
        yield Fault(SCHEDULER, steps[0], action, GOES_ON)
    detokenizer = f"{srt}.managers.detokenizer_manager"
    for place in (f"{detokenizer}:DetokenizerManager.handle", f"{srt}.messages.ipc:Sender.send"):
        for action in FATAL:
            yield Fault(DETOKENIZER, place, action, ENDS)
    for action in ("error", "no memory", "slow", "clock"):
        yield Fault(DETOKENIZER, f"{detokenizer}:RequestText.push", action, GOES_ON)
    manager = f"{srt}.managers.tokenizer_manager:TokenizerManager"
    yield Fault(FRONT_END, f"{manager}.handle", "error", ENDS)
    for action in ("error", "clock"):
        yield Fault(FRONT_END, f"{manager}._handle_output", action, GOES_ON)
    matchers = f"{srt}.constrained.matchers"
    for place in ("GrammarCompiler.check", "GrammarCompiler.compile", "Matcher.masks"):
        for action in FATAL:
            yield Fault(GRAMMARS, f"{matchers}:{place}", action, GOES_ON)
    for action in FATAL:
        yield Fault(CHATS, f"{srt}.parser.chat_rendering:ChatTemplate.render", action, GOES_ON)
    for module in (GRAMMARS, CHATS):
        yield Fault(module, f"{srt}.framed_process:write", "broken pipe", GOES_ON)
    update = f"{srt}.weight_sync.weight_reader:WeightReader.from_directory"
    for action in ("error", "no memory", "full disk", "slow"):
        yield Fault(SCHEDULER, update, action, GOES_ON)
    load = f"{srt}.model_loader.loader:load_model"
    pools = f"{srt}.mem_cache.kv_memory:KVMemory.__init__"
    for place in (load, pools):
        for action in ("error", "no memory", "full disk", "kill", "stop"):
            yield Fault(SCHEDULER, place, action, NO_START)
    yield Fault(SCHEDULER, load, "no GPU memory", NO_START)
    yield Fault(SCHEDULER, load, "slow", GOES_ON)
    tokenizer = f"{srt}.tokenizer:load_tokenizer"
    for action in ("error", "full disk", "kill", "stop"):
        yield Fault(DETOKENIZER, tokenizer, action, NO_START)
    for action in FATAL:
        yield Fault(RANK, f"{srt}.workers.tp_worker:TpModelWorker.follow", action, ENDS, RANKS)
    for action in ("error", "kill", "full disk"):
        yield Fault(RANK, load, action, NO_START, RANKS)


FAULTS = {fault.name: fault for fault in _faults()}
BODY = {"text": "import os\n", "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
PARAMS = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0}
GRAMMAR, BEFORE, AFTER = (  # what is found of a grammar is kept
    {"text": "x", "sampling_params": {"regex": regex, "max_new_tokens": 30}}
    for regex in ("[a-c]{9,20}", "[d-f]{9,20}", "[g-i]{9,20}")
)
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
TEMPLATE = "{% for each in messages %}{{ each.content }}{% endfor %}"


class Clients:
    """One of each kind, all at once. Each has an answer or the end of a stream in time, or the
    server had not taken it."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._pool = ThreadPoolExecutor(8)
        acts = [self._stream, self._ask("/generate", {**BODY, "sampling_params": PARAMS})]
        acts += [self._ask("/generate", GRAMMAR), self._ask("/v1/chat/completions", CHAT)]
        acts += [self._ask("/update_weights_from_disk", {"model_path": "demo"})]
        acts += [self._ask("/pause_generation", {"mode": "retract", "lease_s": 0.5})]
        self._calls: list[Future[int]] = [self._pool.submit(act) for act in acts]

    def statuses(self) -> list[int]:
        """Returns the answers' statuses, 0 for a connection that was refused.

        Raises:
            AssertionError: for a stream without an end.
            httpx.TransportError, TimeoutError: for a client without an answer.
        """
        try:
            return [call.result(ANSWERS_S) for call in self._calls]
        finally:
            self._pool.shutdown(wait=False)

    def _ask(self, path: str, body: Any) -> Any:
        def ask() -> int:
            try:
                url = self._server.url + path
                return httpx.post(url, json=body, timeout=ANSWERS_S).status_code
            except httpx.ConnectError:
                return 0

        return ask

    def _stream(self) -> int:
        body = {**BODY, "sampling_params": PARAMS, "stream": True}
        url = self._server.url + "/generate"
        try:
            with httpx.stream("POST", url, json=body, timeout=ANSWERS_S) as answer:
                if answer.status_code == 200:
                    *_, last = events(answer.iter_lines())
                    assert last == "[DONE]", last
                return answer.status_code
        except httpx.ConnectError:
            return 0


def run_fault(fault: Fault) -> str:
    """Runs a server with a fault; returns what became of it.

    Raises:
        AssertionError: if that is not what must, or something is left.
    """
    with tempfile.TemporaryDirectory() as name, nothing_left(Path(name)):
        folder = Path(name)
        injected = Injected(folder, fault.process, fault.place, fault.action)
        (folder / "template.jinja").write_text(TEMPLATE)
        paths = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": paths, "TMPDIR": name}
        flags = ["--watchdog-timeout", str(WATCHDOG_S), "--chat-template", f"{name}/template.jinja"]
        flags += ["--max-grammar-time-s", "3", "--skip-server-warmup", *fault.flags]
        if fault.outcome == NO_START:
            injected.arm()
            said = _does_not_start(flags, own)
            if fault.process != DETOKENIZER and fault.action in REASONS:
                assert REASONS[fault.action] in said, said
            assert injected.has_struck, "the fault did not happen"
            return said
        if "load" in fault.place:
            injected.arm()
        with running_server("demo", *flags, **own) as server:
            segments = segments_of(server)
            said = _strikes(server, injected, fault)
        assert not [each for each in segments if each.exists()]
        return said


def _does_not_start(flags: list[str], own: dict[str, str]) -> str:
    command = server_command("demo", free_port(), *flags)
    done = subprocess.run(
        command, env=environ(**own), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done
    [line] = [line for line in done.stderr.splitlines() if line.startswith("sglang: error: ")]
    return line


def _strikes(server: RunningServer, injected: Injected, fault: Fault) -> str:
    right = server.post("/generate", BODY).json()["output_ids"]
    for path, body in (("/generate", BEFORE), ("/v1/chat/completions", CHAT)):
        assert server.post(path, body).status_code == 200
    if not injected.has_struck:
        injected.arm()
    clients = Clients(server)
    statuses = clients.statuses()
    assert injected.has_struck, "the fault did not happen"
    if fault.outcome == ENDS:
        assert set(statuses) <= {0, 200, 503}, statuses
        said = server.process.communicate(timeout=ENDS_S)[1]
        assert server.process.returncode == 1, (server.process.returncode, said)
        [line] = [line for line in said.splitlines() if line.startswith("sglang: error: ")]
        return f"{statuses}, {line}"
    assert 0 not in statuses, statuses
    assert sum(status != 200 for status in statuses) <= 1, statuses
    after = server.post("/generate", BODY)
    assert after.json()["output_ids"] == right, after.text
    for path, body in (("/generate", AFTER), ("/v1/chat/completions", CHAT)):
        assert server.post(path, body).status_code == 200
    state = server.wait_idle()
    assert state["orphan_token_count"] == state["legacy_missing_tokens"] == 0
    assert server.post("/flush_cache").status_code == 200
    server.process.terminate()
    said = server.process.communicate(timeout=ENDS_S)[1]
    assert server.process.returncode == 0, said
    return f"{statuses}, goes on"


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Checks that no process of a server is there, and none of its sockets.

    Raises:
        AssertionError: naming it.
    """
    yield
    deadline = time.monotonic() + ENDS_S
    while left := [*filter(partial(_is_of, folder), psutil.process_iter())]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert not list(folder.glob("sglang-*"))


def segments_of(server: RunningServer) -> list[Path]:
    """Finds the files of shared memory that the processes of a server have mapped."""
    first = psutil.Process(server.process.pid)
    family = [first, *first.children(recursive=True)]
    paths = {part.path for each in family for part in each.memory_maps()}
    return [Path(path) for path in paths if path.startswith("/dev/shm")]


def _is_of(folder: Path, process: psutil.Process) -> bool:
    """Tells whether a process that is no zombie has the folder in its environment."""
    try:
        environment = process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False
    return str(folder) in environment.get("PYTHONPATH", "")


def main() -> int:
    """Runs the faults; 1 if any was not survived as it must be."""
    parser = argparse.ArgumentParser(description="Faults at every stage of a server.")
    parser.add_argument("--only", default="", help="part of the names of faults")
    parser.add_argument("--results", type=Path, help="a file of JSON, written after each")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    bar = tqdm([name for name in FAULTS if args.only in name], unit="fault")
    for name in bar:
        start, said, error = time.monotonic(), "", None
        try:
            said = run_fault(FAULTS[name])
        except Exception as failure:  # noqa: BLE001 - the others go on
            error = f"{type(failure).__name__}: {failure}"
        seconds = round(time.monotonic() - start, 1)
        found[name] = {"outcome": FAULTS[name].outcome, "error": error, "seconds": seconds}
        bar.write(f"{name}: {said if error is None else f'FAILED: {error}'} ({seconds:.0f} s)")
        if args.results is not None:
            result = {"commit": commit_of_tree(), "faults": found}
            args.results.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    num_failed = sum(each["error"] is not None for each in found.values())
    print(f"{len(found)} faults, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
