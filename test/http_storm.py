"""A storm over HTTP on a real server: clients that stay, leave in mid-stream, half-close or send
nonsense, somebody who pauses, updates and flushes, and children that are stopped now and then.

    python test/http_storm.py --seconds 60
    python test/http_storm.py --ends 5 --tp-size 2 --speculative-algorithm NGRAM
    python test/http_storm.py --drafters --tp-size 2 --seconds 300

Some send a grammar that takes long to follow, and leave.

Tokens are those of the same requests on the idle server, or their beginning where a request was
aborted; afterwards nothing runs, waits or holds memory. On a GPU (see `target.py`) a few requests
may go on with one of two tokens that are nearly as good. Only while a child is stopped is anything
refused, and what runs then goes on behind it. The seed decides what is sent, not when. Flags that
it does not know are the server's. --drafters divides the time among servers with one drafter each,
whose tokens must be those of a plain server on one rank. With --ends so many servers lose a child
under load afterwards: each must name it, and leave no process.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent / "support"))

from bodies import DEMO
from pause_target import KINDS, PROMPTS
from serving_utils import RunningServer, events, open_request, running_server, stopped
from sglang.srt.model_config import resolve_model_path
from target import TARGET, Target

NUM_CLIENTS = 8
NUM_NEW = 40
TIMEOUT_S = 60.0
ENDS_S = 20.0
FLAGS = ("--max-running-requests", "6", "--max-total-tokens", "400", "--page-size", "4")
MODES = ("abort", "retract", "in_place", "drain")
EXTRAS: tuple[dict[str, Any], ...] = ({}, {"return_logprob": True}, {"cache_salt": "salt"})
WRONG: tuple[Any, ...] = (
    {"text": 3},
    {"text": "x", "sampling_params": {"max_new_tokens": -1}},
    {"text": "x", "sampling_params": {"mtp_enabled": True, "mtp_k": 999}},
    {"text": "x", "sampling_params": {"stop_regex": "("}},
    {"input_ids": [10**9]},
    {"text": "x", "no_such_field": 1},
    {"input_ids": []},
    [],
)
SLOW_GRAMMAR = "root ::= x{0,400}\nx ::= [a-z ]? [a-z ]? [a-z ]? [a-z ]?"
MOST_TIES = 0.02  # share of requests, or one
LOOKS = ("/health", "/server_info", "/metrics", "/v1/models", "/v1/loads", "/get_weight_version")


class Right(NamedTuple):
    """The answer of an idle server, and the gap between the two best logits at each token."""

    text: str
    tokens: list[int]
    gaps: list[float]


RightAnswers = dict[tuple[int, str], Right]  # by prompt and kind


def right_answers(server: RunningServer) -> RightAnswers:
    """Asks for each kind that is served beside the server's drafter."""
    found: RightAnswers = {}
    for index, kind in itertools.product(range(len(PROMPTS)), KINDS):
        body = {**_body(index, kind), "return_logprob": True, "top_logprobs_num": 2}
        response = server.post("/generate", body)
        if response.status_code == 200:
            answer = response.json()
            tops = answer["meta_info"]["output_top_logprobs"]
            gaps = [best[0][0] - best[1][0] for best in tops]
            found[index, kind] = Right(answer["text"], answer["output_ids"], gaps)
    return found


def is_right(right: Right, answer: dict[str, Any], is_drawn: bool) -> bool:
    """Checks an answer, or the beginning of one; False after a near-tie.

    Args:
        is_drawn: with noise, which hides the gaps: each difference counts as a near-tie.
    """
    tokens, text = answer["output_ids"], answer["text"]
    same = [mine == theirs for mine, theirs in zip(tokens, right.tokens, strict=False)]
    if all(same):
        assert right.text.startswith(text), f"{text!r}, alone {right.text!r}"
        return True
    gap = right.gaps[same.index(False)]
    assert is_drawn or gap <= TARGET.max_gap, f"{text!r}, alone {right.text!r}, gap {gap}"
    return False


class HttpStorm:
    """Clients and a controller of one server.

    Args:
        right: answers to all requests that are served here; by default those of the idle server.
    """

    def __init__(self, server: RunningServer, seed: int, right: RightAnswers | None = None) -> None:
        self._server = server
        self._seed = seed
        self._until = 0.0
        self._children = server.children()
        self._kinds = [kind for kind in KINDS if self._serves(kind)]
        self._right = right_answers(server) if right is None else right
        self._divided: set[tuple[int, str]] = set()
        self.seen: Counter[str] = Counter()

    def run(self, seconds: float, name: str = "storm") -> None:
        """Runs it and checks what is left.

        Args:
            name: of its progress bar.

        Raises:
            AssertionError: naming what is not as it must be.
        """
        self._until = time.monotonic() + seconds
        acts = (*[self._client] * NUM_CLIENTS, self._control, self._stop)
        with ThreadPoolExecutor(len(acts)) as pool:
            workers = [pool.submit(self._work, i, act) for i, act in enumerate(acts)]
            for _ in tqdm(range(round(seconds)), name, unit="s"):
                wait(workers, timeout=1.0)
            for worker in reversed(workers):
                worker.result()
        self._check_rest()
        self.seen["near-ties"] = num_ties = len(self._divided)
        most = 0 if TARGET.device == "cpu" else max(1, MOST_TIES * len(PROMPTS) * len(self._kinds))
        assert num_ties <= most, self._divided

    def _serves(self, kind: str) -> bool:
        """Tells whether there are requests of this kind beside the server's drafter."""
        return self._server.post("/generate", _body(0, kind)).status_code == 200

    def _work(self, index: int, act: Callable[[httpx.Client, random.Random], None]) -> None:
        chooser = random.Random(self._seed * 100 + index)
        with httpx.Client(base_url=self._server.url, timeout=TIMEOUT_S) as client:
            try:
                while time.monotonic() < self._until:
                    act(client, chooser)
            finally:  # what others wait for
                if act == self._control:
                    _call(client, "/resume_memory_occupation", {})
                    _call(client, "/continue_generation", {})

    def _client(self, client: httpx.Client, chooser: random.Random) -> None:
        index, kind = chooser.randrange(len(PROMPTS)), chooser.choice(self._kinds)
        rid = f"{chooser.choice('ab')}-{chooser.randrange(10**6)}"
        body = {**_body(index, kind), **chooser.choice(EXTRAS), "rid": rid}
        draw = chooser.random()
        if draw < 0.15:
            wrong = client.post("/generate", json=chooser.choice(WRONG))
            if wrong.status_code == 400:
                self.seen["wrong bodies"] += 1
            else:
                assert not self._is_taken(*_status_and_text(wrong)), wrong.text
        elif draw < 0.2:
            self._attack(client, chooser.choice([0.1, 0.5]))
        elif draw < 0.4:
            answer = client.post("/generate", json=body)
            if self._is_taken(*_status_and_text(answer)):
                self._check_answer(index, kind, answer.json())
        elif draw < 0.5:
            self._half_closed(index, kind, body)
        else:
            num_wanted = chooser.choice([1, 3, 10, 10**6, 10**6])
            self._stream(client, index, kind, body, num_wanted)

    def _attack(self, client: httpx.Client, patience_s: float) -> None:
        """Some of these masks take 100 ms; whoever waits for one longer than that leaves."""
        params = {"ebnf": SLOW_GRAMMAR, "max_new_tokens": 60, "temperature": 1.0}
        body = {"text": "x", "sampling_params": params, "stream": True}
        try:
            with client.stream("POST", "/generate", json=body, timeout=patience_s) as response:
                if response.status_code != 200:
                    self._is_taken(response.status_code, response.read().decode())
                    return
                self.seen["chunks of slow grammars"] += len(list(events(response.iter_lines())))
        except httpx.TimeoutException:
            self.seen["left slow grammars"] += 1

    def _stream(
        self, client: httpx.Client, index: int, kind: str, body: dict[str, Any], num_wanted: int
    ) -> None:
        """Reads so many chunks, and leaves if more would come."""
        before = ""
        with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                self._is_taken(response.status_code, response.read().decode())
                return
            for count, chunk in enumerate(events(response.iter_lines())):
                if chunk == "[DONE]":
                    return
                assert chunk["text"].startswith(before), (before, chunk)
                before = chunk["text"]
                if chunk["meta_info"]["finish_reason"] is not None:
                    self._check_answer(index, kind, chunk)
                else:
                    self._is_right(index, kind, chunk)
                if count + 1 >= num_wanted:
                    self.seen["cancelled"] += 1
                    return
        raise AssertionError(f"A stream ended without [DONE]: {body}")

    def _half_closed(self, index: int, kind: str, body: dict[str, Any]) -> None:
        """A client that sends nothing more, and says so."""
        with open_request(self._server, body) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.shutdown(socket.SHUT_WR)
            response = http.client.HTTPResponse(connection)
            response.begin()
            text = response.read().decode()
        if self._is_taken(response.status, text):
            self._check_answer(index, kind, json.loads(text))
            self.seen["half-closed"] += 1

    def _is_taken(self, status_code: int, text: str) -> bool:
        """Tells whether a request was taken: nothing but a stopped child is a reason against it."""
        if status_code == 503 and "process is stopped" in text:
            self.seen["refused"] += 1
            return False
        assert status_code == 200, text
        return True

    def _stop(self, client: httpx.Client, chooser: random.Random) -> None:
        """Stops a child for up to a second; whoever asks meanwhile is told which one."""
        time.sleep(chooser.uniform(0.2, 2.0))
        role = chooser.choice(list(self._children))
        with stopped(self._children[role]):
            for path in ("/health", "/ready"):
                answer = client.get(path)
                assert answer.status_code == 503, answer.text
                assert f"The {role} process is stopped" in answer.text, answer.text
            assert not self._is_taken(
                *_status_and_text(client.post("/generate", json={"text": "x"}))
            )
            time.sleep(chooser.choice([0.1, 0.3, 1.0]))
        self.seen["stops"] += 1

    def _check_answer(self, index: int, kind: str, answer: dict[str, Any]) -> None:
        reason = answer["meta_info"]["finish_reason"]["type"]
        self.seen[reason] += 1
        is_right = self._is_right(index, kind, answer)
        if reason == "abort":
            return
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == NUM_NEW
        if is_right:
            assert answer["text"] == self._right[index, kind].text

    def _is_right(self, index: int, kind: str, answer: dict[str, Any]) -> bool:
        """See `is_right`."""
        is_drawn = KINDS[kind].get("temperature") != 0
        found = is_right(self._right[index, kind], answer, is_drawn)
        if not found:
            self._divided.add((index, kind))
        return found

    def _control(self, client: httpx.Client, chooser: random.Random) -> None:
        """One call; what is stopped goes on a moment later."""
        draw = chooser.random()
        if draw < 0.3:
            _call(client, "/pause_generation", {"mode": chooser.choice(MODES), "lease_s": 5.0})
            time.sleep(chooser.choice([0.0, 0.05, 0.2]))
            if chooser.random() < 0.5:
                demo = str(resolve_model_path("demo"))
                self.seen["updates"] += _call(
                    client, "/update_weights_from_disk", {"model_path": demo}
                )
            _call(client, "/continue_generation", {})
            self.seen["pauses"] += 1
        elif draw < 0.4:
            _call(client, "/pause_generation", {"mode": "retract", "lease_s": 5.0})
            released = _call(client, "/release_memory_occupation", {})
            self.seen["releases"] += released
            _call(client, "/resume_memory_occupation", {})
            _call(client, "/continue_generation", {})
        elif draw < 0.6:
            rid = chooser.choice(["a", "b", "nobody"])
            _call(client, "/abort_request", {"rid": f"{rid}-1", "prefix": True})
        elif draw < 0.7:
            _call(client, "/flush_cache", None)
        elif draw < 0.8:
            _call(client, "/update_weight_version", {"new_version": chooser.choice(["v1", "v2"])})
        else:
            response = client.get(chooser.choice(LOOKS))
            self._is_taken(*_status_and_text(response))
        time.sleep(chooser.choice([0.0, 0.05, 0.3]))

    def _check_rest(self) -> None:
        state = self._server.wait_idle(TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while state["req_to_token_pool_used"] and time.monotonic() < deadline:
            # The last request has ended, and the step that was launched with it is not read yet.
            time.sleep(0.05)
            state = self._server.internal_state()
        for name in ("legacy_missing_tokens", "orphan_token_count", "overlap_token_count"):
            assert state[name] == 0, state
        assert state["ledger_repair_count"] == 0
        assert state["req_to_token_pool_used"] == 0
        assert self._server.post("/flush_cache").status_code == 200
        state = self._server.internal_state()
        pool = self._server.client.get("/server_info").json()["max_total_num_tokens"]
        assert state["available_kv_tokens"] == pool, state
        assert self._server.process.poll() is None


def _status_and_text(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.text


def _body(index: int, kind: str) -> dict[str, Any]:
    params = {"max_new_tokens": NUM_NEW, "ignore_eos": True, **KINDS[kind]}
    return {"text": PROMPTS[index], "sampling_params": params}


def _call(client: httpx.Client, path: str, body: dict[str, Any] | None) -> bool:
    """A control call, which may be refused with a reason; whether it was not. It is repeated as
    long as a child is stopped."""
    while (response := client.post(path, json=body)).status_code == 503:
        assert "process is stopped" in response.text, response.text
        time.sleep(0.05)
    assert response.status_code in (200, 400, 409), (path, response.status_code, response.text)
    return response.status_code == 200


def end_under_load(seed: int, *flags: str) -> str:
    """A child of a busy server is killed or, of a rank beside the first one, stopped for good;
    returns what happened."""
    chooser = random.Random(seed)
    with running_server("demo", *FLAGS, *flags) as server:
        children = server.children()
        family = psutil.Process(server.process.pid).children(recursive=True)
        role = chooser.choice(list(children))
        is_stopped = role.startswith("rank") and chooser.random() < 0.5
        reason = f"The {role} process {'has been stopped for 3 s' if is_stopped else 'ended with'}"
        acts = range(NUM_CLIENTS)
        with ThreadPoolExecutor(len(acts)) as pool:
            for index in acts:
                pool.submit(_ask_until_it_ends, server.url, index)
            time.sleep(chooser.uniform(0.2, 1.0))
            os.kill(children[role], signal.SIGSTOP if is_stopped else signal.SIGKILL)
            said = server.process.communicate(timeout=ENDS_S)[1]
        assert reason in said, said
        assert server.process.returncode != 0
        _, alive = psutil.wait_procs(family, timeout=ENDS_S)
        assert not alive, alive
    return reason


def _ask_until_it_ends(url: str, index: int) -> None:
    with suppress(httpx.TransportError), httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        while client.post("/generate", json=_body(index, "plain")).status_code == 200:
            pass


def storm_over_http(
    seed: int,
    seconds: float,
    *flags: str,
    name: str = "storm",
    right: RightAnswers | None = None,
) -> Counter[str]:
    """One server, one storm; returns what there was to see."""
    with running_server("demo", *FLAGS, *flags) as server:
        storm = HttpStorm(server, seed, right)
        storm.run(seconds, name)
        return storm.seen


def drafter_flags() -> dict[str, list[str]]:
    """The flags of a server by its drafter."""
    return {"masks": []} | {name: Target(flags).command_line() for name, flags in DEMO.ways.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="A storm of clients over HTTP.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--ends", type=int, default=0, help="servers that lose a child")
    parser.add_argument("--drafters", action="store_true", help="a server for each, in turn")
    args, flags = parser.parse_known_args()
    if torch.cuda.is_available() and not TARGET.flags:
        remedy = """SGLANG_TEST_TARGET='{"device": "cuda", "dtype": "float32"}'"""
        parser.error(f"say what the GPU shall compute with: {remedy}")
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"http storm: seed {seed}", flush=True)
    ways, right = {"storm": list[str]()}, None
    if args.drafters:
        ways = drafter_flags()
        with running_server("demo", *FLAGS) as plain:
            right = right_answers(plain)
    for name, more in ways.items():
        share_s = args.seconds / len(ways)
        seen = storm_over_http(seed, share_s, *flags, *more, name=name, right=right)
        print(f"http storm, {name}: {dict(sorted(seen.items()))}", flush=True)
    for number, (name, more) in zip(range(args.ends), itertools.cycle(ways.items())):
        said = end_under_load(seed + number, *flags, *more)
        print(f"http storm, {name}: {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
