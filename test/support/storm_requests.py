"""Random requests of the storm: every mode, option and length that a client may ask for."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from sglang.srt.managers.tokenizer_manager import UNSTREAMED_INTERVAL
from sglang.srt.messages.requests import LogprobOptions, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import INT64_MAX, INT64_MIN, SamplingParams
from storm_oracle import MASK, VOCAB_SIZE

STOPS = ("ab", "aa", "f f", "é", "\n", "abcdef", "e")
EXPRESSIONS = ("a+b", "[b-d]{3}", "(ab|ba)c", "é", "e.?f", "\\n\\s*a")
CHOICES = ({"enabled": False}, {"max_drafts": 0}, {"max_drafts": 1}, {"max_drafts": 2})
MAX_K = 8
NUM_FAMILIES = 2


def unstreamed(params: SamplingParams) -> SamplingParams:
    """Returns the parameters that the front end sends for a request that does not stream."""
    return msgspec.structs.replace(params, stream_interval=UNSTREAMED_INTERVAL)


class RequestMaker:
    """Draws requests that fit a scheduler.

    Args:
        max_req_len: prompt plus max_new_tokens at most.
        edges: sizes at whose multiples things change: pages, chunks.
    """

    def __init__(
        self, chooser: random.Random, max_req_len: int, edges: list[int], max_k: int = MAX_K
    ) -> None:
        self._random = chooser
        self._limit = max_req_len
        self._max_k = max_k
        self._edges = [edge for edge in edges if 1 < edge < max_req_len]
        self._families = [self._tokens(max_req_len) for _ in range(NUM_FAMILIES)]
        self._past: list[tuple[list[int], tuple[str, str]]] = []

    def remember(self, request: TokenizedGenerateReqInput, tokens: list[int]) -> None:
        """A whole output, which a later prompt may go on from."""
        known = request.input_ids + tokens
        if len(known) < self._limit:
            self._past.append((known, request.cache_key))

    def request(self, req_id: int) -> TokenizedGenerateReqInput:
        """One request, as the front end would send it."""
        choose, chance = self._random.choice, self._random.random
        num_prompt, max_new = self._lengths()
        prompt = self._prompt(num_prompt)
        cache_key = choose([("", "")] * 8 + [("", "salt"), ("adapter", "")])
        if self._past and chance() < 0.4:  # the next turn of a conversation
            known, cache_key = choose(self._past[-4:])
            prompt = (known + self._tokens(choose([1, 1, 2, 9])))[: self._limit]
            num_prompt = len(prompt)
            max_new = min(max_new, self._limit - num_prompt)
        given = {"max_new_tokens": max_new, **self._params(max_new)}
        params = msgspec.convert(given, SamplingParams)
        problem = params.problem()
        assert problem is None, f"{problem}: {params}"
        logprobs = None
        if chance() < 0.4:
            logprobs = LogprobOptions(
                start_len=choose([num_prompt - 1, 0, self._random.randrange(num_prompt)]),
                top_num=choose([0, 0, 1, 4]),
                token_ids=choose([[], [], [3], [0, 7, 5]]),
            )
        return TokenizedGenerateReqInput(
            req_id=req_id,
            rid=f"{choose('abc')}-{req_id if chance() < 0.8 else 'shared'}",
            input_ids=prompt,
            sampling_params=params if chance() < 0.6 else unstreamed(params),
            logprobs=logprobs,
            hidden_states=choose(["none"] * 6 + ["all", "last"]),
            priority=choose([0, 0, 0, 0, 1, 5, -3]),
            cache_key=cache_key,
        )

    def _lengths(self) -> tuple[int, int]:
        choose, limit = self._random.choice, self._limit
        draw = self._random.random()
        if draw < 0.35:
            num_prompt = self._random.randint(1, min(20, limit))
        elif draw < 0.6 and self._edges:
            edge = choose(self._edges)
            num_prompt = edge * self._random.randint(1, limit // edge) + choose([-1, 0, 1])
        elif draw < 0.8:
            num_prompt = limit - self._random.randint(0, min(40, limit - 1))
        else:
            num_prompt = self._random.randint(1, limit)
        num_prompt = min(max(num_prompt, 1), limit)
        room = limit - num_prompt
        if self._random.random() < 0.25:
            return num_prompt, min(room, 60)
        return num_prompt, min(room, choose([0, 1, 2, 5, 9, 16, 17, 30, 30]))

    def _prompt(self, length: int) -> list[int]:
        """Shares its beginning with others, most often."""
        start = self._random.choice([*self._families, *self._families, []])
        start = start[: self._random.choice([length, length, self._random.randint(0, length)])]
        return start[:length] + self._tokens(max(0, length - len(start)))

    def _params(self, max_new: int) -> dict[str, Any]:
        choose, chance = self._random.choice, self._random.random
        kinds = ["plain", "sampled", *["static", "adaptive", "verified", "verified sampled"] * 2]
        if self._max_k == 1:
            kinds = kinds[:2]
        kind = choose(kinds)
        params: dict[str, Any] = {"temperature": 0.0, "ignore_eos": chance() < 0.5}
        if "sampled" in kind:
            params["temperature"] = choose([0.5, 1.0, 1.7])
            params["sampling_seed"] = choose(
                [0, 1, INT64_MIN, INT64_MAX, self._random.randrange(99)]
            )
            params["top_p"] = choose([1.0, 1.0, 0.9, 0.4])
            params["top_k"] = choose([-1, -1, 3, 1])
            params["min_p"] = choose([0.0, 0.0, 0.1])
        if kind not in ("plain", "sampled"):
            params["mtp_enabled"] = True
            params["mtp_k"] = choose([1, 2, 3, 4, self._max_k, self._max_k])
            params["mtp_verify"] = "verified" in kind
            if kind == "adaptive" or ("verified" in kind and chance() < 0.3):
                params["mtp_strategy"] = ["conf_adapt", choose([0.2, 0.35, 0.6, 0.9])]
        elif chance() < 0.4:
            params["speculative"] = choose(CHOICES)
        if chance() < 0.2 and kind not in ("static", "adaptive"):
            params["repetition_penalty"] = choose([1.0, 1.3, 0.7])
            params["frequency_penalty"] = choose([0.0, 0.4, -0.3])
            params["presence_penalty"] = choose([0.0, 0.5])
        if chance() < 0.15:
            ids = self._random.sample(range(VOCAB_SIZE), 2)
            params["logit_bias"] = {str(i): choose([-100.0, -1.5, 2.0, 100.0]) for i in ids}
        if chance() < 0.15:
            params["min_new_tokens"] = self._random.randint(0, max_new)
        if chance() < 0.15:
            params["stop_token_ids"] = self._random.sample(range(VOCAB_SIZE), 2)
        if chance() < 0.15:
            params["stop"] = choose([choose(STOPS), self._random.sample(STOPS, 2)])
        if chance() < 0.1:
            params["stop_regex"] = choose([choose(EXPRESSIONS), list(EXPRESSIONS[:2])])
        if chance() < 0.2 and kind not in ("static", "adaptive"):
            params["regex"] = choose(EXPRESSIONS)
            params.pop("min_new_tokens", None)
        if chance() < 0.15:
            params["stream_interval"] = choose([1, 2, 7])
        return params

    def _tokens(self, count: int) -> list[int]:
        """Mostly of the alphabet; a client may send the mask, too."""
        top = VOCAB_SIZE if self._random.random() < 0.05 else MASK
        return [self._random.randrange(top) for _ in range(count)]
