"""Load on an Engine: a constant number of requests at once, and made-up prompts."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

FIRST_PLAIN_ID = 3  # below are the special tokens of the demo models


class AsyncEngine(Protocol):
    """What a load needs of `sglang.Engine`."""

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any: ...

    async def async_abort_request(self, *, abort_all: bool) -> int: ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one run of a load gave.

    Attributes:
        seconds: from the first request to the last answer.
        num_tokens: new tokens of all requests.
        num_steps: steps that the requests took, each counted by itself.
        num_finished: requests that were not ended before their last token.
    """

    seconds: float
    num_tokens: int
    num_steps: int
    num_finished: int

    @property
    def tok_s(self) -> float:
        """New tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Of one request."""
        return self.num_tokens / self.num_steps


async def closed_loop(
    engine: AsyncEngine, prompts: list[list[int]], params: dict[str, Any], num_clients: int
) -> LoadResult:
    """As many clients as there shall be requests at once; each takes the next prompt when its
    answer is there.

    When a client finds no prompt, all other requests are ended and their tokens so far count. So
    the number of requests never falls, and a slow last one does not pass for a slow engine.
    """
    waiting, answers = deque(prompts), list[Any]()
    start = end = time.perf_counter()
    is_over = False

    async def client() -> None:
        nonlocal end, is_over
        while waiting:
            prompt = waiting.popleft()
            answer = await engine.async_generate(input_ids=prompt, sampling_params=params)
            end = time.perf_counter()
            answers.append(answer)
        if not is_over:
            is_over = True
            if len(answers) < len(prompts):
                await engine.async_abort_request(abort_all=True)

    await asyncio.gather(*(client() for _ in range(min(num_clients, len(prompts)))))
    return _sum_up(answers, end - start)


def _sum_up(answers: list[Any], seconds: float) -> LoadResult:
    metas = [answer["meta_info"] for answer in answers]
    lengths = [len(answer["output_ids"]) for answer in answers]
    steps = [
        len(meta["mtp_effective_k"]) if "mtp_effective_k" in meta else length
        for meta, length in zip(metas, lengths, strict=True)
    ]
    aborted = sum((meta["finish_reason"] or {}).get("type") == "abort" for meta in metas)
    return LoadResult(seconds, sum(lengths), max(sum(steps), 1), len(answers) - aborted)


def random_prompts(
    num_prompts: int, num_tokens: int, vocab_size: int, seed: int
) -> list[list[int]]:
    """Prompts that share nothing; the same for the same seed."""
    chooser = random.Random(seed)
    return [
        [chooser.randrange(FIRST_PLAIN_ID, vocab_size) for _ in range(num_tokens)]
        for _ in range(num_prompts)
    ]


@dataclass(frozen=True)
class Budget:
    """How many rounds fit into a time.

    Attributes:
        total_s: for everything since `start_s`.
        start_s: of `time.perf_counter`.
    """

    total_s: float
    start_s: float

    def has_room(self, num_done: int, max_rounds: int, last_round_s: float) -> bool:
        """Whether to begin another round: the first always, later ones if they will end in time."""
        if num_done >= max_rounds:
            return False
        spent = time.perf_counter() - self.start_s
        return num_done == 0 or spent + 1.05 * last_round_s <= self.total_s
