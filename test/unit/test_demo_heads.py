"""The shipped draft heads of the demo model: complete, described by their results, and good."""

from __future__ import annotations

import code
import copy
import json
import modulefinder
import pickletools
import reprlib
from dataclasses import dataclass
from typing import Any

import pytest
from safetensors import safe_open

from drafter_checks import drafter_harness
from oracle import Reference, assert_equal_up_to_near_ties, code_snippets
from sglang.srt.environ import Environ
from sglang.srt.head_layouts import EAGLE, EAGLE3, LAYER_IDS, NEXTN
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.model_config import DEMO_MODELS_DIR, load_model_config, resolve_model_path
from sglang.srt.processes.round_flags import Asked
from sglang.srt.processes.speculation_flags import drafter_from_flags
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.tokenizer import load_tokenizer
from utils import Collected, Setup

RESULTS = DEMO_MODELS_DIR.parents[2] / "benchmark" / "results"
DEMO = resolve_model_path("demo")
# Held out of the corpus of model and heads: see "Held out" of the cards.
MODULES = [code, copy, modulefinder, pickletools, reprlib]
NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_NEW = 16, 64, 32
LEAST_ACCEPT_LENGTH = {"EAGLE": 2.3, "EAGLE3": 2.3, "NEXTN": 1.8}
MAX_BYTES = 7.5e6
SETUP = Setup(num_pages=6000, max_running_requests=16, context_len=256)


@dataclass(frozen=True)
class Head:
    """A bundled head: the flags that name it, its folder and what it is."""

    algorithm: str
    name: str
    folder: str
    architecture: str

    def config(self) -> dict[str, Any]:
        return json.loads((DEMO_MODELS_DIR / self.folder / "config.json").read_text())

    def card(self) -> str:
        return (DEMO_MODELS_DIR / self.folder / "README.md").read_text()

    def results(self) -> dict[str, Any]:
        name = f"train_{self.algorithm.lower()}_tiny_code.json"
        return json.loads((RESULTS / name).read_text())

    def drafter(self) -> DrafterConfig:
        args = ServerArgs(
            model_path="demo",
            speculative_algorithm=self.algorithm,
            speculative_draft_model_path=self.name,
            speculative_load_aware="off",
        )
        model = load_model_config("demo")
        suppressed = (model.hf["mtp_mask_token_id"],)
        asked = Asked(args=args, model=model, suppressed_token_ids=suppressed, environ=Environ())
        drafter = drafter_from_flags(asked)
        assert drafter is not None
        return drafter


HEADS = (
    Head("EAGLE", "demo-eagle", "tiny-code-eagle", EAGLE),
    Head("EAGLE3", "demo-eagle3", "tiny-code-eagle3", EAGLE3),
    Head("NEXTN", "demo-nextn", "tiny-code-nextn", NEXTN),
)
BOTH = pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Pieces of held-out code."""
    encode = load_tokenizer(DEMO).encode
    texts = code_snippets(MODULES, NUM_PROMPTS, [NUM_PROMPT_TOKENS * 6])
    return [encode(text)[:NUM_PROMPT_TOKENS] for text in texts]


def run(drafter: DrafterConfig | None, prompts: list[list[int]], **options: Any) -> list[Collected]:
    """Greedy outputs of all prompts."""
    harness, _ = drafter_harness(DEMO, SETUP, drafter, checks_kv=False)
    params = {"max_new_tokens": NUM_NEW, "temperature": 0.0, "ignore_eos": True}
    ids = [harness.submit(prompt, **options, **params) for prompt in prompts]
    harness.run()
    return [harness.outputs[req_id] for req_id in ids]


@pytest.fixture(scope="module")
def references(prompts: list[list[int]]) -> list[Reference]:
    """Outputs without a head."""
    scores = LogprobOptions(start_len=NUM_PROMPT_TOKENS - 1, top_num=2, token_ids=[])
    references = []
    for prompt, plain in zip(prompts, run(None, prompts, logprobs=scores), strict=True):
        tops = [position.top_logprobs for position in plain.output_logprobs]
        gaps = [first - second for first, second in tops]
        references.append(Reference(prompt, plain.token_ids, gaps))
    return references


@BOTH
def test_folder_is_complete_and_config_has_the_frozen_shape(head: Head) -> None:
    names = {path.name for path in (DEMO_MODELS_DIR / head.folder).iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}
    target, config = json.loads((DEMO / "config.json").read_text()), head.config()
    same = (
        "vocab_size",
        "hidden_size",
        "head_dim",
        "rope_theta",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
    )
    assert {key: config[key] for key in same} == {key: target[key] for key in same}
    assert config["architectures"] == [head.architecture]
    assert config["num_hidden_layers"] == 1
    if head.architecture == EAGLE3:
        layers = config["eagle_config"][LAYER_IDS]
        assert layers == head.results()["head"]["layer_ids"] == [0, 1, 2]
        assert config["draft_vocab_size"] == head.results()["head"]["draft_vocab_size"] == 1536


def test_all_folders_are_small() -> None:
    folders = [DEMO_MODELS_DIR / head.folder for head in HEADS]
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) < MAX_BYTES


@BOTH
def test_weights_are_as_many_as_the_results_say(head: Head) -> None:
    count = 0
    with safe_open(DEMO_MODELS_DIR / head.folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no dict
            part = tensors.get_slice(name)
            if part.get_dtype() == "BF16":
                size = 1
                for length in part.get_shape():
                    size *= length
                count += size
    assert count == head.results()["head"]["parameters"]


@BOTH
def test_card_holds_the_figures_of_the_results_file(head: Head) -> None:
    card, results = head.card(), head.results()
    assert results["head"]["algorithm"] == head.algorithm
    assert f"python -m {results['command'].removeprefix('python -m ')}" in card
    assert f"| own parameters | {results['head']['parameters'] / 1e6:.2f} M;" in card
    assert f"weights | bfloat16, {results['head']['weights_bytes'] / 1e6:.2f} MB |" in card
    assert f"{results['training']['steps']:,} updates" in card
    assert results["commit"] in card
    assert ", ".join(results["corpus"]["held_out"]) in card
    for steps, made in results["acceptance"]["own_text"].items():
        shares = " ".join(f"{share:.2f}" for share in made["accepted"])
        lengths = f"{made['accept_length']:.2f} ({made['accept_length_all']:.2f})"
        assert f"| {steps} | {lengths} | {shares} |" in card
        if int(steps) == results["acceptance"]["num_steps"]:
            assert f"**{made['accept_length']:.2f}** tokens per verification" in card
    for window, made in results["acceptance"]["real_text"].items():
        alone, accepted = (
            " ".join(f"{share:.2f}" for share in made[kind]) for kind in ("alone", "accepted")
        )
        assert f"| {window} | {made['positions']:,} | {alone} | {accepted} |" in card


@pytest.mark.long_matrix
@BOTH
def test_tokens_are_those_without_a_head_and_drafts_are_often_right(
    head: Head, prompts: list[list[int]], references: list[Reference]
) -> None:
    outcomes = run(head.drafter(), prompts)
    tokens = [outcome.token_ids for outcome in outcomes]
    assert_equal_up_to_near_ties(tokens, references, head.name)
    histograms = [outcome.accept_histogram for outcome in outcomes]
    num_steps = sum(map(sum, histograms))
    num_right = sum(right * times for each in histograms for right, times in enumerate(each))
    print(f"{head.name}: accept length {1 + num_right / num_steps:.2f}")
    assert 1 + num_right / num_steps >= LEAST_ACCEPT_LENGTH[head.algorithm]
