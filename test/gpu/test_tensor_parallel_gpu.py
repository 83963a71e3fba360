"""Engines and servers whose model is held by two GPUs answer as those of one."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from safetensors.torch import save_file

import sglang
from benchmark.random_model import LLAMA_8B
from serving_utils import running_server, schedulers_of
from sglang.srt.model_config import resolve_model_path
from target import MAX_GAPS
from utils import VOCAB_SIZE, make_random_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

NUM_PROMPTS, MOST_TIES = 50, 0.02  # share of prompts that a near-tie may divide
NUM_TOKENS, NUM_LAYERS = 32, 2
MASK = 127_999
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
VERIFIED = {**GREEDY, "mtp_enabled": True, "mtp_verify": True, "mtp_k": 4}
UNVERIFIED = {**GREEDY, "mtp_enabled": True, "mtp_k": 3}
SEEDED = {**GREEDY, "temperature": 1.0, "sampling_seed": 5}
NGRAM = {"speculative_algorithm": "NGRAM"}
TOKENIZER = {"tokenizer_path": str(resolve_model_path("demo"))}
ENDS_S = 15.0


class Way(NamedTuple):
    """An Engine of two ranks, and the requests whose answers are compared; with the bundled model
    alone if its flags name what drafts for that."""

    flags: dict[str, Any]
    kinds: dict[str, dict[str, Any]]
    is_bundled: bool = False


DRAWN = {"greedy": GREEDY, "seeded": SEEDED}
DRAFTERS = {
    "EAGLE": "demo-eagle",
    "EAGLE3": "demo-eagle3",
    "NEXTN": "demo-nextn",
    "STANDALONE": "demo-draft",
}
MASKS = {"greedy": GREEDY, "seeded": SEEDED, "verified": VERIFIED, "unverified": UNVERIFIED}
WAYS = {
    "graphs": Way({}, MASKS),
    "no graphs": Way({"disable_cuda_graph": True}, MASKS),
    "n-grams": Way(NGRAM, DRAWN),
    **{
        f"{algorithm} {path}": Way(
            {"speculative_algorithm": algorithm, "speculative_draft_model_path": path},
            DRAWN,
            is_bundled=True,
        )
        for algorithm, path in DRAFTERS.items()
    },
}


class Answers(NamedTuple):
    """Tokens of each prompt, and the gap between the two best logits at each of them."""

    tokens: list[list[int]]
    gaps: list[list[float]]


def engine(path: str, num_ranks: int, **flags: Any) -> sglang.Engine:
    values: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "max_total_tokens": 16_384,
        "max_running_requests": 32,
        "log_level": "warning",
    }
    return sglang.Engine(model_path=path, tp_size=num_ranks, **values, **flags)


def prompts_of(path: str) -> list[Any]:
    if path == "demo":
        text = Path(json.__file__).with_name("decoder.py").read_text(encoding="utf-8")
        step = len(text) // (NUM_PROMPTS + 1)
        return [text[index * step :][:300] for index in range(NUM_PROMPTS)]
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_PROMPTS, 48)
    return torch.randint(3, MASK, shape, generator=generator).tolist()  # type: ignore[no-any-return]


def ask(served: sglang.Engine, path: str, params: dict[str, Any], **more: Any) -> Any:
    name = "prompt" if path == "demo" else "input_ids"
    return served.generate(**{name: prompts_of(path)}, sampling_params=params, **more)


@pytest.fixture(scope="module", params=["demo", "Llama 8B, two layers"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "demo":
        return "demo"
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return str(folder)


def write_model(folder: Path) -> None:
    """Random weights with the sizes of an 8B Llama, but few layers."""
    geo = LLAMA_8B
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "mtp_mask_token_id": MASK,
        **geo.hf_config(),
        "num_hidden_layers": NUM_LAYERS,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    size, inner, generator = geo.hidden_size, geo.intermediate_size, torch.Generator("cuda")
    kv_size = geo.num_kv_heads * geo.head_dim
    shapes = {"model.embed_tokens": (geo.vocab_size, size), "lm_head": (geo.vocab_size, size)}
    for layer in range(NUM_LAYERS):
        names = {
            "self_attn.q_proj": (size, size),
            "self_attn.k_proj": (kv_size, size),
            "self_attn.v_proj": (kv_size, size),
            "self_attn.o_proj": (size, size),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in names.items()}
    generator.manual_seed(1)
    weights = {
        f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        .normal_(std=0.03, generator=generator)
        .cpu()
        for name, shape in shapes.items()
    }
    norms = [f"model.layers.{layer}.{name}" for layer in range(NUM_LAYERS) for name in NORMS]
    ones = torch.ones(size, dtype=torch.bfloat16)
    weights |= {f"{name}.weight": ones.clone() for name in [*norms, "model.norm"]}
    save_file(weights, folder / "model.safetensors")


NORMS = ("input_layernorm", "post_attention_layernorm")


@pytest.fixture(scope="module")
def right(path: str) -> dict[str, Answers]:
    """The answers of one rank. Requests with log-probabilities replay no graphs of rounds."""
    found = {}
    with engine(path, 1, **TOKENIZER) as one:
        for kind, params in MASKS.items():
            given = ask(one, path, params, return_logprob=True, top_logprobs_num=2)
            tops = [each["meta_info"]["output_top_logprobs"] for each in given]
            gaps = [[best[0][0] - best[1][0] for best in top] for top in tops]
            found[kind] = Answers([each["output_ids"] for each in given], gaps)
    return found


@pytest.mark.parametrize("name", WAYS)
def test_tokens_are_those_of_one_rank(path: str, right: dict[str, Answers], name: str) -> None:
    """Sums in another order may choose the other one of two tokens that are nearly as good."""
    way, problems = WAYS[name], list[str]()
    if way.is_bundled and path != "demo":
        pytest.skip("its drafter is of the bundled model")
    with engine(path, 2, **TOKENIZER, **way.flags) as two:
        for kind, params in way.kinds.items():
            for turn in range(2):  # n-grams are known then, and prompts cached
                given = [each["output_ids"] for each in ask(two, path, params)]
                again = [each["output_ids"] for each in ask(two, path, params)]
                ties, wrong = divided(right[kind], given, is_drawn=kind == "seeded")
                repeated = sum(one != other for one, other in zip(given, again, strict=True))
                text = f"{name}, {kind}, {turn}: {ties} near-ties, {wrong} wrong, {repeated} apart"
                print(text)
                if wrong or ties > MOST_TIES * NUM_PROMPTS or repeated > MOST_TIES * NUM_PROMPTS:
                    problems.append(text)
        state = two.get_server_info()["internal_states"][0]
    assert (state["orphan_token_count"], state["legacy_missing_tokens"]) == (0, 0)
    assert not problems


@pytest.mark.parametrize("model_type", ["olmo2", "phi3", "gemma2"])
def test_transformers_layers_give_the_tokens_of_one_rank(tmp_path: Path, model_type: str) -> None:
    """With graphs: norms over all heads (Olmo 2), joined q, k, v (Phi-3), soft caps (Gemma 2)."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "pad_token_id": 0}
    model = str(make_random_model(model_type, tmp_path / "model", **sizes))
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCAB_SIZE, (NUM_PROMPTS, 24), generator=generator).tolist()
    found = []
    for num_ranks in (1, 2):
        with engine(model, num_ranks, skip_tokenizer_init=True) as served:
            assert served.get_server_info()["resolved"]["model_impl"] == "transformers"
            given = served.generate(input_ids=prompts, sampling_params=GREEDY)
            found.append([each["output_ids"] for each in given])
    assert sum(one != two for one, two in zip(*found, strict=True)) <= MOST_TIES * NUM_PROMPTS


def divided(right: Answers, given: list[list[int]], is_drawn: bool) -> tuple[int, int]:
    """Prompts whose tokens differ: after a near-tie, and otherwise. The noise of drawn tokens hides
    the gap, so each counts as one."""
    ties = wrong = 0
    for tokens, gaps, found in zip(right.tokens, right.gaps, given, strict=True):
        if tokens == found:
            continue
        first = next(i for i, one in enumerate(tokens) if [one] != found[i : i + 1])
        is_tie = is_drawn or gaps[first] <= MAX_GAPS["float32"]
        ties, wrong = ties + is_tie, wrong + (not is_tie)
    return ties, wrong


def test_control_calls_change_both_ranks() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    with engine("demo", 2) as two:
        before = [each["output_ids"] for each in ask(two, "demo", VERIFIED)]
        whole = two.get_weights_by_name(name, 2048)
        assert (len(whole), len(whole[0])) == (512, 256)
        two.pause_generation(mode="retract")
        two.release_memory_occupation()
        two.resume_memory_occupation()
        two.update_weights_from_disk("demo")
        two.continue_generation()
        two.flush_cache()
        after = [each["output_ids"] for each in ask(two, "demo", VERIFIED)]
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= MOST_TIES * NUM_PROMPTS


@pytest.fixture
def family() -> Iterator[list[psutil.Process]]:
    """Processes that a test adds must be gone after it, and what they had in shared memory."""
    shared = {*os.listdir("/dev/shm")}
    processes: list[psutil.Process] = []
    yield processes
    _, alive = psutil.wait_procs(processes, timeout=ENDS_S)
    assert not alive
    left = {name for name in {*os.listdir("/dev/shm")} - shared if name.startswith("nccl")}
    assert not left


FLAGS = ("--device", "cuda", "--tp-size", "2", "--max-total-tokens", "8192")


def test_an_interrupt_leaves_nothing(family: list[psutil.Process]) -> None:
    with running_server("demo", *FLAGS) as server:
        family += psutil.Process(server.process.pid).children(recursive=True)
        children = schedulers_of(server.process.pid)
        assert sorted(children) == ["rank 1", "scheduler"]
        for child in children.values():
            assert child.environ()["NCCL_NVLS_ENABLE"] == "0"
            assert child.environ()["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        assert server.generate().status_code == 200
        port = server.client.base_url.port
        assert port is not None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(ENDS_S) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


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
    with running_server("demo", *FLAGS) as server:
        children = schedulers_of(server.process.pid)
        family += children.values()
        assert server.generate().status_code == 200
        os.kill(children[victim].pid, number)
        assert reason in server.process.communicate(timeout=ENDS_S)[1]
        assert server.process.returncode != 0
