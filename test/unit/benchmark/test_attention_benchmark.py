"""The pure parts of the benchmark of attention, and its Triton ways at a tiny size.

As a program it compares these ways with attention in float32 on a CPU and prints a line of JSON
with the error of each; Triton kernels then need TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

if sys.platform != "linux":
    pytest.skip("needs Triton", allow_module_level=True)

from benchmark import attention_inputs, decode_ways, prompt_ways
from benchmark.attention_inputs import DecodeInputs, DecodeShape, Heads, PromptInputs, PromptShape
from benchmark.measure import attention
from benchmark.prompt_ways import GATHERING, WAYS, NotHere, over_prefix
from benchmark.report import attention_tables
from interpreted import run_interpreted
from sglang.srt.layers.attention.triton_ops.kernels import Tiles
from sglang.srt.layers.attention.triton_tuning import Tuning

CPU = torch.device("cpu")
TINY = Heads(4, 2, 16, torch.float32, CPU)
LLAMA = Heads(32, 8, 128, torch.bfloat16, CPU)
TINY_PROMPTS = (PromptShape(9, 0), PromptShape(5, 40), PromptShape(40, 3))
TINY_DECODES = (DecodeShape(1, 70), DecodeShape(4, 5))
TINY_CONTEXT, TINY_SETS = 96, 2
TOLERANCE = 1e-5


def tiles(block_n: int, num_warps: int, num_stages: int) -> Tiles:
    return Tiles(block_m=16, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def tuning(**changes: Any) -> Tuning:
    chosen = Tuning(
        extend=tiles(64, 8, 2),
        few=tiles(64, 4, 3),
        split=tiles(64, 2, 2),
        whole=tiles(64, 2, 2),
        crowded=tiles(32, 1, 3),
        num_programs=264,
        num_split_programs=528,
        max_splits=64,
    )
    return replace(chosen, **changes)


# ---------------------------------------------------------------- inputs and the reference


@pytest.mark.parametrize("shape", [(1, 0), (5, 0), (3, 7)])
def test_operations_are_two_products_for_each_pair_of_a_row_and_what_it_sees(
    shape: tuple[int, int],
) -> None:
    rows, prefix = shape
    pairs = sum(prefix + row + 1 for row in range(rows))
    assert PromptShape(rows, prefix).flop(TINY) == pairs * 4 * 16 * 2 * 2


@pytest.mark.parametrize("shape", TINY_PROMPTS)
def test_attention_by_its_definition_is_that_of_torch(shape: PromptShape) -> None:
    torch.manual_seed(1)
    q, kv = torch.randn(shape.num_rows, 4, 16), torch.randn(shape.kv_len, 4, 16)
    mask = torch.ones(shape.num_rows, shape.kv_len).tril(shape.prefix).bool()
    by_head, k, v = (x.transpose(0, 1)[None] for x in (q, kv[:, :2], kv[:, 2:]))
    expected = scaled_dot_product_attention(by_head, k, v, attn_mask=mask, enable_gqa=True)
    found = attention_inputs.attend(q, kv, shape.prefix + torch.arange(shape.num_rows))
    torch.testing.assert_close(found, expected[0].transpose(0, 1))


@pytest.mark.parametrize("wrong_row", [0, 99])
def test_a_wrong_end_of_a_result_is_seen(wrong_row: int) -> None:
    shape = PromptShape(100, 20)
    inputs = PromptInputs(TINY, TINY.pool(200, 2), shape)
    kv = inputs.pool.kv[1][inputs.slots]
    out = attention_inputs.attend(inputs.q, kv, 20 + torch.arange(100))
    assert inputs.error(out, 1) < TOLERANCE
    assert inputs.error(out, 0) > 0.5  # of another layer
    out[wrong_row] += 1
    with pytest.raises(ValueError, match=r"^some way gives a wrong result"):
        attention_inputs.check("some way", inputs.error(out, 1))


def test_nan_is_wrong() -> None:
    error = attention_inputs.relative_error(torch.tensor([torch.nan]), torch.ones(1))
    with pytest.raises(ValueError, match="nan of the norm"):
        attention_inputs.check("some way", error)


def test_sets_of_decodes_share_no_slot() -> None:
    inputs = DecodeInputs(TINY, DecodeShape(3, 5), TINY_CONTEXT, TINY_SETS)
    rows = torch.cat([batch.rows for batch in inputs.batches])
    slots = inputs.requests.req_to_token[rows, :5].flatten().tolist()
    assert sorted(slots) == list(range(1, 1 + TINY_SETS * 3 * 5))
    assert inputs.shape.kv_bytes(TINY) == 3 * 5 * 2 * 2 * 16 * 4


# ---------------------------------------------------------------- a prefix beside a causal part


def attend_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As cuDNN's: the causal mask begins with the first key."""
    k, v = (side.repeat_interleave(q.shape[1] // side.shape[1], dim=1) for side in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        unseen = torch.ones(scores.shape[-2:]).triu(1).bool()
        scores = scores.masked_fill(unseen, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize("shape", TINY_PROMPTS)
def test_a_prefix_and_the_rows_themselves_merge_to_the_whole(shape: PromptShape) -> None:
    inputs = PromptInputs(TINY, TINY.pool(64, 1), shape)
    kv = inputs.pool.kv[0][inputs.slots]
    q, k, v = (x.transpose(0, 1)[None] for x in (inputs.q, kv[:, :2], kv[:, 2:]))
    assert inputs.error(over_prefix(attend_with_lse, q, k, v, shape.prefix), 0) < TOLERANCE


@pytest.mark.parametrize("name", ["ours", "ours, attention", "cudnn", "flashinfer"])
def test_a_way_that_is_not_for_this_machine_says_so(name: str) -> None:
    inputs = PromptInputs(TINY, TINY.pool(64, 1), TINY_PROMPTS[0])
    with pytest.raises(NotHere, match=r"\w"):
        WAYS[name](inputs)


def test_every_way_has_its_place_in_the_table() -> None:
    assert {*attention_tables.WAYS, GATHERING} == set(WAYS)


def test_a_package_that_is_missing_is_told_in_the_words_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "flashinfer-python is not installed (pip install it)"
    monkeypatch.setattr(prompt_ways, "why_not_here", lambda: reason)
    inputs = PromptInputs(TINY, TINY.pool(64, 1), TINY_PROMPTS[0])
    with pytest.raises(NotHere, match=r"^not installed$"):
        WAYS["flashinfer"](inputs)


# ---------------------------------------------------------------- what is timed


def test_variants_are_all_tiles_and_splits_and_unsplit_kv_with_the_tiles_for_it() -> None:
    found = decode_ways.variants(LLAMA, tuning(), num_requests=1)
    assert len(found) == len(set(found)) == 2 + 4 * 6
    assert [one.tiles for one in found if one.num_splits == 1] == [tiles(64, 2, 2), tiles(32, 1, 3)]
    for one in (tiles(32, 4, 2), tiles(64, 2, 2), tiles(64, 4, 3), tiles(32, 2, 3)):
        splits = [variant.num_splits for variant in found if variant.tiles == one]
        assert [count for count in splits if count > 1] == [2, 4, 8, 16, 33, 64]


def test_no_variant_makes_too_many_programs_and_large_groups_stay_in_one_tile() -> None:
    found = decode_ways.variants(LLAMA, tuning(split=replace(tiles(64, 2, 2), block_m=32)), 128)
    assert max(one.num_splits for one in found) == 8
    assert {one.tiles.block_m for one in found if one.num_splits > 1} == {32}


@pytest.mark.parametrize(("flop", "expected"), [(10**9, 32), (10**11, 10), (10**13, 1)])
def test_a_graph_of_prompts_has_more_calls_the_shorter_they_are(flop: int, expected: int) -> None:
    assert attention.prompt_calls(flop) == expected


def test_a_prompt_has_times_and_speeds_and_says_what_is_not_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = PromptInputs(TINY, TINY.pool(64, 2), PromptShape(9, 20))

    def right(inputs: PromptInputs) -> prompt_ways.Way:
        positions = 20 + torch.arange(9)
        kv = [layer[inputs.slots] for layer in inputs.pool.kv]
        return lambda layer: attention_inputs.attend(inputs.q, kv[layer], positions)

    def gathering(inputs: PromptInputs) -> prompt_ways.Way:
        return lambda layer: inputs.pool.kv[layer][inputs.slots]

    def missing(inputs: PromptInputs) -> prompt_ways.Way:
        raise NotHere("not installed")

    ways = {"triton": right, GATHERING: gathering, "flashinfer": missing}
    monkeypatch.setattr(attention, "WAYS", ways)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(attention, "capture", lambda calls, count: (calls[1], "graph"))
    monkeypatch.setattr(attention, "burst_us", lambda replay, count: 2000.0)
    monkeypatch.setattr(attention, "sustained_us", lambda replay, count, expected: 2 * expected)
    row = attention.measure_prompt(inputs)
    assert (row["rows"], row["prefix"]) == (9, 20)
    assert row["ways"].pop("flashinfer") == {"not_here": "not installed"}
    assert [one.pop("first_ms") >= 0 for one in row["ways"].values()] == [True, True]
    times = {"method": "graph", "burst_ms": 2.0, "sustained_ms": 4.0}
    speeds = {"burst_tflop_s": 0.0, "sustained_tflop_s": 0.0}
    assert row["ways"] == {"triton": {**times, **speeds}, GATHERING: times}

    monkeypatch.setattr(attention, "WAYS", {"triton": gathering_of_one_layer(right)})
    with pytest.raises(ValueError, match="triton gives a wrong result"):
        attention.measure_prompt(inputs)


def gathering_of_one_layer(make: Any) -> Any:
    """A way that attends the first layer whatever layer is asked for."""
    return lambda inputs: lambda layer: make(inputs)(0)


def test_a_speed_is_operations_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = PromptInputs(TINY, TINY.pool(64, 1), PromptShape(9, 20))
    monkeypatch.setattr(attention, "WAYS", {"triton": lambda inputs: None})
    timed = {"burst_ms": 2e-6, "sustained_ms": 4e-6}
    monkeypatch.setattr(attention, "time_way", lambda *_: dict(timed))
    (way,) = attention.measure_prompt(inputs)["ways"].values()
    tflop = inputs.shape.flop(TINY) / 1e12
    assert way["burst_tflop_s"] == pytest.approx(tflop / 2e-9, abs=0.05)
    assert way["sustained_tflop_s"] == pytest.approx(tflop / 4e-9, abs=0.05)


def test_a_sweep_is_sorted_and_shown_with_what_is_planned() -> None:
    variants = [{"name": f"variant {index}", "us": 7.0 + index} for index in range(9)]
    row = {"requests": 2, "kv_len": 1000, "planned_us": 8.5, "tiles_and_splits": "plan"}
    lines = attention.sweep_lines([{**row, "variants": variants}]).splitlines()
    assert lines[0] == "2 requests, KV of 1,000:"
    assert [line.split()[-1] for line in lines[1:-1]] == ["0", "1", "2", "3", "4"]
    assert lines[-1].split() == ["8.50", "us", "today:", "plan"]


# ---------------------------------------------------------------- the command


def test_without_a_gpu_there_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^There is no GPU.*run this where[^\n]*$"):
        attention.main([])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads", "6", "--kv-heads", "4"], "must be a multiple"),
        (["--kv-heads", "0"], "must be 1 or more"),
        (["--decodes", "1,5000", "--context-len", "4096"], "1 to --context-len"),
        (["--decodes", "1,0"], "1 to --context-len"),
        (["--prompts", "0,5"], "rows or requests 1 or more"),
        (["--prompts", "512"], "invalid pair value"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        attention.parse(flags)
    assert message in capsys.readouterr().err


def test_shapes_can_be_chosen_and_left_out() -> None:
    arguments = attention.parse(["--prompts", "--decodes", "1,170", "2,30000"])
    assert (arguments.prompts, arguments.decodes) == ([], [(1, 170), (2, 30000)])


# ---------------------------------------------------------------- Triton's ways, interpreted


def tiny_results() -> dict[str, float]:
    """The largest error of each way, by its name and shape."""
    errors = {}
    pool = TINY.pool(64, 2)
    for prompt in TINY_PROMPTS:
        inputs = PromptInputs(TINY, pool, prompt)
        for name in ("triton", GATHERING):
            way = WAYS[name](inputs)
            errors[f"{name}, {tuple(prompt)}"] = max(
                attention.error_of(name, way(layer), inputs, layer) for layer in (0, 1)
            )
    for shape in TINY_DECODES:
        sets = DecodeInputs(TINY, shape, TINY_CONTEXT, TINY_SETS)
        calls, chosen = decode_ways.planned_calls(sets)
        ways = {f"planned, {chosen.num_splits} splits": calls}
        for variant in decode_ways.variants(TINY, decode_ways.tuning_of(TINY), shape.num_requests):
            is_chosen = variant.tiles in decode_ways.SWEPT_TILES[:2] and variant.num_splits in (
                2,
                8,
            )
            if is_chosen or variant.num_splits == 1:
                ways[variant.name] = decode_ways.variant_calls(sets, variant)
        for name, calls in ways.items():
            found = zip(calls, sets.batches, strict=True)
            worst = max(sets.error(call(), batch) for call, batch in found)
            errors[f"{name}, {tuple(shape)}"] = worst
    return errors


@pytest.fixture(scope="module")
def errors() -> dict[str, float | str]:
    return run_interpreted("unit/benchmark/test_attention_benchmark.py", "triton")


@pytest.mark.long_matrix(4)
def test_interpreted_ways_give_what_attention_gives(errors: dict[str, float | str]) -> None:
    assert {name: error for name, error in errors.items() if not float(error) < TOLERANCE} == {}


@pytest.mark.parametrize(
    "start", ["triton, (5, 40)", f"{GATHERING}, (40, 3)", "16x32, 4 warps, 2 stages, splits 8"]
)
def test_ways_of_all_kinds_were_compared(errors: dict[str, float | str], start: str) -> None:
    assert any(name.startswith(start) for name in errors)


def test_decodes_are_planned_for_the_context_of_a_graph(errors: dict[str, float | str]) -> None:
    # Up to 8 splits until there are 16 programs of 2 KV heads, or of each 16 of 96 columns.
    planned = [name.partition("(")[0] for name in errors if name.startswith("planned")]
    assert planned == ["planned, 6 splits, ", "planned, 1 splits, "]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, error in tiny_results().items():
        print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    main()
