"""Helpers of the tests that start processes: a small model directory, a server to talk to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from sglang.srt.process_watch import is_stopped
from target import TARGET

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE, CONTEXT_LEN = 512, 16_384
BOS, EOS, MASK = "<bos>", "<eos>", "<mask>"
DUMMY = ("--load-format", "dummy")
READY_LIMIT_S = 60 if TARGET.device == "cpu" else 300  # a GPU's kernels may have to be compiled
# FlashInfer has kernels for few sizes.
HEAD_DIM = 64 if TARGET.attention_backend == "flashinfer" else 16
ROLES = ("scheduler", "detokenizer")
LONG = 15_000  # tokens: many seconds of work
ENDLESS = {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}
ENDLESS_DEMO = {**ENDLESS, "max_new_tokens": 4000}  # nearly the demo model's context
# Pools that a start fills with zeros: of all requests at the demo model's full context it is 1 GB.
DEMO_TOKENS = 32_768
TEXT = "def main(): return hello world é € 😀 the quick brown fox jumps over the lazy dog"


def make_tokenizer(add_bos: bool = True) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer with BOS 0, EOS 1 and a mask token 2."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 0)]
        )
    return tokenizer


def make_model_dir(
    directory: Path,
    context_len: int = CONTEXT_LEN,
    tokenizer: tokenizers.Tokenizer | None = None,
    **changes: Any,
) -> Path:
    """A model for `--load-format dummy`: config.json and tokenizer.json, no weights.

    Args:
        tokenizer: that of `make_tokenizer` unless given.
        changes: entries of the config.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": context_len,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (tokenizer or make_tokenizer()).save(str(directory / "tokenizer.json"))
    return directory


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_command(model: Path | str, port: int, *flags: str) -> list[str]:
    """The command line of a server."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    if model == "demo" and TARGET.device == "cpu":
        command += ["--max-total-tokens", str(DEMO_TOKENS)]
    return [*command, "--port", str(port), *TARGET.command_line(), *flags]


def environ(**extra: str) -> dict[str, str]:
    """The environment of a server under test; its scheduler checks every step."""
    paths = [*(str(ROOT / path) for path in ("python", "sgl-kernel/python"))]
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*paths, *([inherited] if inherited else [])])
    strict = {"PYTHONPATH": path, "SGLANG_STRICT_INVARIANTS": "1"}
    return {**os.environ, **strict, **extra}


@dataclass
class RunningServer:
    """A server process and a client of it."""

    process: subprocess.Popen[str]
    url: str
    client: httpx.Client

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def generate(self, text: str = "hello", **kwargs: Any) -> httpx.Response:
        """`/generate` with greedy defaults; other keywords are sampling parameters."""
        params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **kwargs}
        return self.post("/generate", {"text": text, "sampling_params": params})

    def internal_state(self) -> dict[str, Any]:
        return self.client.get("/server_info").json()["internal_states"][0]

    def wait_idle(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The scheduler's state once nothing runs or waits."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.internal_state()
            if state["running_batch_size"] == state["waiting_queue_size"] == 0:
                return state
            if time.monotonic() > deadline:
                raise AssertionError(f"Requests still run after {timeout_s} s: {state}")
            time.sleep(0.05)

    def exit_code(self, timeout_s: float = 20.0) -> int:
        return self.process.wait(timeout_s)

    def children(self) -> dict[str, int]:
        """Process ids of the children, by role."""
        import psutil

        found: dict[str, int] = {}
        for child in sorted(psutil.Process(self.process.pid).children(), key=lambda each: each.pid):
            module = child.cmdline()[-1]
            found |= {role: child.pid for role in ROLES if f".{role}_process" in module}
            if ".rank_process" in module:
                found[f"rank {1 + sum(role.startswith('rank') for role in found)}"] = child.pid
        return found


@contextmanager
def running_server(
    model: Path | str, *flags: str, port: int | None = None, **extra: str
) -> Iterator[RunningServer]:
    """A server that answers; stopped, by force if needed, at the end."""
    port = port or free_port()
    process = subprocess.Popen(
        server_command(model, port, *flags),
        env=environ(**extra),
        stderr=subprocess.PIPE,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            _wait_ready(process, client)
            yield RunningServer(process, url, client)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _wait_ready(process: subprocess.Popen[str], client: httpx.Client) -> None:
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"The server ended: {process.communicate()[1]}")
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
        time.sleep(0.05)
    raise AssertionError(f"The server is not ready after {READY_LIMIT_S} s.")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing, and goes on at the end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: is_stopped(pid))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def stream_body(**params: Any) -> dict[str, Any]:
    """A streamed request that runs for long, unless `params` say otherwise."""
    return {"text": "hello", "stream": True, "sampling_params": {**ENDLESS, **params}}


def events(lines: Iterator[str]) -> Iterator[Any]:
    """Chunks of a stream; the last one is the text [DONE]."""
    for line in lines:
        if line:
            assert line.startswith("data: ")
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Runs `work` in a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def wait_until(is_so: Callable[[], bool], *calls: Future[Any], timeout_s: float = 30.0) -> None:
    """Waits until something is so. A call that was to go on meanwhile and has ended is an error at
    once: what is waited for may have been so when nobody looked, and will not be again."""
    deadline = time.monotonic() + timeout_s
    while True:
        ended = [call.exception() or call.result() for call in calls if call.done()]
        if is_so():
            return
        assert not ended, f"ended too early: {ended}"
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        time.sleep(0.01)


def wait_for_running(server: RunningServer, count: int, *calls: Future[Any]) -> None:
    """Waits until `count` requests run; `calls` are those among them that nobody streams. All must
    run until they are stopped, so that no look comes too late."""
    wait_until(lambda: server.internal_state()["running_batch_size"] == count, *calls)


def wait_for_waiting(server: RunningServer, count: int, *calls: Future[Any]) -> None:
    """Waits until `count` requests wait, which none of them may end by itself."""
    wait_until(lambda: server.internal_state()["waiting_queue_size"] == count, *calls)


def open_request(server: RunningServer, body: Any, receive_bytes: int = 4096) -> socket.socket:
    """A client of `/generate` that has sent its request, and reads or leaves when it is told to."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect((host, int(port)))
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    return client


def schedulers_of(pid: int) -> dict[str, psutil.Process]:
    """Finds the `scheduler`, which is rank 0, and `rank 1` among the children of a server."""
    modules = {"rank_process": "rank 1", "scheduler_process": "scheduler"}
    return {
        role: child
        for child in psutil.Process(pid).children()
        for module, role in modules.items()
        if any(word.endswith(module) for word in child.cmdline())
    }
