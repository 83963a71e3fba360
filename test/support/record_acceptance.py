"""Writes `recorded_acceptance.json`: how many drafts of the bundled head are right at each place of
answers of the bundled model, by kind of text and seed. One string per answer, one digit per token:
of NUM_DRAFTS drafts that begin there so many are right.

    PYTHONPATH=.:python:sgl-kernel/python:test:test/support python test/support/record_acceptance.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmark.engine_load import random_prompts
from benchmark.experiments import HOT
from benchmark.held_out import held_out_prompts
from draft_heads import EAGLE3
from drafted_serving import Drafted
from eagle_models import eagle_config_for
from round_serving import On, runners, setup_of, zero
from sglang.srt.messages.control import AbortReq
from sglang.srt.model_config import load_model_config, resolve_model_path

RECORDED = Path(__file__).with_name("recorded_acceptance.json")
TEXTS = (("unpredictable", 1008, 64), ("unpredictable", 2008, 64), ("predictable", 1008, 32))
NUM_PROMPT, NUM_NEW, NUM_DRAFTS = 64, 128, 7


def serving() -> Drafted:
    """The bundled model and head, which verifies NUM_DRAFTS drafts in each step."""
    paths = {name: Path(resolve_model_path(name)) for name in ("demo", "demo-eagle3")}
    setup = replace(
        setup_of(),
        num_pages=64 * 400,
        context_len=512,
        max_decode_rows=1 + 2 * NUM_DRAFTS,
        chunked_prefill_size=2048,
        max_running_requests=64,
    )
    drafter = eagle_config_for(paths["demo"], paths["demo-eagle3"], EAGLE3, NUM_DRAFTS, "fixed")
    group = runners({"target": paths["demo"]}, drafter, setup, On("cpu", "torch_native"))
    zero(group)
    return Drafted(group, drafter, setup)


def prompts_of(kind: str, seed: int, count: int) -> list[list[int]]:
    if kind == "unpredictable":
        return random_prompts(count, NUM_PROMPT, load_model_config("demo").vocab_size, seed)
    return held_out_prompts(resolve_model_path("demo"), count, NUM_PROMPT, seed)[0]


def first_rounds(harness: Drafted, ids: list[str]) -> list[int]:
    """Right drafts of the first step of each request that verifies any. Then it is aborted."""
    found: dict[str, int] = {}
    while not harness.is_idle:
        harness.step()
        for request in harness.scheduler.lifecycle.running:
            if request.req_id not in found and sum(request.accept_histogram) == 1:
                found[request.req_id] = request.accept_histogram.index(1)
                harness.inbox.messages.append(AbortReq(req_ids=[request.req_id]))
    return [found[each] for each in ids]


def record(kind: str, seed: int, count: int) -> list[str]:
    """One string per answer."""
    harness, prompts = serving(), prompts_of(kind, seed, count)
    params: dict[str, Any] = {"ignore_eos": True, "temperature": 0, "max_new_tokens": NUM_NEW}
    if kind == "unpredictable":
        params |= {"temperature": HOT, "sampling_seed": seed}
    outputs = harness.generate(prompts, **params | {"max_new_tokens": NUM_NEW + NUM_DRAFTS + 2})
    rows = []
    for prompt, output in tqdm(list(zip(prompts, outputs, strict=True)), desc=kind, unit="answer"):
        # The prompt's own step gives one token; the drafts behind it are the first ones.
        asked = params | {"max_new_tokens": NUM_DRAFTS + 5}
        ids = [harness.submit(prompt + output[:place], **asked) for place in range(NUM_NEW)]
        rows.append("".join(map(str, first_rounds(harness, ids))))
    return rows


def main() -> None:
    """Some minutes."""
    torch.set_num_threads(1)
    found = {f"{kind} {seed}": record(kind, seed, count) for kind, seed, count in TEXTS}
    RECORDED.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
