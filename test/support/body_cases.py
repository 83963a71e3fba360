"""Random bodies of `/generate` whose answers must be the same with every drafter and without.

An Engine is asked for a list of bodies at once; `answers` are what a client can see of each that
does not tell how many tokens a step gave. Seeds make sampled answers repeatable.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from interrupted_calls import rid_of
from sglang.srt.entrypoints.engine import Engine

Answer = list[dict[str, Any]]  # of one body, an entry per sample

TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "import os\nimport sys\n\n",
    "[0, 0, 0, 0, 0, 0,",
    "é 😀 漢字 = '",
    "x",
    "class A:\n    def __init__(self, name):\n        self.name = name\n" * 3,
)
GRAMMARS = {"regex", "json_schema"}
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.05},
)
STOPS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"stop": [" return", "\n\n"]},
    {"stop": "e", "no_stop_trim": True},
    {"stop_regex": "[a-z]+\\("},
    {"stop_token_ids": [13, 200, 201]},
)
ADJUSTMENTS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.6, "presence_penalty": 0.2},
    {"logit_bias": {"200": 5.0, "10": -100.0}},
    {"regex": "( = [a-z0-9]+\\n)+"},
    {"json_schema": SCHEMA},
)
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"speculative": {"enabled": False}},
    {"speculative": {"max_drafts": 1}},
)
LENGTHS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True},
    {"min_new_tokens": 5},
    {},
    {"skip_special_tokens": False, "ignore_eos": True},
    {"n": 2},
)
MTP: tuple[dict[str, Any], ...] = (
    {"mtp_k": 2},
    {"mtp_k": 4},
    {"mtp_k": 8, "mtp_strategy": ["conf_adapt", 0.5]},
    {"mtp_k": 8, "mtp_strategy": ["static"]},
)


def draw_bodies(seed: int, count: int) -> list[dict[str, Any]]:
    """Bodies of one text and one set of sampling parameters each."""
    draw = random.Random(seed)
    bodies = []
    for _ in range(count):
        params = {
            "max_new_tokens": draw.choice((1, 2, 7, 16, 24)),
            "sampling_seed": draw.randrange(99),
            **draw.choice(SAMPLINGS),
            **draw.choice(STOPS),
            **draw.choice(ADJUSTMENTS),
            **draw.choice(LENGTHS),
        }
        if GRAMMARS & params.keys():
            params.pop("min_new_tokens", None)  # a grammar says where the output ends
        else:
            params["min_new_tokens"] = min(
                params.get("min_new_tokens", 0), params["max_new_tokens"]
            )
        bodies.append({"text": draw.choice(TEXTS), "sampling_params": params})
    return bodies


def with_mtp(bodies: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The same requests with verified multi-token prediction."""
    draw = random.Random(seed)
    return [
        {
            **body,
            "sampling_params": {
                **body["sampling_params"],
                "mtp_enabled": True,
                "mtp_verify": True,
                **draw.choice(MTP),
            },
        }
        for body in bodies
    ]


def with_choices(bodies: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The same requests, some of which take no drafts, or one in a step."""
    draw = random.Random(seed)
    return [
        {**body, "sampling_params": {**body["sampling_params"], **draw.choice(CHOICES)}}
        for body in bodies
    ]


def answers(engine: Engine, bodies: list[dict[str, Any]], seed: int | None = None) -> list[Answer]:
    """Returns what each body gets.

    Args:
        seed: of rids, by which some of the bodies with one sample may be aborted; None: none may.
    """
    found: list[Answer] = [[] for _ in bodies]
    for num_samples in (1, 2):
        places = [
            place
            for place, body in enumerate(bodies)
            if body["sampling_params"].get("n", 1) == num_samples
        ]
        if not places:
            continue
        may_abort = seed is not None and num_samples == 1
        results = engine.generate(
            prompt=[bodies[place]["text"] for place in places],
            sampling_params=[bodies[place]["sampling_params"] for place in places],
            return_logprob=True,
            return_prompt_token_ids=True,
            rid=[rid_of(seed, place) for place in places] if may_abort else None,
        )
        for index, result in enumerate(results):
            found[places[index // num_samples]].append(_seen(result))
    return found


def _seen(result: dict[str, Any]) -> dict[str, Any]:
    meta = result["meta_info"]
    return {
        "text": result["text"],
        "prompt_ids": result["prompt_token_ids"],
        "output_ids": result["output_ids"],
        "finish_reason": meta["finish_reason"],
        "prompt_tokens": meta["prompt_tokens"],
        "completion_tokens": meta["completion_tokens"],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
    }


def agree(mine: Answer, theirs: Answer, max_gap: float) -> bool:
    """Tells whether two answers are the same. The second one may end early by an abort: then its
    ids and log-probabilities must be the first ones of the other.

    Args:
        max_gap: between log-probabilities.
    """
    for one, other in zip(mine, theirs, strict=True):
        if other["finish_reason"]["type"] == "abort":
            count = len(other["output_ids"])
            one = {**other, **{name: one[name][:count] for name in ("output_ids", "logprobs")}}
        if {**one, "logprobs": None} != {**other, "logprobs": None}:
            return False
        pairs = zip(one["logprobs"], other["logprobs"], strict=True)
        if any(abs(first - second) > max_gap for first, second in pairs):
            return False
    return True


class TextOracle:
    """Texts of outputs by transformers: what the output's ids add to the text of the prompt's."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    def check(self, body: dict[str, Any], found: list[dict[str, Any]]) -> None:
        """
        Raises:
            AssertionError: if a text is another one, or its stop does not follow it.
        """
        params = body["sampling_params"]
        skips = params.get("skip_special_tokens", True)
        for answer in found:
            prompt, output, text = answer["prompt_ids"], answer["output_ids"], answer["text"]
            stop = None if params.get("no_stop_trim") else answer["finish_reason"].get("matched")
            if isinstance(stop, int):
                output = output[:-1]
            before, whole = (
                self._tokenizer.decode(
                    ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
                )
                for ids in (prompt, prompt + output)
            )
            right = whole[len(before) :]
            if "\ufffd" in right:  # a stream divides broken bytes in its own way
                continue
            rest = right[len(text) :]
            if isinstance(stop, str):
                is_right = re.match(stop if "stop_regex" in params else re.escape(stop), rest)
            else:
                is_right = not rest
            seen = f"{body}: {answer}, {right!r}"
            assert right.startswith(text), seen
            assert is_right, seen
