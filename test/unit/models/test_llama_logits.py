"""Logits of small random Llamas equal transformers', however the tokens are fed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from model_harness import (
    TOLERANCE,
    Decoding,
    Feeder,
    Model,
    assert_close,
    assert_greedy,
    plain_worker,
    sequence,
)
from utils import make_random_llama

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped, tied": {},
    "one head per KV head, untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "one KV head": {"num_key_value_heads": 1, "num_hidden_layers": 3},
    "wide heads": {"head_dim": 64, "rope_theta": 500_000.0, "tie_word_embeddings": False},
    "large eps, six heads": {
        "rms_norm_eps": 0.1,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
}


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=list(VARIANTS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_random_llama(tmp_path_factory.mktemp("model") / "llama", **request.param))


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_random_llama(tmp_path_factory.mktemp("model") / "llama"))


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("length", [1, 2, 16, 100])
def test_prefill_in_one_go(model: Model, length: int, page_size: int) -> None:
    tokens = sequence(length)
    logits = Feeder(model.runner(page_size), page_size).feed({"a": tokens})["a"]
    assert_close(logits, model.expected(tokens)[-1])


def test_the_logits_are_not_trivially_equal(plain_model: Model) -> None:
    """Other tokens, or the same in another order, give other logits by far more than the bound."""
    tokens = sequence(20)
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    expected = plain_model.expected(tokens)
    difference = (plain_model.expected(swapped)[-1] - expected[-1]).abs().max()
    assert float(difference) > 100 * TOLERANCE
    assert float(expected.std()) > 0.5


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_prefill_in_chunks_and_token_by_token(model: Model, chunk: int, page_size: int) -> None:
    tokens = sequence(40)
    expected = model.expected(tokens)
    feeder = Feeder(model.runner(page_size), page_size)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        assert_close(feeder.feed({"a": part})["a"], expected[start + len(part) - 1])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_requests_of_a_mixed_batch_do_not_see_each_other(
    plain_model: Model, page_size: int
) -> None:
    """Prompts, chunks and single tokens of several requests in the same steps."""
    sequences = {name: sequence(50, seed) for seed, name in enumerate("abcde")}
    expected = {name: plain_model.expected(tokens) for name, tokens in sequences.items()}
    feeder = Feeder(plain_model.runner(page_size), page_size)
    chooser = random.Random(1)
    left = {name: list(tokens) for name, tokens in sequences.items()}
    while left:
        names = chooser.sample(sorted(left), chooser.randint(1, len(left)))
        chunks = {}
        for name in names:
            size = chooser.choice([1, 1, 2, 9])
            chunks[name], left[name] = left[name][:size], left[name][size:]
        for name, logits in feeder.feed(chunks).items():
            assert_close(logits, expected[name][feeder.fed[name] - 1])
        left = {name: tokens for name, tokens in left.items() if tokens}


@pytest.mark.long_matrix
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 100), (16, 100), (1, 3), (16, 7), (4, 1)])
def test_the_worker_decodes_greedily_through_the_paged_pool(
    model: Model, page_size: int, chunk: int
) -> None:
    prompts = [sequence(length, seed=length) for length in (1, 9, 16, 33)]
    decoding = Decoding(model, page_size)
    for prompt, output in zip(prompts, decoding.generate(prompts, 12, chunk), strict=True):
        assert_greedy(model, prompt, output)


def test_cached_prefixes_give_the_same_tokens(plain_model: Model) -> None:
    decoding = Decoding(plain_model, 4)
    prompts = [sequence(30), [*sequence(17), 5, 6]]
    first = decoding.generate(prompts, 8, 100)
    assert decoding.ledger.cached_prefix((), prompts[0])[0] == 28
    assert decoding.generate(prompts, 8, 100) == first


def test_a_suppressed_token_is_never_emitted(plain_model: Model) -> None:
    """Suppressing the token that would come gives another one."""
    decoding = Decoding(plain_model, 1)
    prompt = sequence(10)
    first = decoding.generate([prompt], 1, 100)[0][0]
    other = Decoding(plain_model, 1)
    other.worker = plain_worker(plain_model.runner(1), 8, (first,))
    order = plain_model.expected(prompt)[-1].argsort(descending=True).tolist()
    assert order[0] == first
    assert other.generate([prompt], 1, 100) == [order[1:2]]
