"""One face for the Engine and the server, so that the same tests of pauses run over both."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

import sglang
from serving_utils import DEMO_TOKENS, RunningServer, running_server

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
# Front ends know nothing of overlap, nor does a scheduler of front ends: two have both of each.
TARGETS = ("engine", "http without overlap")
TIMEOUT_S = 30.0
POLL_S = 0.002


class Target(Protocol):
    """Names what the tests need of an engine."""

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
        response = httpx.post(f"{self.server.url}/generate", json=body, timeout=TIMEOUT_S)
        assert response.status_code == 200, response.text
        return response.json()

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
        model_path="demo",
        max_total_tokens=DEMO_TOKENS,
        max_running_requests=8,
        disable_overlap_schedule=not overlap,
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
    def ended(self) -> list[Any]:
        """Results, or errors, of those that have ended."""
        return [future.exception() or future.result() for future in self._futures if future.done()]

    def wait_for(
        self, target: Target, is_reached: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any] | None:
        """The first state that is as wanted; None if a request ends before."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            ended = self.ended
            if is_reached(state := target.state()):
                return state
            if ended:
                return None
            assert time.monotonic() < deadline, state
            time.sleep(POLL_S)

    def results(self) -> list[dict[str, Any]]:
        results = [future.result(TIMEOUT_S) for future in self._futures]
        self._pool.shutdown()
        return results


def _continue_for(
    target: Target, requests: Requests, num_requests: int, num_steps: int
) -> dict[str, Any] | None:
    """Lets paused requests run; the state some steps later, or None if one has ended by then."""
    queued = requests.wait_for(target, lambda s: s["waiting_queue_size"] == num_requests)
    assert queued is not None, requests.ended
    last_step = queued["forward_ct_decode"] + num_steps
    target.resume()
    return requests.wait_for(target, lambda s: s["forward_ct_decode"] >= last_step)


@dataclass(frozen=True)
class Interrupted:
    """Requests that a pause has caught, all of them.

    Attributes:
        before: the state some decode steps after all were admitted.
        reply: of the pause.
    """

    requests: Requests
    num_new: int
    before: dict[str, Any]
    reply: dict[str, Any]


def interrupt(
    target: Target,
    kind: str,
    num_requests: int,
    num_new: int,
    mode: str,
    num_steps: int = 4,
    **fields: Any,
) -> Interrupted:
    """Pauses requests after `num_steps` decode steps, with none that has ended.

    They come while the engine is paused, so one step admits all of them. They run while this
    process looks; if it was too slow for one of them, all come again with twice as many tokens.
    """
    for longer in range(6):
        target.pause(mode="in_place")
        requests = Requests(target, kind, num_requests, num_new << longer, **fields)
        before = _continue_for(target, requests, num_requests, num_steps)
        if before is not None and before["running_batch_size"] == num_requests:
            reply = target.pause(mode=mode)
            if sum(reply[name] for name in ("running", "retracted", "aborted")) == num_requests:
                return Interrupted(requests, num_new << longer, before, reply)
            target.resume()
        requests.results()
    raise AssertionError(f"Requests of {num_new << longer} tokens end before a pause comes.")


def baseline(
    target: Target, kind: str, num_requests: int, num_new: int, **fields: Any
) -> list[dict[str, Any]]:
    """Returns the answers that the requests get when nothing comes between."""
    return Requests(target, kind, num_requests, num_new, **fields).results()
