"""Steps 3 and 4 of quickstart.sh: a server of the demo model, and one completion."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmark.server_process import StartError, free_port, is_free, running_server  # noqa: E402

PORT, READY_LIMIT_S = 30000, 180.0
PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
PARAMS = {"max_new_tokens": 96, "temperature": 0}
COMMAND = [sys.executable, "-m", "sglang.launch_server", "--model-path", "demo"]
HOW_TO_GO_ON = """
The server answers at {url}. Try:

  curl -N {url}/generate -H 'Content-Type: application/json' \\
    -d '{{"text": "import os", "sampling_params": {{"max_new_tokens": 64}}, "stream": true}}'

Its log: {log}
Serving. Ctrl-C stops it."""


def choose_port(wanted: int | None) -> int:
    """Gives the wanted port, else PORT, or a free one if that is taken.

    Raises:
        StartError: the wanted port is taken.
    """
    if is_free(wanted or PORT):
        return wanted or PORT
    if wanted is not None:
        raise StartError(f"Port {wanted} is taken by another program: choose another --port.")
    port = free_port()
    print(f"      port {PORT} is taken, so this server uses {port}")
    return port


def stream(url: str) -> None:
    """Writes the prompt and its completion, piece by piece as the server sends it.

    Raises:
        StartError: the stream has an error, or no end.
    """
    body = {"text": PROMPT, "sampling_params": PARAMS, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
    print(PROMPT, end="", flush=True)
    shown, num_tokens, start = 0, 0, time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                print(f"\n\n      {num_tokens} tokens in {time.monotonic() - start:.2f} s")
                return
            event = json.loads(data or "{}")
            if "error" in event:
                raise StartError(f"The server answered: {event['error']}")
            if event:
                print(event["text"][shown:], end="", flush=True)  # `text` is all text so far
                shown, num_tokens = len(event["text"]), event["meta_info"]["completion_tokens"]
    raise StartError("The stream ended without [DONE].")


def serve(port: int, log: Path, is_once: bool) -> None:
    """Starts the server, streams, and serves until Ctrl-C or a signal.

    Raises:
        StartError: the server did not start, answer or end as it should.
    """
    url = f"http://127.0.0.1:{port}"
    # Where Linux can, the server gets SIGTERM when this process is killed outright.
    on_death = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []

    print(f"      python -m sglang.launch_server --model-path demo --port {port}", flush=True)
    with (
        log.open("w", encoding="utf-8") as file,
        running_server([*on_death, *COMMAND], {}, READY_LIMIT_S, port, file) as server,
    ):
        print(f"      ready after {server.healthy_s:.1f} s")
        print("[4/4] One completion, as it is generated (POST /generate)\n")
        try:
            stream(url)
            if not is_once:
                print(HOW_TO_GO_ON.format(url=url, log=log), flush=True)
                raise StartError(f"The server ended by itself with {server.process.wait()}.")
        except KeyboardInterrupt:
            print()
        server.stop()
    print("The server has stopped. Goodbye.")


def main() -> int:
    parser = argparse.ArgumentParser("quickstart.sh", description=__doc__)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    print("[3/4] Server", flush=True)
    try:
        port = choose_port(arguments.port)
        serve(port, Path(sys.prefix, f"server-{port}.log"), arguments.once)
    except (StartError, OSError) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
