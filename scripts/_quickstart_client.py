"""Does what quickstart.sh asks of the server: a free port, readiness, one streamed completion.

Standard library only, so that it runs before anything else is known to work.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request

PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
MAX_NEW_TOKENS = 96


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def choose_port(wanted: int, *, must_be_wanted: bool) -> int:
    """Prints the port to use: the wanted one, or a free one if another may be taken."""
    if is_free(wanted):
        print(wanted)
        return 0
    if must_be_wanted:
        print(f"port {wanted} is taken by another program", file=sys.stderr)
        return 1
    with socket.socket() as any_free:
        any_free.bind(("127.0.0.1", 0))
        print(any_free.getsockname()[1])
    return 0


def wait_ready(url: str, pid: int, timeout_s: float) -> int:
    """Waits for /health to answer 200 while the process `pid` lives."""
    start = time.monotonic()
    next_line = 10.0  # s; without a terminal a line every 10 s shows that we still wait
    while (elapsed := time.monotonic() - start) < timeout_s:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    print(f"\r      ready after {elapsed:.1f} s")
                    return 0
        except (urllib.error.URLError, OSError):
            pass  # not listening yet, or still loading (503)
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            print("\r      the server ended before it was ready", file=sys.stderr)
            return 1
        if sys.stdout.isatty():
            print(f"\r      waiting: {elapsed:.0f} s", end="", flush=True)
        elif elapsed >= next_line:
            print(f"      waiting: {elapsed:.0f} s", flush=True)
            next_line += 10.0
        time.sleep(0.1)
    print(f"\r      not ready within {timeout_s:.0f} s", file=sys.stderr)
    return 1


def stream(url: str) -> int:
    """Writes the prompt and its completion, piece by piece as the server sends it."""
    body = {
        "text": PROMPT,
        "sampling_params": {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0},
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    print(PROMPT, end="", flush=True)
    shown, num_tokens, start = 0, 0, time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as response:
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                elapsed = time.monotonic() - start
                print(f"\n\n      {num_tokens} tokens in {elapsed:.2f} s", flush=True)
                return 0
            event = json.loads(data)
            if "error" in event:
                print(f"\nthe server answered: {event['error']}", file=sys.stderr)
                return 1
            print(event["text"][shown:], end="", flush=True)  # `text` is all text so far
            shown = len(event["text"])
            num_tokens = event["meta_info"]["completion_tokens"]
    print("\nthe stream ended without [DONE]", file=sys.stderr)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    port = commands.add_parser("port")
    port.add_argument("wanted", type=int)
    port.add_argument("--must", action="store_true", help="fail if the port is taken")
    ready = commands.add_parser("ready")
    ready.add_argument("url")
    ready.add_argument("pid", type=int)
    ready.add_argument("timeout_s", type=float)
    commands.add_parser("stream").add_argument("url")
    args = parser.parse_args()
    try:
        match args.command:
            case "port":
                return choose_port(args.wanted, must_be_wanted=args.must)
            case "ready":
                return wait_ready(args.url, args.pid, args.timeout_s)
            case _:
                return stream(args.url)
    except KeyboardInterrupt:
        return 130
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")
        print(f"\nthe server answered {error.code}: {reason}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"\nno answer from the server: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
