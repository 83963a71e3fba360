"""Engines and servers whose model is held by two processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import sglang
from serving_utils import running_server, schedulers_of

pytestmark = pytest.mark.long_matrix

PROMPTS = ["def add(a, b):\n    return", "import os\n\nclass Foo(", "for i in range("]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24}
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],'
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": {"temperature": 1.0, "max_new_tokens": 24, "sampling_seed": 5},
    "verified masks": {**GREEDY, "mtp_enabled": True, "mtp_verify": True, "mtp_k": 4},
    "masks": {**GREEDY, "mtp_enabled": True, "mtp_strategy": ["conf_adapt", 0.9]},
    "a schema": {**GREEDY, "json_schema": SCHEMA + '"additionalProperties":false}'},
    "penalties": {**GREEDY, "frequency_penalty": 0.7},
}
ENDS_S = 10.0
PAIR = {
    "speculative_algorithm": "EAGLE3,NGRAM",
    "speculative_draft_model_path": "demo-eagle3",
    "speculative_load_aware": "off",
    "tile_spec": True,
    "enable_return_hidden_states": True,
}


def engine(num_ranks: int, **flags: Any) -> sglang.Engine:
    return sglang.Engine(
        model_path="demo", tp_size=num_ranks, num_threads=1, max_total_tokens=2048, **flags
    )


def answers(engine: sglang.Engine, kinds: dict[str, dict[str, Any]]) -> dict[str, list[list[int]]]:
    return {
        kind: [each["output_ids"] for each in engine.generate(PROMPTS, params)]
        for kind, params in kinds.items()
    }


@pytest.fixture(scope="module")
def right() -> dict[str, list[list[int]]]:
    """Returns the answers of one rank."""
    with engine(1) as one:
        return answers(one, KINDS)


def test_two_ranks_answer_as_one_and_take_control_calls(right: dict[str, list[list[int]]]) -> None:
    """The gaps of these prompts are wide: no near-tie."""
    with engine(2) as two:
        assert answers(two, KINDS) == right
        state = two.get_server_info()["internal_states"][0]
        assert (state["orphan_token_count"], state["legacy_missing_tokens"]) == (0, 0)
        whole = two.get_weights_by_name("model.layers.0.self_attn.q_proj.weight", 2048)
        assert (len(whole), len(whole[0])) == (512, 256)
        two.pause_generation(mode="retract")
        two.release_memory_occupation()
        two.resume_memory_occupation()
        two.update_weights_from_disk("demo")
        two.continue_generation()
        two.flush_cache()
        assert answers(two, {"greedy": GREEDY})["greedy"] == right["greedy"]


def test_a_head_and_n_grams_draft_over_two_ranks(
    right: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """Each rank measures prices alone. The second time the texts are known."""
    lossless = {kind: KINDS[kind] for kind in ("greedy", "seeded", "a schema", "penalties")}
    with engine(2, **PAIR, tile_spec_cache_dir=str(tmp_path)) as two:
        assert [path.name for path in tmp_path.iterdir()] == ["tiny-code_cpu_tp2"]
        for _ in range(2):
            assert answers(two, lossless) == {kind: right[kind] for kind in lossless}
        choices = ({"enabled": False}, {"drafter": "ngram"}, {"drafter": "eagle", "max_drafts": 1})
        for choice in choices:
            chosen = two.generate(PROMPTS, {**GREEDY, "speculative": choice})
            assert [each["output_ids"] for each in chosen] == right["greedy"]
        states = two.generate(PROMPTS[0], GREEDY, return_hidden_states=True)
        assert len(states["meta_info"]["hidden_states"]) == GREEDY["max_new_tokens"]
        assert states["meta_info"]["spec_accept_length"] > 1
        down = torch.tensor(two.get_weights_by_name("draft.midlayer.mlp.down_proj.weight", 2048))
        two.check_weights(action="snapshot", selector="all")
        name = "model.layers.1.mlp.down_proj.weight"
        whole = torch.tensor(two.get_weights_by_name(name, 2048))
        zeros = [("draft.midlayer.mlp.down_proj.weight", down * 0), (name, whole * 0)]
        two.update_weights_from_tensor(zeros, selector="all")
        assert answers(two, {"greedy": GREEDY})["greedy"] != right["greedy"]
        assert not torch.tensor(two.get_weights_by_name(name, 2048)).any()
        two.update_weights_from_tensor([(zeros[0][0], down), (name, whole)], selector="all")
        assert two.check_weights(action="compare", selector="all")["success"]
        assert answers(two, {"greedy": GREEDY})["greedy"] == right["greedy"]


@pytest.fixture
def family() -> Iterator[list[psutil.Process]]:
    """Processes that a test adds must be gone after it."""
    processes: list[psutil.Process] = []
    yield processes
    _, alive = psutil.wait_procs(processes, timeout=ENDS_S)
    assert not alive


@pytest.mark.parametrize(
    ("victim", "number", "reason"),
    [
        ("rank 1", signal.SIGKILL, "The rank 1 process ended with signal 9"),
        ("rank 1", signal.SIGSTOP, "The rank 1 process has been stopped for 3 s"),
        ("scheduler", signal.SIGKILL, "The scheduler process ended with signal 9"),
    ],
)
def test_a_rank_that_is_gone_or_stopped_ends_the_server(
    victim: str, number: signal.Signals, reason: str, family: list[psutil.Process]
) -> None:
    with running_server("demo", "--tp-size", "2", "--num-threads", "1") as server:
        children = schedulers_of(server.process.pid)
        family += children.values()
        environ = children["rank 1"].environ()
        assert environ["NCCL_NVLS_ENABLE"] == "0"
        assert environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        os.kill(children[victim].pid, number)
        assert reason in server.process.communicate(timeout=ENDS_S)[1]
        assert server.process.returncode != 0


def test_an_interrupt_leaves_nothing(family: list[psutil.Process]) -> None:
    with running_server("demo", "--tp", "2", "--num-threads", "1") as server:
        family += schedulers_of(server.process.pid).values()
        assert len(family) == 2
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(ENDS_S) == 0
