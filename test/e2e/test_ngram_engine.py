"""An Engine with drafts of n-grams, by its flags: tokens are the model's, and text of a corpus is
drafted from the first request on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sglang
from mtp_oracle import greedy_outputs
from sglang.srt.model_config import resolve_model_path
from sglang.srt.tokenizer import load_tokenizer

pytestmark = pytest.mark.long_matrix

NUM_TOKENS = 48
PROMPTS = ["import os\n", "def add(a, b):\n    return a + b\n\n\n" * 8, "[0, 0, 0, 0, 0, 0, 0,"]
UNKNOWN = "class Queue:\n    def __init__"  # not in the corpus
TREES = {"speculative_ngram_min_bfs_breadth": 2, "speculative_ngram_max_bfs_breadth": 4}
PROB = {"speculative_ngram_match_type": "PROB"}


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """Outputs of transformers for PROMPTS and UNKNOWN."""
    return greedy_outputs([*PROMPTS, UNKNOWN], NUM_TOKENS)


@pytest.fixture(scope="module")
def corpus(right: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prompts and their answers."""
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    pairs = zip(PROMPTS, right[: len(PROMPTS)], strict=True)
    texts = [prompt + tokenizer.decode(tokens) for prompt, tokens in pairs]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def answers(**flags: Any) -> list[dict[str, Any]]:
    """Outputs for PROMPTS and UNKNOWN, one after the other, each with a key of its own."""
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    with sglang.Engine(
        model_path="demo",
        device="cpu",
        max_total_tokens=2048,
        speculative_algorithm="NGRAM",
        speculative_load_aware="off",
        **flags,
    ) as engine:
        return [
            engine.generate(prompt, params, cache_salt=str(index))
            for index, prompt in enumerate([*PROMPTS, UNKNOWN])
        ]


def tokens_of(given: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in given]


def test_a_corpus_with_the_answer_helps_the_first_request(
    right: list[list[int]], corpus: str
) -> None:
    helped = answers(speculative_ngram_external_corpus_path=corpus)
    assert tokens_of(helped) == right
    known, *_, unknown = (each["meta_info"]["spec_accept_length"] for each in helped)
    assert known > 6 > unknown


@pytest.mark.parametrize("flags", [TREES, TREES | PROB], ids=["BFS", "PROB"])
def test_trees_with_a_budget_of_the_corpus(
    right: list[list[int]], corpus: str, flags: dict[str, Any]
) -> None:
    given = answers(
        speculative_ngram_external_corpus_path=corpus,
        speculative_ngram_external_corpus_max_tokens=5000,
        speculative_ngram_external_sam_budget=3,
        **flags,
    )
    assert tokens_of(given) == right
    assert 1.5 < given[0]["meta_info"]["spec_accept_length"] <= 12


def test_a_file_that_is_no_corpus_ends_the_start_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("import os\n")
    with pytest.raises(ValueError, match=r"corpus-path '.*': line 1 must be a JSON string") as end:
        answers(speculative_ngram_external_corpus_path=str(path))
    assert "\n" not in str(end.value)
