"""Transformers' modelling code in an Engine: all around the model works as with our own file."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

import sglang

PROMPT = "import os\n\ndef "
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
EXPRESSION = "[a-c]{4}[0-9]+"
FLAGS: dict[str, Any] = {"device": "cpu", "log_level": "warning", "max_running_requests": 4}


def answers_of(impl: str) -> dict[str, Any]:
    """Asks for log-probabilities, penalties and a grammar; pauses in the middle of an answer."""
    with sglang.Engine(model_path="demo", model_impl=impl, **FLAGS) as engine:
        assert engine.get_server_info()["resolved"]["model_impl"] == impl
        asked = engine.generate(
            PROMPT, GREEDY, return_logprob=True, top_logprobs_num=2, logprob_start_len=0
        )
        penalized = engine.generate(PROMPT, {**GREEDY, "frequency_penalty": 0.5})
        matched = engine.generate(PROMPT, {**GREEDY, "ignore_eos": False, "regex": EXPRESSION})
        later: list[Any] = []
        params = {**GREEDY, "max_new_tokens": 200}
        thread = threading.Thread(target=lambda: later.append(engine.generate(PROMPT, params)))
        thread.start()
        engine.pause_generation(mode="retract")
        engine.update_weights_from_disk("demo")
        engine.continue_generation()
        thread.join()
    meta = asked["meta_info"]
    logprobs = [value for name in ("input", "output") for value in meta[f"{name}_token_logprobs"]]
    return {
        "tokens": [each["output_ids"] for each in (asked, penalized, matched, later[0])],
        "text": matched["text"],
        "logprobs": [value for value, *_ in logprobs if value is not None],
    }


def test_answers_are_those_of_our_own_file() -> None:
    own, other = answers_of("own"), answers_of("transformers")
    assert other["tokens"] == own["tokens"]
    assert re.match(EXPRESSION, other["text"])
    assert len(other["logprobs"]) > GREEDY["max_new_tokens"]
    assert other["logprobs"] == pytest.approx(own["logprobs"], abs=1e-4)
