"""The shipped draft model of the demo model: complete, described by its results, and good."""

from __future__ import annotations

import json

from test_demo_heads import DEMO, MODULES, NUM_NEW, NUM_PROMPT_TOKENS, RESULTS, SETUP

from drafter_checks import drafter_harness
from oracle import code_snippets
from sglang.srt.draft_model_config import load_draft_config
from sglang.srt.environ import Environ
from sglang.srt.model_config import load_model_config, resolve_model_path
from sglang.srt.processes.round_flags import Asked
from sglang.srt.processes.speculation_flags import drafter_from_flags
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import load_tokenizer

FOLDER = resolve_model_path("demo-draft")
LEAST_ACCEPT_LENGTH = 2.0
MAX_BYTES = 3e6


def test_folder_is_complete_small_and_has_the_models_tokens() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    tokens = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", *tokens
    }  # fmt: skip
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MAX_BYTES
    demo = load_model_config("demo")
    draft = load_draft_config("demo-draft", demo, DEMO)
    assert draft.context_len == demo.context_len
    assert draft.hidden_size * draft.num_layers < demo.hidden_size * demo.num_layers / 2


def test_card_holds_the_figures_of_the_results_file() -> None:
    card = (FOLDER / "README.md").read_text()
    results = json.loads((RESULTS / "train_draft_tiny_code.json").read_text())
    assert f"python -m {results['command'].removeprefix('python -m ')}" in card
    assert f"| parameters | {results['draft']['parameters'] / 1e6:.2f} M," in card
    assert f"{results['training']['steps']:,} updates" in card
    assert results["commit"] in card
    for steps, made in results["acceptance"]["own_text"].items():
        shares = " ".join(f"{share:.2f}" for share in made["accepted"])
        lengths = f"{made['accept_length']:.2f} ({made['accept_length_all']:.2f})"
        assert f"| {steps} | {lengths} | {shares} |" in card


def test_drafts_are_often_right_and_change_no_token() -> None:
    """Drafts for held-out code; at a near-tie of two logits a batch of other rows may decide
    otherwise, so nine of ten outputs must be the same."""
    encode = load_tokenizer(DEMO).encode
    texts = code_snippets(MODULES, 16, [NUM_PROMPT_TOKENS * 6])
    prompts = [encode(text)[:NUM_PROMPT_TOKENS] for text in texts]
    args = ServerArgs(
        model_path="demo",
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path="demo-draft",
        speculative_load_aware="off",
    )
    model = load_model_config("demo")
    suppressed = (model.hf["mtp_mask_token_id"],)
    asked = Asked(args=args, model=model, suppressed_token_ids=suppressed, environ=Environ())
    drafter = drafter_from_flags(asked)
    found = []
    for each in (None, drafter):
        harness, _ = drafter_harness(DEMO, SETUP, each, checks_kv=False)
        params = {"max_new_tokens": NUM_NEW, "temperature": 0.0, "ignore_eos": True}
        ids = [harness.submit(prompt, **params) for prompt in prompts]
        harness.run()
        found.append([harness.outputs[req_id] for req_id in ids])
    plain, drafted = found
    pairs = zip(plain, drafted, strict=True)
    assert sum(one.token_ids == other.token_ids for one, other in pairs) >= 0.9 * len(prompts)
    histograms = [outcome.accept_histogram for outcome in drafted]
    num_steps = sum(map(sum, histograms))
    num_right = sum(right * times for each in histograms for right, times in enumerate(each))
    print(f"demo-draft: accept length {1 + num_right / num_steps:.2f}")
    assert 1 + num_right / num_steps >= LEAST_ACCEPT_LENGTH
