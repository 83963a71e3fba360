"""Measures how fast a plain stream is beside requests that are costly within a step.

One server of the bundled model on the CPU per way to speculate. Of each kind of costly request some
run beside a plain stream, over and over; in turn as many plain requests do. A speed is the stream's
events per second in a window in which the others run; what is compared is the median of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmark.command import make_parser, ratios, store, take_turns
from benchmark.environment import describe_environment
from benchmark.goals import MIN_SPEED_BESIDE_COSTLY
from benchmark.server_process import running_server
from benchmark.sse_client import StreamClient

Body = dict[str, Any]
START_LIMIT_S = 120.0
WARM_S = 0.7  # until what runs beside the stream has begun to decode
PATH = "/generate"
# Some masks of these take 100 ms, or seconds.
WORDS = "root ::= x{0,400}\nx ::= [a-z ]? [a-z ]? [a-z ]? [a-z ]?"
PARSES = 'root ::= s\ns ::= s s | "a" | s s s'
NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]


@dataclass(frozen=True)
class Costly:
    """A kind of costly request.

    Attributes:
        params: of it, given the number of the request, beside those of a plain one.
        fields: of its body, likewise.
        text: its prompt, likewise, and that of the plain requests that it is compared with.
        num_new: tokens of its output, and of those.
        num_prompts: of one request.
        flags: of the server.
    """

    params: Callable[[int], Body] = lambda number: {}
    fields: Callable[[int], Body] = lambda number: {}
    text: Callable[[int], str] = lambda number: "x"
    num_new: int = 2000
    num_prompts: int = 1
    flags: list[str] = field(default_factory=list)

    def body(self, number: int, is_costly: bool) -> Body:
        params: Body = {"max_new_tokens": self.num_new, "temperature": 1, "sampling_seed": 1}
        params |= {"ignore_eos": True}
        texts = [self.text(number)] * self.num_prompts
        body: Body = {"text": texts if self.num_prompts > 1 else texts[0]}
        if is_costly:
            params |= self.params(number)
            body |= self.fields(number)
        return {**body, "sampling_params": params}


def _hard_to_compile(number: int) -> Body:
    return {"regex": f"(a{{0,{900 + number % 50}}}b?){{0,{900 + number // 50}}}c"}


def _novel_text(number: int) -> str:
    draw = random.Random(number)
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz =(+", k=400))


COSTLY = {
    "grammar of optional letters": Costly(lambda _: {"ebnf": WORDS}),
    "8 grammars of optional letters": Costly(lambda _: {"ebnf": WORDS}, num_prompts=8),
    "grammar of many parses": Costly(lambda _: {"ebnf": PARSES}),
    "8 grammars of many parses": Costly(lambda _: {"ebnf": PARSES}, num_prompts=8),
    "new grammars that take long to compile": Costly(_hard_to_compile),
    "8 stop expressions": Costly(
        lambda _: {"stop_regex": [f"({c}|[a-z]{{1,9}})*[0-9]{{20}}!" for c in "abcdefgh"]}
    ),
    "32 stop strings": Costly(lambda _: {"stop": [" " * 200 + str(n) for n in range(32)]}),
    "128 log-probabilities per token": Costly(
        fields=lambda _: {"return_logprob": True, "top_logprobs_num": 128}
    ),
    "128 log-probabilities per token, streamed": Costly(
        fields=lambda _: {"return_logprob": True, "top_logprobs_num": 128, "stream": True}
    ),
    "128 log-probabilities per token of a prompt": Costly(
        fields=lambda _: {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 128},
        num_new=4,
        text=_novel_text,
    ),
    "400 biases": Costly(lambda _: {"logit_bias": {str(token): 0.5 for token in range(400)}}),
    "penalties": Costly(
        lambda _: {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    ),
    "texts that NGRAM has never seen": Costly(text=_novel_text, flags=NGRAM),
}


@asynccontextmanager
async def beside(
    port: int, costly: Costly, is_costly: bool, numbers: Iterator[int]
) -> AsyncIterator[None]:
    """Requests of a kind, or plain ones, one after the other until the block ends."""

    async def run() -> None:
        while True:
            body = json.dumps(costly.body(next(numbers), is_costly)).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                while await reader.read(1 << 20):
                    pass
            finally:
                writer.close()

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def speed(
    port: int, costly: Costly, is_costly: bool, numbers: Iterator[int], window_s: float
) -> float:
    """Events per second of a plain stream beside them."""
    params = {"max_new_tokens": 3500, "temperature": 1, "sampling_seed": 2, "ignore_eos": True}
    body = {"text": "def f(x):", "stream": True, "sampling_params": params}
    async with beside(port, costly, is_costly, numbers):
        client = await StreamClient.connect(port)
        stream = asyncio.create_task(client.generate(json.dumps(body).encode()))
        await asyncio.sleep(WARM_S)
        start, begin = client.num_events, time.perf_counter()
        await asyncio.sleep(window_s)
        found = (client.num_events - start) / (time.perf_counter() - begin)
        is_over = stream.done()
        client.close()
        await asyncio.gather(stream, return_exceptions=True)
    if is_over:
        sys.exit(f"The plain stream ended before its window of {window_s:g} s did.")
    await asyncio.sleep(0.3)  # what was cancelled ends
    return found


def measure(port: int, costly: Costly, arguments: argparse.Namespace) -> Body:
    """Speeds round by round, and the median of their ratios."""
    numbers = itertools.count()

    def run(is_costly: bool) -> float:
        return round(asyncio.run(speed(port, costly, is_costly, numbers, arguments.window_s)), 1)

    speeds = take_turns({each: partial(run, each) for each in (False, True)}, arguments.rounds)
    ratio = statistics.median(ratios(speeds[True], speeds[False]))
    return {
        "plain_events_per_s": speeds[False],
        "costly_events_per_s": speeds[True],
        "plain_median": statistics.median(speeds[False]),
        "costly_median": statistics.median(speeds[True]),
        "ratio": round(ratio, 3),
        "holds": ratio >= MIN_SPEED_BESIDE_COSTLY,
    }


def main() -> None:
    parser = make_parser(__doc__, "costly_requests")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--only", help="kinds whose name has this text")
    arguments = parser.parse_args()
    chosen = {name: kind for name, kind in COSTLY.items() if (arguments.only or "") in name}
    result: Body = {
        **describe_environment(),
        "rounds": arguments.rounds,
        "window_s": arguments.window_s,
        "min_ratio": MIN_SPEED_BESIDE_COSTLY,
        "kinds": {},
    }
    base = [sys.executable, "-m", "sglang.launch_server", "--model-path", "demo", "--device", "cpu"]
    for flags in ([], NGRAM):
        kinds = {name: kind for name, kind in chosen.items() if kind.flags == flags}
        if not kinds:
            continue
        with running_server([*base, *flags], {}, START_LIMIT_S) as server:
            for name, kind in kinds.items():
                found = measure(server.port, kind, arguments)
                result["kinds"][name] = found
                print(f"{name}: {found}", flush=True)
            server.stop()
    store(arguments.out, result)


if __name__ == "__main__":
    main()
