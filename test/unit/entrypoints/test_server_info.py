"""Tests what the start-up summary and `/server_info` say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler_infos import scheduler_info
from serving_utils import make_model_dir
from sglang.srt.entrypoints.server_info import (
    AS_BUILT,
    describe_model,
    describe_server,
    describe_start,
)
from sglang.srt.messages.requests import SchedulerInfo
from sglang.srt.model_config import load_model_config
from sglang.srt.server_args import ServerArgs

RESOLVED: dict[str, Any] = {
    "path": "/models/m",
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "page_size": 1,
    "num_threads": 1,
    "max_total_num_tokens": 100,
    "architecture": "A",
    "model_impl": "own",
    "kv_bytes_per_token": 8,
    "kv_size_reason": "why",
    "num_parameters": 1,
    "weights": "",
    "draft_models": [],
    "draft_tiers": [],
    "context_len": 50,
    "max_queued_requests": None,
    "enable_overlap": True,
    "num_draft_steps": 0,
    "num_draft_tokens": 1,
    "draft_topk": 1,
    "use_radix_cache": True,
}


def info_of(schedule: dict[str, Any]) -> SchedulerInfo:
    return scheduler_info(context_len=50, resolved={**RESOLVED, "schedule": schedule})


def test_server_info_has_accept_thresholds() -> None:
    args = ServerArgs(model_path="m", speculative_accept_threshold_acc=0.5)
    found = describe_server(args, info_of({"chunked_prefill_size": 512}), {})
    assert found["speculative_accept_threshold_single"] == 1.0
    assert found["speculative_accept_threshold_acc"] == 0.5


def test_server_info_has_what_trainers_and_routers_read_of_sglangs_flags() -> None:
    args = ServerArgs(model_path="m", host="h", port=5)
    found = describe_server(args, info_of({"chunked_prefill_size": 512}), {})
    ones = "tp_size", "dp_size", "pp_size", "ep_size", "nnodes"
    assert {found[name] for name in ones} == {1}
    assert (found["node_rank"], found["base_gpu_id"]) == (0, 0)
    assert found["disaggregation_mode"] == "null"
    assert found["enable_memory_saver"] is True
    assert found["trust_remote_code"] is False
    assert (found["host"], found["port"]) == ("h", 5)
    for name, value in AS_BUILT.items():
        ServerArgs(**{"model_path": "m", name: value})  # nothing that would be refused


def test_paths_are_folders_that_another_process_can_open() -> None:
    """`demo` is a name of ours: a client's tokenizer cannot be loaded from it."""
    told = describe_server(
        ServerArgs(model_path="demo"), info_of({"chunked_prefill_size": 512}), {}
    )
    assert (told["model_path"], told["tokenizer_path"]) == ("/models/m", "/models/m")
    assert told["served_model_name"] == "demo"
    model = describe_model(ServerArgs(model_path="demo"), load_model_config("demo"), "v")
    assert model["tokenizer_path"] == model["model_path"]
    assert (Path(model["model_path"]) / "tokenizer.json").is_file()
    own = ServerArgs(model_path="demo", tokenizer_path="/t")
    assert (
        describe_server(own, info_of({"chunked_prefill_size": 512}), {})["tokenizer_path"] == "/t"
    )
    assert describe_model(own, load_model_config("demo"), "v")["tokenizer_path"] == "/t"


def test_a_relative_model_path_is_told_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model_dir(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    config = load_model_config("./model")
    told = describe_model(ServerArgs(model_path="./model"), config, "v")
    assert told["model_path"] == str(tmp_path / "model")


def test_the_summary_says_how_weights_of_8_bits_are_held() -> None:
    info = info_of({"chunked_prefill_size": 512, "splits_prompts": True, "max_step_ms": 0.0})
    info.resolved.update(weights="fp8 in 3 of 4 products")
    lines = describe_start(ServerArgs(model_path="m"), info, {}).splitlines()
    assert "    weights      fp8 in 3 of 4 products" in lines


@pytest.mark.parametrize(("impl", "told"), [("own", "(A, 0.0 M"), ("transformers", "(A, by")])
def test_the_summary_names_code_that_is_not_ours(impl: str, told: str) -> None:
    info = info_of({"chunked_prefill_size": 512, "splits_prompts": True, "max_step_ms": 0.0})
    info.resolved.update(model_impl=impl)
    (line,) = (
        line
        for line in describe_start(ServerArgs(model_path="m"), info, {}).splitlines()
        if line.startswith("    model ")
    )
    assert told in line
    assert ("by transformers' code" in line) == (impl == "transformers")


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ({"max_step_ms": 0.0}, "up to 512 tokens in a step"),
        ({}, "up to 512 tokens in a step; where requests decode, as many as fit into 7.5 ms"),
        (
            {"bounds_streams_alone": True},
            "up to 512 tokens in a step; beside a stream, as many as fit into 7.5 ms",
        ),
        ({"max_step_ms": 0.0, "splits_prompts": False}, "whole, each in one step"),
    ],
)
def test_the_summary_says_how_prompts_are_fed(schedule: dict[str, Any], text: str) -> None:
    schedule = {
        "chunked_prefill_size": 512,
        "splits_prompts": True,
        "max_step_ms": 7.5,
        "bounds_streams_alone": False,
        **schedule,
    }
    lines = describe_start(ServerArgs(model_path="m"), info_of(schedule), {}).splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if "prompts" in line] == [text]


@pytest.mark.parametrize(
    ("tiers", "text"),
    [
        ([3], ["3 in each step"]),
        ([0, 1, 3, 7], ["0, 1, 3 or 7 in a step"]),
        ([0, 1], ["0 or 1 in a step"]),
        ([], []),
    ],
)
def test_the_summary_says_how_many_drafts_there_are(tiers: list[int], text: list[str]) -> None:
    info = info_of({"chunked_prefill_size": 512, "splits_prompts": True, "max_step_ms": 0.0})
    info.resolved.update(draft_tiers=tiers)
    lines = describe_start(ServerArgs(model_path="m"), info, {}).splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("    drafts ")] == text


@pytest.mark.parametrize(
    ("flags", "tiers", "strategy"),
    [
        ({}, [0, 1, 3, 7], "throughput"),
        ({"strategy": "auto"}, [0, 1, 3, 7], "throughput"),
        ({"strategy": "ema"}, [1, 3, 7], "ema"),
        ({"config": "aggressive"}, [1, 3, 7], "ema"),
        ({"config": "aggressive", "strategy": "throughput"}, [0, 1, 3, 7], "throughput"),
        ({}, [3], None),  # as where acceptance is simulated
    ],
)
def test_it_is_told_which_strategy_runs(
    flags: dict[str, str], tiers: list[int], strategy: str | None
) -> None:
    given: Any = {f"speculative_adaptive_{name}": value for name, value in flags.items()}
    algorithm: Any = {"speculative_algorithm": "EAGLE", "speculative_adaptive": True}
    args = ServerArgs(model_path="m", **algorithm, **given)
    info = info_of({"chunked_prefill_size": 512, "splits_prompts": True, "max_step_ms": 0.0})
    info.resolved.update(draft_tiers=tiers, num_draft_steps=3, num_draft_tokens=1 + tiers[-1])
    told = describe_server(args, info, {})
    assert told["speculative_adaptive_strategy"] == strategy
    [line] = [
        line for line in describe_start(args, info, {}).splitlines() if line[4:11] == "drafts "
    ]
    assert line.endswith(f" in a step, by strategy {strategy}" if strategy else "3 in each step")


@pytest.mark.parametrize(
    ("drafters", "text"),
    [
        ({"eagle3": "eagle3", "eagle": "eagle3"}, ["eagle3, as requests name it"]),
        ({"eagle": "eagle", "ngram": "ngram"}, ["eagle or ngram, as requests name them"]),
        ({}, []),
    ],
)
def test_the_summary_has_the_names_of_drafters(drafters: dict[str, str], text: list[str]) -> None:
    info = info_of({"chunked_prefill_size": 512, "splits_prompts": True, "max_step_ms": 0.0})
    info = msgspec.structs.replace(info, drafters=drafters)
    lines = describe_start(ServerArgs(model_path="m"), info, {}).splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line[4:13] == "drafters "] == text


def test_the_summary_says_how_large_trees_are() -> None:
    info = info_of({"chunked_prefill_size": 512, "splits_prompts": True, "max_step_ms": 0.0})
    info.resolved.update(draft_tiers=[5], num_draft_steps=5, num_draft_tokens=8, draft_topk=4)
    assert "    drafts       trees of 7, up to 5 deep\n" in describe_start(
        ServerArgs(model_path="m"), info, {}
    )
    told = describe_server(ServerArgs(model_path="m"), info, {})
    names = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"
    assert [told[name] for name in names] == [5, 4, 8]
