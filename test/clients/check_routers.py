"""SGLang's routers, as they are, in front of two servers of this runtime: is anything lost?

    python test/clients/check_routers.py

Each router, smg and its predecessor sglang-router, gets an environment of its own in build/routers.
The load is bounded, and all of it stays on 127.0.0.1: `/generate`, completions, chats and calls of
tools, streamed and not. Each answer has to be that of a server without a router, and both servers
have to give some. Under load the server with the most running requests is killed (SIGKILL), comes
back, and in another phase is told to stop (SIGTERM). Then one server is taken away from the router
and given back, and the router has to see how full they are. Writes benchmark/results/routers.json,
and exits with 1 if something is lost.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _client_checks import ROOT, client_python
from _router_requests import (
    PROMPTS,
    REQUESTS,
    UNSTREAMED,
    Answers,
    expected_answers,
    get,
    post,
    send,
)

from benchmark.command import make_parser, store
from benchmark.environment import describe_environment
from benchmark.server_process import free_port

# Their packages with versions, and how their launchers are called.
ROUTERS = {
    "smg==1.13.0": ("smg", "launch", "--load-monitor-interval", "1"),
    "sglang-router==0.3.2": ("sglang_router.launch_router",),
    "sglang-router==0.2.2": ("sglang_router.launch_router",),
}
WORK = ROOT / "build" / "routers"
# Beside the address: how soon a dead worker is left alone, and how soon one that is back is used.
ROUTER_FLAGS = [
    *("--retry-max-retries", "5", "--request-timeout-secs", "60"),
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "2"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--cb-failure-threshold", "3", "--cb-timeout-duration-secs", "2"),
]
WORKER_PATHS = (
    *("/health", "/health_generate", "/ready", "/ping", "/get_server_info", "/server_info"),
    *("/get_model_info", "/model_info", "/v1/models", "/v1/loads", "/get_load", "/metrics"),
)
ROUTER_PATHS = ("/health", "/readiness", "/v1/models", "/get_server_info", "/get_loads", "/workers")
KINDS_AT_THE_END = (["generate", "completions", "chat", "tools"], ["stream", "chat stream"])
POLICIES = ("cache_aware", "round_robin")
CONCURRENCY = 8
WAIT_S = 180.0


def main() -> int:
    parser = make_parser(__doc__, "routers")
    parser.add_argument("--only", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--requests", type=int, default=48, help="Requests in each phase.")
    arguments = parser.parse_args()
    result, runs = describe_environment(), []
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(index)) for index in range(2)]
        for worker in workers:
            worker.wait()
        paths = {path: get(workers[0].url + path)[0] for path in WORKER_PATHS}
        expected = expected_answers(workers[0].url)
        for router in arguments.only:
            for policy in POLICIES:
                run = check_router(router, policy, workers, expected, arguments.requests)
                runs.append(run)
    result |= {"router_flags": " ".join(ROUTER_FLAGS), "worker_paths": paths, "runs": runs}
    store(arguments.out, result)
    show(runs)
    failures = [phase for run in runs for phase in run["phases"] if not phase["ok"]]
    failures += [run for run in runs if run["policy"] == "round_robin" and not min(run["answers"])]
    bad_paths = [path for path, status in paths.items() if status != 200]
    print(f"Failed: {len(failures)} phases, {len(bad_paths)} paths of a worker {bad_paths or ''}")
    return 1 if failures or bad_paths else 0


def check_router(
    router: str, policy: str, workers: list[Worker], expected: Answers, num: int
) -> dict[str, Any]:
    """All phases with one router.

    Args:
        router: a key of ROUTERS.
    """
    python = client_python(WORK / f"venv-{router}", router)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(python), "-m", *ROUTERS[router], "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *(worker.url for worker in workers), *ROUTER_FLAGS]
    command += ["--policy", policy]
    with running(command, WORK / f"{router}-{policy}.log"):
        wait_for(lambda: get(url + "/readiness")[0] == 200, "the router is ready")
        before = [worker.num_answered() for worker in workers]
        phases = [Load(url, expected, kind, num=num).run() for kind in REQUESTS]
        answers = [worker.num_answered() - old for worker, old in zip(workers, before)]
        for number in (signal.SIGKILL, signal.SIGTERM):
            for kinds in KINDS_AT_THE_END:
                load = Load(url, expected, *kinds, num=num, workers=workers, number=number)
                phases.append(load.run())
                for worker in workers:
                    worker.restart_if_ended()
                wait_for(lambda: num_healthy(url) == 2, "the router takes the worker back")
        phases += change_workers(url, expected, workers[0], num)
        wait_for(lambda: knows_loads(url), "the router knows how full its workers are")
        paths = {path: get(url + path)[0] for path in ROUTER_PATHS}
        paths["/flush_cache"] = post(url + "/flush_cache", {})[0]
    return {
        "router": router,
        "policy": policy,
        "answers": answers,
        "phases": phases,
        "router_paths": paths,
    }


class Worker:
    """A server with the demo model, that can be killed and started again on its port."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._requests = WORK / f"requests-{index}.jsonl"
        self.was_signalled = False

    def __enter__(self) -> Worker:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)

    def _start(self) -> None:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "demo"]
        command += ["--port", str(self._port), "--num-threads", "1"]
        command += ["--log-requests", "--log-requests-target", str(self._requests)]
        command += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
        WORK.mkdir(parents=True, exist_ok=True)
        paths = f"{ROOT / 'python'}:{ROOT / 'sgl-kernel/python'}"
        with (WORK / f"worker-{self._index}.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": paths}
            )

    def wait(self) -> None:
        """Returns when the server answers."""
        wait_for(lambda: get(self.url + "/ready")[0] == 200, "a server is ready")

    def restart_if_ended(self) -> None:
        """Starts anew after a signal has ended the process."""
        if self.was_signalled:
            self.process.wait(WAIT_S)
            self.was_signalled = False
            self._start()
            self.wait()

    def send(self, number: signal.Signals) -> None:
        self.was_signalled = True
        self.process.send_signal(number)

    def num_answered(self) -> int:
        """Requests that have ended there, of all its processes so far."""
        return self._requests.read_bytes().count(b"\n")

    def num_running(self) -> int:
        """Requests that run there now."""
        status, raw = get(self.url + "/v1/loads")
        return int(json.loads(raw)["aggregate"]["total_running_reqs"]) if status == 200 else 0


class Load:
    """One phase: requests of some kinds, and perhaps the end of a server in the midst of them."""

    def __init__(
        self,
        url: str,
        expected: Answers,
        *kinds: str,
        num: int,
        workers: Sequence[Worker] = (),
        number: signal.Signals | None = None,
    ) -> None:
        self._url, self._expected, self._kinds, self._num = url, expected, kinds, num
        self._workers, self._number = workers, number

    def run(self) -> dict[str, Any]:
        start = time.monotonic()
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            futures = [pool.submit(self._one, index) for index in range(self._num)]
            num_hit = self._end_a_worker(futures)
            counts = Counter(future.result() for future in futures)
        lost = self._num - counts["whole"]
        # A stream that has begun cannot go on elsewhere: of those, a server's end may cut some.
        streams = any(kind in UNSTREAMED for kind in self._kinds)
        may_lose = CONCURRENCY if num_hit and streams else 0
        return {
            "requests": " + ".join(self._kinds),
            "signal": None if self._number is None else self._number.name,
            "running_there": num_hit,
            "sent": self._num,
            **{outcome: counts[outcome] for outcome in sorted({"whole", *counts})},
            "seconds": round(time.monotonic() - start, 1),
            "ok": lost <= may_lose and not counts["wrong"],
        }

    def _end_a_worker(self, futures: list[Future[str]]) -> int:
        """Signals the busiest worker once a quarter is answered; returns how much it was doing."""
        if self._number is None:
            return 0
        num_running = 0
        while not num_running or sum(future.done() for future in futures) < self._num // 4:
            counts = [worker.num_running() for worker in self._workers]
            num_running = max(counts)
        self._workers[counts.index(num_running)].send(self._number)
        return num_running

    def _one(self, index: int) -> str:
        """Sends one request and tells how it went: `whole`, `wrong`, `cut` or an HTTP status."""
        prompt, kind = PROMPTS[index % len(PROMPTS)], self._kinds[index % len(self._kinds)]
        try:
            answer = REQUESTS[kind](self._url, prompt)
        except urllib.error.HTTPError as error:
            error.read()
            return f"status {error.code}"
        except (OSError, ValueError, http.client.HTTPException):
            return "cut"
        return "whole" if answer == self._expected[kind][prompt] else "wrong"


def change_workers(url: str, expected: Answers, worker: Worker, num: int) -> list[dict[str, Any]]:
    """Two phases: one without a worker, which is to get nothing then, and one with it again."""
    (found,) = [each for each in workers_of(url) if each["url"] == worker.url]
    name = urllib.parse.quote(found["id"], safe="")
    send("DELETE", f"{url}/workers/{name}", None)
    wait_for(lambda: len(workers_of(url)) == 1, "the router lets a worker go")
    before = worker.num_answered()
    without = Load(url, expected, "chat", num=num).run()
    without["ok"] = without["ok"] and worker.num_answered() == before
    send("POST", f"{url}/workers", {"url": worker.url})
    wait_for(lambda: num_healthy(url) == 2, "the router takes a worker in")
    again = Load(url, expected, "chat", num=num).run()
    return [without | {"workers": 1}, again | {"workers": 2}]


def knows_loads(url: str) -> bool:
    """Tells whether the router could read how full each worker is."""
    found = json.loads(get(url + "/get_loads")[1])
    if "loads" in found:  # smg
        return len(found["loads"]) == 2 and all(e["max_total_num_tokens"] for e in found["loads"])
    return len(found["workers"]) == 2 and all(each["load"] >= 0 for each in found["workers"])


def workers_of(url: str) -> list[dict[str, Any]]:
    """Gives what the router says of its workers."""
    status, raw = get(url + "/workers")
    found: list[dict[str, Any]] = json.loads(raw)["workers"] if status == 200 else []
    return found


def num_healthy(url: str) -> int:
    """Workers that the router thinks are healthy."""
    return sum(worker["is_healthy"] for worker in workers_of(url))


def wait_for(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"Not within {WAIT_S:g} s: {what}. Logs are in {WORK}.")
        time.sleep(0.1)


@contextlib.contextmanager
def running(command: list[str], log_path: Path) -> Iterator[None]:
    """A process, until the block ends."""
    with log_path.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def show(runs: list[dict[str, Any]]) -> None:
    row = "{:20} {:12} {:41} {:8} {:>8} {:>5} {:>6}  {}"
    heads = ("router", "policy", "requests", "signal", "hit", "sent", "whole", "others")
    print(row.format(*heads))
    known = {"requests", "signal", "running_there", "sent", "whole", "seconds", "ok", "workers"}
    for run in runs:
        for phase in run["phases"]:
            others = ", ".join(f"{phase[key]} {key}" for key in phase.keys() - known)
            cells = (phase["requests"], phase["signal"] or "-", phase["running_there"])
            cells = (*cells, phase["sent"], phase["whole"], others)
            print(row.format(run["router"], run["policy"], *cells))


if __name__ == "__main__":
    raise SystemExit(main())
