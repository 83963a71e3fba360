"""One face for the Engine and the server, so that the same tests of pauses run over both."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import httpx

import sglang
from serving_utils import RunningServer, running_server

PROMPTS = [
    "def add(a, b):\n    ",
    "import os\n",
    "class Queue:\n    def __init__",
    "for i in range(",
    "with open(path) as f:\n",
    "try:\n    value = int(",
    "def main():\n    parser = ",
    "if __name__ ==",
]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "unverified": {"mtp_enabled": True, "mtp_k": 4, "mtp_strategy": ["conf_adapt", 0.9]},
    "verified": {"mtp_enabled": True, "mtp_k": 4, "mtp_verify": True, "temperature": 0},
}
TIMEOUT_S = 30.0


class Target(Protocol):
    """What the tests need of an engine."""

    def pause(self, **fields: Any) -> dict[str, Any]: ...

    def resume(self) -> dict[str, Any]: ...

    def flush(self, timeout_s: float = 0.0) -> str:
        """The reason of a refusal; empty on success."""

    def abort_all(self) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def generate(self, prompt: str, params: dict[str, Any], **fields: Any) -> dict[str, Any]: ...


class EngineTarget:
    def __init__(self, engine: sglang.Engine) -> None:
        self.engine = engine

    def pause(self, **fields: Any) -> dict[str, Any]:
        return self.engine.pause_generation(**fields)

    def resume(self) -> dict[str, Any]:
        return self.engine.continue_generation()

    def flush(self, timeout_s: float = 0.0) -> str:
        reply = self.engine.flush_cache(timeout_s=timeout_s)
        return "" if reply.success else reply.error_msg

    def abort_all(self) -> None:
        self.engine.abort_request(abort_all=True)

    def state(self) -> dict[str, Any]:
        return self.engine.get_server_info()["internal_states"][0]

    def generate(self, prompt: str, params: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return self.engine.generate(prompt, params, **fields)


class ServerTarget:
    def __init__(self, server: RunningServer) -> None:
        self.server = server

    def pause(self, **fields: Any) -> dict[str, Any]:
        return self._ok("/pause_generation", fields)

    def resume(self) -> dict[str, Any]:
        return self._ok("/continue_generation", {})

    def flush(self, timeout_s: float = 0.0) -> str:
        response = self.server.client.post("/flush_cache", params={"timeout": timeout_s})
        assert response.status_code in (200, 400)
        return "" if response.status_code == 200 else response.text

    def abort_all(self) -> None:
        self._ok("/abort_request", {"abort_all": True})

    def state(self) -> dict[str, Any]:
        return self.server.internal_state()

    def generate(self, prompt: str, params: dict[str, Any], **fields: Any) -> dict[str, Any]:
        # A client of its own: requests of one test run at the same time.
        body = {"text": prompt, "sampling_params": params, **fields}
        return httpx.post(f"{self.server.url}/generate", json=body, timeout=TIMEOUT_S).json()

    def _ok(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.server.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def open_target(name: str) -> Iterator[Target]:
    """`engine`, `engine without overlap`, `http` or `http without overlap`, over the demo model."""
    overlap = "without overlap" not in name
    if name.startswith("http"):
        flags = () if overlap else ("--disable-overlap-schedule",)
        with running_server("demo", "--max-running-requests", "8", *flags) as server:
            yield ServerTarget(server)
        return
    with sglang.Engine(
        model_path="demo", max_running_requests=8, disable_overlap_schedule=not overlap
    ) as engine:
        yield EngineTarget(engine)


class Requests:
    """Requests in threads of their own: of one kind, or `mixed`, that is of all in turn."""

    def __init__(
        self, target: Target, kind: str, num_requests: int, num_new: int, **fields: Any
    ) -> None:
        self._target = target
        self._pool = ThreadPoolExecutor(num_requests)
        kinds = itertools.cycle(KINDS.values() if kind == "mixed" else [KINDS[kind]])
        common = {"max_new_tokens": num_new, "ignore_eos": True}
        self._futures: list[Future[dict[str, Any]]] = [
            self._pool.submit(target.generate, prompt, {**common, **params}, **fields)
            for prompt, params in zip(PROMPTS[:num_requests], kinds, strict=False)
        ]

    @property
    def num_done(self) -> int:
        return sum(future.done() for future in self._futures)

    def wait_until_running(self, num_steps: int = 4) -> dict[str, Any]:
        """The state once all run and some decode steps have passed."""
        wanted = len(self._futures)
        state = wait_for(self._target, lambda state: state["running_batch_size"] == wanted)
        start = state["forward_ct_decode"]
        return wait_for(self._target, lambda s: s["forward_ct_decode"] >= start + num_steps)

    def results(self) -> list[dict[str, Any]]:
        results = [future.result(TIMEOUT_S) for future in self._futures]
        self._pool.shutdown()
        return results


def wait_for(target: Target, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first state that is as wanted."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_reached(state := target.state()):
        assert time.monotonic() < deadline, state
        time.sleep(0.002)
    return state


def baseline(
    target: Target, kind: str, num_requests: int, num_new: int, **fields: Any
) -> list[dict[str, Any]]:
    """What the requests give when nothing comes between."""
    return Requests(target, kind, num_requests, num_new, **fields).results()
