"""--enable-deterministic-inference on a CUDA GPU: a row has the same bits in any company, and a
request the same tokens with any drafter, batch, chunk and cached prefix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import sglang
from benchmark.engine_load import random_prompts
from benchmark.random_model import GEOMETRIES, random_model
from row_independence_cases import (
    Attended,
    RowOperation,
    activation,
    attention_differences,
    different_rows,
    experts,
    gated,
    norm,
    num_different,
    ops_of,
    product,
    random_values,
)
from sglang.srt.layers.ops.ordered_products import Tile

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)

COUNTS = (*range(1, 36), 47, 48, 63, 64, 65, 95, 96, 127, 128, 129, 191, 255, 256, 300, 384, 511)
LARGE_COUNTS = (512, 1000, 1024, 1025, 2047, 2048, 3000, 4096, 5000)
OPERATIONS = {
    "qkv of 8B": product(6144, 4096),
    "o of 8B": product(4096, 4096),
    "gate and up of 8B": gated(14336, 4096),
    "down of 8B": product(4096, 14336),
    "head of 8B": product(128256, 4096),
    "small and a bias": product(1000, 520, has_bias=True),
    "small": product(384, 256),
    "gated and small": gated(200, 264),
    "gated and a bias": gated(512, 256, has_bias=True),
    "norm": norm(4096),
    "activation": activation(14336),
    "experts": experts(64, 8, 512, 256),
}
ATTENTION = {
    "8B": ((32, 8, 128), None),
    "8B, a window": ((32, 8, 128), 700),
    "heads of 64": ((8, 8, 64), None),
    "one KV head": ((7, 1, 64), None),
    "heads of 256": ((8, 4, 256), None),
}
DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_has_the_same_bits_among_any_rows(name: str, dtype: torch.dtype) -> None:
    operation: RowOperation = OPERATIONS[name]
    counts = COUNTS if "head" in name else (*COUNTS, *LARGE_COUNTS)
    assert different_rows(operation, "cuda", dtype, counts) == 0


def test_all_tiles_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_values("cuda", torch.bfloat16, 5, 300, 4096)
    weight = random_values("cuda", torch.bfloat16, 6, 6144, 4096)
    found = []
    for tile in (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(64, 64, 128, 4, 4)):
        monkeypatch.setattr(Tile, "choose", lambda *_, tile=tile: tile)
        found.append(ops_of("cuda").linear(x, weight, None))
    assert [num_different(each, found[0]) for each in found] == [0, 0, 0]


def test_the_library_computes_most_rows_of_large_products() -> None:
    """Otherwise the comparison with our own tiles would be idle."""
    products = ops_of("cuda")._products  # type: ignore[attr-defined]
    weight = random_values("cuda", torch.bfloat16, 1, 6144, 4096)
    assert products._equal_rows(8192, weight) >= {4096}
    assert products._equal_rows(300, weight) == products._equal_rows(8192, weight) & {256, 128}


def test_the_library_is_not_used_where_its_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    products = ops_of("cuda")._products  # type: ignore[attr-defined]
    real = torch.mm

    def other(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        return torch.add(
            real(x[:, :half], weight[:half]), real(x[:, half:], weight[half:]), out=out
        )

    monkeypatch.setattr(torch, "mm", other)
    weight = random_values("cuda", torch.bfloat16, 1, 1024, 4096)
    assert products._equal_rows(8192, weight) == frozenset()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("8B", torch.float16), *((name, torch.bfloat16) for name in ATTENTION)],
    ids=str,
)
def test_attention_of_a_row_has_the_same_bits_in_any_step(name: str, dtype: torch.dtype) -> None:
    heads, window = ATTENTION[name]
    for max_len, seeds in ((400, (0, 1, 2, 3)), (5000, (4, 5))):
        attended = Attended("cuda", dtype, 24, max_len, heads, window)
        assert attention_differences(attended, 24, 8, seeds) == ""


# ---------------------------------------------------------------- whole models

SHARED: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "enable_deterministic_inference": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 120_000,
    "max_running_requests": 48,
    "log_level": "error",
}
EAGLE3 = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "demo-eagle3"}
WAYS: dict[str, dict[str, Any]] = {
    "EAGLE3": EAGLE3 | {"speculative_num_steps": 3, "speculative_load_aware": "off"},
    "EAGLE3, adaptive": EAGLE3 | {"speculative_adaptive": True},
    "EAGLE3, TileSpec": EAGLE3 | {"tile_spec": True},
    "EAGLE": {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "demo-eagle"},
    "STANDALONE": {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": "demo-draft",
    },
    "NGRAM": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8},
    "verified MTP": {},
    "other chunks": {"chunked_prefill_size": 96, "disable_radix_cache": True},
    "no graphs": {"disable_cuda_graph": True, "chunked_prefill_size": 512},
}
VERIFIED = {"mtp_enabled": True, "mtp_verify": True, "mtp_k": 8}
NUM_REQUESTS = 240


def requests_of(vocab_size: int, count: int, longest: int) -> list[dict[str, Any]]:
    """Requests of which some share prefixes; half are greedy, the others have a seed."""
    chooser, shared = random.Random(7), random_prompts(3, longest // 2, vocab_size, 8)
    own = random_prompts(count, longest, vocab_size, 9)
    found = list[dict[str, Any]]()
    for index in range(count):
        prompt = own[index][: chooser.choice((1, 15, 16, 40, 130, longest // 2))]
        if chooser.random() < 0.5:
            prefix = chooser.choice(shared)
            prompt = prefix[: chooser.randint(1, len(prefix))] + prompt
        params: dict[str, Any] = {"max_new_tokens": chooser.choice((5, 48, 96)), "ignore_eos": True}
        if index % 2:
            params |= {"temperature": 0.8, "top_p": 0.95, "sampling_seed": index}
        else:
            params["temperature"] = 0.0
        found.append({"input_ids": prompt, "sampling_params": params})
    return found


def tokens_of(
    engine: sglang.Engine, requests: Sequence[dict[str, Any]], **params: Any
) -> list[list[int]]:
    """Tokens of requests that are sent at once."""
    answers = engine.generate(
        input_ids=[each["input_ids"] for each in requests],
        sampling_params=[each["sampling_params"] | params for each in requests],
    )
    return [answer["output_ids"] for answer in answers]


def differing(found: Sequence[list[int]], expected: Sequence[list[int]]) -> list[int]:
    """Places of answers that differ."""
    pairs = zip(found, expected, strict=True)
    return [place for place, (one, other) in enumerate(pairs) if one != other]


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    return requests_of(4000, NUM_REQUESTS, 500)


@pytest.fixture(scope="module")
def plain(requests: list[dict[str, Any]]) -> list[list[int]]:
    """Tokens without drafts, of all requests at once; some are compared with those alone."""
    with sglang.Engine(model_path="demo", **SHARED) as engine:
        found = tokens_of(engine, requests)
        alone = [tokens_of(engine, [each])[0] for each in requests[:40]]
        assert differing(alone, found[:40]) == []
        assert differing(tokens_of(engine, requests), found) == []  # prefixes are cached now
    return found


@pytest.mark.parametrize("name", WAYS)
def test_tokens_are_those_of_plain_decoding(
    name: str, requests: list[dict[str, Any]], plain: list[list[int]]
) -> None:
    params = VERIFIED if name == "verified MTP" else {}
    with sglang.Engine(model_path="demo", **SHARED | WAYS[name]) as engine:
        assert differing(tokens_of(engine, requests, **params), plain) == []
        backwards = tokens_of(engine, requests[::-1], **params)
        assert differing(backwards[::-1], plain) == []


def test_a_random_8b_model_answers_alike_in_any_batch() -> None:
    """Its two best tokens are often nearly equal, so other bits would soon be other tokens."""
    wide, narrow = {}, {"chunked_prefill_size": 300, "disable_radix_cache": True}
    vocab_size = GEOMETRIES["llama-3.1-8b"].vocab_size
    requests = requests_of(vocab_size, 64, 1200)
    found = []
    for flags in (wide, narrow):
        with ExitStack() as stack:
            folder = stack.enter_context(random_model("llama-3.1-8b"))
            size = {"skip_tokenizer_init": True}
            engine = sglang.Engine(
                model_path=folder, load_format="dummy", random_seed=1, **SHARED | size | flags
            )
            stack.enter_context(engine)
            found.append(tokens_of(engine, requests))
            alone = [tokens_of(engine, [each])[0] for each in requests[:6]]
            assert differing(alone, found[-1][:6]) == []
            assert differing(tokens_of(engine, requests[20:29]), found[-1][20:29]) == []
    assert differing(found[1], found[0]) == []
