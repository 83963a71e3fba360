"""Draft heads of published layouts on a CUDA GPU: they compute what an oracle does, with graphs as
without; a head changes under graphs while requests run; files of hidden states are the model's."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import sglang
from block_heads import BLOCK_CASES, IDS, BlockCase, BlockOracle, write_block_head
from draft_heads import DFLASH, FILE, Oracle, Sizes
from head_feeding import CPU, make_pair, run_a_round, run_blocks
from head_layouts import CASES, HeadCase
from head_rounds import MAX_ROWS, Rounds, make_head
from sglang.srt.model_config import load_model_config, resolve_model_path
from utils import make_random_llama

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

ON_GPU = {"device": "cuda", "attention_backend": "triton"}
TOLERANCE = 2e-3  # of float32 on a GPU
# Those that compute something that others do not.
FAMILIES = {
    "yuhuili EAGLE3",
    "lmsys, the target's vocabulary",
    "a whole output head of its own",
    "EAGLE with an embedding and a head",
    "yuhuili EAGLE-Qwen2",
    "NVIDIA gpt-oss",
    "EAGLE-3.1",
    "RedHat, nested",
    "speculators, EAGLE-3.1 of 2 layers",
    "3 layers of EAGLE",
    "a target of another width",
    "P-EAGLE of 4 layers",
    "speculators, P-EAGLE",
    "norms of queries and keys",
    "biases",
}
EACH = pytest.mark.parametrize(
    "case", [case for case in CASES if case.layout in FAMILIES], ids=lambda case: case.layout
)
NUM_NEW, NUM_REQUESTS = 96, 8
PROMPTS = ["def add(a, b):\n", "import os\n", "class Stack:\n", "for i in range(10):\n"]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Targets of 8 layers, by hidden size."""
    folder = tmp_path_factory.mktemp("targets")
    return {
        size: make_random_llama(
            folder / str(size), num_hidden_layers=8, tie_word_embeddings=False, hidden_size=size
        )
        for size in (64, 96)
    }


def test_each_family_is_a_case() -> None:
    assert {case.layout for case in CASES} >= FAMILIES


@EACH
def test_a_head_equals_the_oracle(case: HeadCase, targets: dict[int, Path], tmp_path: Path) -> None:
    folder, target = case.write(tmp_path / "head"), targets[case.target_hidden]
    pair = make_pair(target, folder, case.kind, on={**CPU, **ON_GPU})
    right = pair.oracle
    facts, tensors = case.oracle_facts, case.tensors()
    pair.oracle = Oracle(tmp_path, right.embedding, right.output, facts, tensors)
    run_a_round(pair, case.kind, TOLERANCE)


@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda case: case.layout)
def test_a_head_of_blocks_equals_the_oracle(
    case: BlockCase, targets: dict[int, Path], tmp_path: Path
) -> None:
    pair = make_pair(targets[64], case.write(tmp_path / "head"), DFLASH, on={**CPU, **ON_GPU})
    right, tensors = pair.oracle, case.tensors()
    pair.oracle = BlockOracle(tmp_path, right.embedding, right.output, case.facts, tensors)
    run_blocks(pair, TOLERANCE)


@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda case: case.layout)
def test_blocks_with_graphs_equal_blocks_without(
    case: BlockCase, targets: dict[int, Path], tmp_path: Path
) -> None:
    folder = case.write(tmp_path / "head")
    graphs, eager = (
        make_head(targets[64], folder, DFLASH, 16, dtype="float32", max_graph_width=n, **ON_GPU)
        for n in (MAX_ROWS, 0)
    )
    pair = Rounds(graphs, eager, TOLERANCE)
    for num_reqs in (1, 3):
        pair.run(num_reqs)
    assert pair.seen["drafts"] > 20
    assert pair.seen["near-ties"] < 5


@EACH
def test_rounds_with_graphs_equal_rounds_without(
    case: HeadCase, targets: dict[int, Path], tmp_path: Path
) -> None:
    folder, target = case.write(tmp_path / "head"), targets[case.target_hidden]
    graphs, eager = (
        make_head(target, folder, case.kind, 1, dtype="float32", max_graph_width=width, **ON_GPU)
        for width in (MAX_ROWS, 0)
    )
    pair = Rounds(graphs, eager, TOLERANCE)
    for num_reqs in (1, 3):
        pair.run(num_reqs)
    assert pair.seen["drafts"] > 20
    assert pair.seen["near-ties"] < 5


def answers(engine: sglang.Engine) -> list[dict[str, Any]]:
    params = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
    found: list[dict[str, Any]] = engine.generate(PROMPTS, params)
    return found


def accept_length(told: list[dict[str, Any]]) -> float:
    return sum(each["meta_info"]["spec_accept_length"] for each in told) / len(told)


def noisy_copy(head: Path, folder: Path) -> Path:
    """The head with noise in the matrix that its inputs go through."""
    shutil.copytree(head, folder)
    tensors = load_file(folder / FILE)
    weight = tensors["fc.weight"].float()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    tensors["fc.weight"] = (weight + 3 * weight.std() * noise).to(tensors["fc.weight"])
    save_file(tensors, folder / FILE)
    return folder


def test_a_head_changes_while_requests_run(tmp_path: Path) -> None:
    """Graphs go on with the new weights: a noisy head guesses worse, and the old one as before."""
    worse = noisy_copy(resolve_model_path("demo-eagle"), tmp_path / "worse")
    good = str(resolve_model_path("demo-eagle"))
    with sglang.Engine(
        model_path="demo",
        dtype="float32",
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=good,
        speculative_load_aware="off",
        disable_radix_cache=True,
        max_running_requests=4 * len(PROMPTS),
        max_total_tokens=8192,
        log_level="error",
    ) as engine:
        right = answers(engine)
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(answers, engine) for _ in range(NUM_REQUESTS)]
            for number in range(2 * NUM_REQUESTS):
                folder = good if number % 2 else str(worse)
                engine.update_weights_from_disk(folder, selector="draft")
            told = [each.result() for each in running]
        again = answers(engine)
        engine.update_weights_from_disk(str(worse), selector="draft")
        wrong = answers(engine)
    tokens = [each["output_ids"] for each in right]
    for found in (*told, again, wrong):
        assert [each["output_ids"] for each in found] == tokens
    assert accept_length(again) == pytest.approx(accept_length(right), abs=0.02)
    assert accept_length(wrong) < accept_length(right) - 0.3


def write_head_for_the_demo(folder: Path) -> Path:
    """A head of DFlash of random weights, whose drafts are nearly all wrong."""
    target = load_model_config("demo")
    shape = (target.hidden_size, target.intermediate_size, target.num_heads)
    sizes = Sizes(*shape, target.num_kv_heads, target.head_dim, target.vocab_size)
    options = {IDS: [0, target.num_layers - 2]}
    return write_block_head(folder, 0, sizes, block_size=8, dflash_config=options)


@pytest.mark.parametrize("policy", ["on", "off"])
def test_a_server_with_a_head_of_blocks_gives_plain_tokens(tmp_path: Path, policy: str) -> None:
    """In float32, with graphs of rounds; greedy and seeded."""
    head = write_head_for_the_demo(tmp_path / "head")
    params = [
        {"temperature": heat, "sampling_seed": 5, "max_new_tokens": NUM_NEW, "ignore_eos": True}
        for heat in (0, 0, 0.8, 0.8)
    ]
    found = []
    for more in (
        {},
        {
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": str(head),
            "speculative_load_aware": policy,
        },
    ):
        with sglang.Engine(
            model_path="demo",
            dtype="float32",
            max_running_requests=len(PROMPTS),
            max_total_tokens=8192,
            log_level="error",
            **more,
        ) as engine:
            found.append([each["output_ids"] for each in engine.generate(PROMPTS, params)])
    assert found[0] == found[1]


def read_states(path: str) -> tuple[torch.Tensor, list[int]]:
    """The rows of a file, and its layers."""
    with safe_open(path, "pt") as file:
        layers = [int(layer) for layer in file.metadata()["layers"].split(",")]
        return file.get_tensor("hidden_states"), layers


@pytest.mark.parametrize("algorithm", [None, "EAGLE3"])
def test_files_of_hidden_states_are_the_models(tmp_path: Path, algorithm: str | None) -> None:
    """Those of a transformers model in float32, with bfloat16's rounding."""
    from transformers import AutoModelForCausalLM

    head: dict[str, Any] = {"speculative_algorithm": algorithm, "speculative_load_aware": "off"}
    head |= {"speculative_draft_model_path": "demo-eagle3", "max_running_requests": 4}
    chooser = random.Random(0)
    prompts = [[chooser.randrange(3, 4096) for _ in range(count)] for count in (1, 7, 40)]
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    with sglang.Engine(
        model_path="demo",
        dtype="bfloat16",
        hidden_states_folder=str(tmp_path),
        max_total_tokens=8192,
        log_level="error",
        **(head if algorithm else {}),
    ) as engine:
        told = engine.generate(
            input_ids=prompts, sampling_params=params, return_hidden_states="file"
        )
        written = [read_states(answer["meta_info"]["hidden_states_file"]) for answer in told]
    oracle = AutoModelForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float32)
    for prompt, answer, (rows, layers) in zip(prompts, told, written, strict=True):
        assert rows.dtype == torch.bfloat16
        ids = torch.tensor([prompt + answer["output_ids"][:-1]])
        with torch.inference_mode():
            states = oracle(ids, output_hidden_states=True).hidden_states
        right = torch.stack([states[layer][0] for layer in layers], 1)
        assert rows.shape == right.shape
        gaps = (rows.float() - right).norm(dim=2) / right.norm(dim=2)
        assert gaps.max() < 0.05
