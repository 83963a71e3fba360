"""Compares the bundled model with its weights in 8 bits: perplexity of held-out code, and the
accept lengths of its mask tokens and heads.

    python -m benchmark.measure.fp8_quality

All of it runs on a CPU in some minutes. An accept length is the number of tokens of a step, over
the greedy outputs of the same prompts; heads themselves stay as they are.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

import sglang
from benchmark.command import make_parser, store
from benchmark.environment import describe_environment
from benchmark.held_out import held_out_prompts
from benchmark.mtp_model import HEADS, STANDALONE
from sglang.srt.model_config import resolve_model_path

MODEL, SEED = "demo", 0
MTP = {"mtp_enabled": True, "mtp_verify": True, "mtp_k": 8}
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "fp8": {"quantization": "fp8"}}
DRAFTS = {"speculative_num_steps": 4, "speculative_load_aware": "off"}
FIXED_MASKS = "SGLANG_MTP_FIXED_K"  # each step predicts as many, whatever they are worth


def perplexity(flags: dict[str, Any], prompts: list[list[int]]) -> float:
    """Returns exp of the mean loss of all tokens but the first of each prompt."""
    with sglang.Engine(model_path=MODEL, log_level="error", **flags) as engine:
        params = {"temperature": 0.0, "max_new_tokens": 1}
        asked = {"return_logprob": True, "logprob_start_len": 0}
        answers = engine.generate(input_ids=prompts, sampling_params=params, **asked)
    losses = [
        -logprob
        for answer in answers
        for logprob, *_ in answer["meta_info"]["input_token_logprobs"]
        if logprob is not None
    ]
    return math.exp(math.fsum(losses) / len(losses))


def accept_length(flags: dict[str, Any], prompts: list[list[int]], num_new: int) -> float:
    """Returns tokens of a step."""
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": num_new, "ignore_eos": True}
    if "speculative_algorithm" not in flags:
        params |= MTP
    with sglang.Engine(model_path=MODEL, log_level="error", **flags) as engine:
        engine.generate(input_ids=prompts, sampling_params=params)
        (state,) = engine.get_server_info()["internal_states"]
    return float(state["avg_spec_accept_length"])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures each figure with both forms of weights."""
    folder = resolve_model_path(MODEL)
    count, num_new = arguments.prompts, arguments.new_tokens
    prompts, source = held_out_prompts(folder, count, arguments.prompt_tokens, SEED)
    heads = {algorithm: path for algorithm, path in HEADS.items() if algorithm != STANDALONE}
    drafters: dict[str, dict[str, Any]] = {"mask tokens": {}}
    for algorithm, path in heads.items():
        drafter = {"speculative_algorithm": algorithm, "speculative_draft_model_path": path}
        drafters[algorithm] = {**drafter, **DRAFTS}
    found = {
        "perplexity": {way: perplexity(flags, prompts) for way, flags in WAYS.items()},
        **{
            f"accept length, {name}": {
                way: accept_length({**flags, **drafter}, prompts, num_new)
                for way, flags in WAYS.items()
            }
            for name, drafter in drafters.items()
        },
    }
    figures = {
        name: {**values, "ratio": values["fp8"] / values["plain"]} for name, values in found.items()
    }
    return {"prompts": source, "new_tokens": num_new, "figures": figures}


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = make_parser(__doc__, "fp8_quality")
    parser.add_argument("--prompts", type=int, default=320)
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    os.environ[FIXED_MASKS] = "1"
    result = {**describe_environment(), **measure(arguments)}
    for name, row in result["figures"].items():
        print(f"{name:28} {row['plain']:8.4f} {row['fp8']:8.4f} {row['ratio']:8.4f}")
    store(arguments.out, result)


if __name__ == "__main__":
    main()
