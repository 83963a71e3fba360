"""The pure parts of the benchmark of fused operations, and all its cases at a tiny size.

As a program it checks the tiny cases on a CPU and prints a line of JSON per case; Triton kernels
then need TRITON_INTERPRET=1 in the environment. The last line is of a case whose result is wrong.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmark.device_times import copies_to_exceed
from benchmark.measure import layer_ops
from benchmark.measure.layer_ops import (
    BACKENDS,
    Call,
    Case,
    Setting,
    check,
    make_cases,
    table,
)
from benchmark.random_model import LLAMA_8B, Geometry
from interpreted import run_interpreted

# The interpreter's tl.dot takes the bits of bfloat16 for integers.
TINY = Setting(Geometry(64, 96, 2, 4, 2, 16, 80), torch.device("cpu"), torch.float16)
LLAMA = Setting(LLAMA_8B, torch.device("cpu"), torch.bfloat16)
BETWEEN = ("add_rms_norm", "silu_and_mul", "rotate_and_store")
OPS = (*BETWEEN, "linear", "gated_linear", "decode attention")
WEIGHTS = ("qkv", "o", "gate_up", "down", "lm_head")
ROW: dict[str, Any] = {
    "op": "linear",
    "rows": 512,
    "detail": "lm_head 128256x4096",
    "kernel": "cublas",
    "cold": True,
    "method": "graph/events",
    "ours_us": 12345.67,
    "torch_us": 22345.67,
    "ratio": 1.81,
    "at_copy_bandwidth_us": 11345.67,
}


def labels_of(cases: list[Case]) -> list[str]:
    return [f"{case.op}, {case.detail}, {case.rows}" for case in cases]


def returning(*results: torch.Tensor) -> list[Call]:
    return [lambda: results]


def bytes_of(rows: int) -> dict[str, int]:
    """By operation and the name of the matrix, else the last word of the detail."""
    return {
        f"{case.op} {case.detail.split()[0 if 'linear' in case.op else -1]}": case.num_bytes
        for case in make_cases(LLAMA, [rows])
    }


# ---------------------------------------------------------------- what is timed


def test_every_operation_has_a_case_per_number_of_rows() -> None:
    cases = make_cases(LLAMA, [1, 64, 512])
    counts = {op: [case.rows for case in cases if case.op == op] for op in OPS}
    assert sum(map(len, counts.values())) == len(cases)
    for op in BETWEEN:
        assert counts[op] == [1, 64, 512]
    assert counts["linear"] == [1, 64] * len(WEIGHTS)  # 512 rows are never our kernel's
    assert counts["gated_linear"] == [1, 64]
    assert counts["decode attention"] == [1, 64, 512] * len(layer_ops.KV_LENS)


def test_products_say_where_our_kernel_leaves_them_to_cublas() -> None:
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        pytest.skip("Triton's interpreter takes every product")
    odd = replace(LLAMA_8B, vocab_size=128250)  # no block of features divides it
    found = {
        (case.detail.split()[0], case.rows)
        for case in make_cases(replace(LLAMA, geometry=odd), [8, 64])
        if case.kernel == "cublas"
    }
    assert found == {("lm_head", 8), ("lm_head", 64)}


def test_weights_are_those_of_llama() -> None:
    shapes = layer_ops.weight_shapes(LLAMA_8B)
    assert list(shapes) == list(WEIGHTS)
    assert shapes == {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "lm_head": (128256, 4096),
    }


def test_bytes_are_inputs_and_results_moved_once() -> None:
    found = bytes_of(rows=2)
    assert found["add_rms_norm residual"] == 2 * (4 * 2 * 4096 + 4096)
    assert found["silu_and_mul 14336"] == 2 * 2 * (28672 + 14336)
    # q, k, v in; q, k, v out; cos and sin; position and slot
    assert found["rotate_and_store 128"] == 2 * (2 * 6144 * 2 + 128 * 4 + 16)
    assert found["linear o"] == 2 * (4096 * 4096 + 2 * 4096 + 2 * 4096)
    assert found["gated_linear gate_up"] == 2 * (28672 * 4096 + 2 * 4096 + 2 * 14336)
    # K and V of 8 heads, a slot, for each token; 32 heads of queries in, as many out
    assert found["decode attention 170"] == 2 * (170 * (2 * 8 * 128 * 2 + 4) + 2 * 32 * 128 * 2)


@pytest.mark.parametrize(
    ("num_bytes", "num_calls", "expected"),
    [
        (100, 40, 2),  # one more, so that the cache is full of others
        (101, 40, 2),
        (99, 40, 3),
        (1000, 40, 2),
        (1, 40, 40),  # never more than calls
        (1000, 1, 1),
    ],
)
def test_copies_exceed_the_cache_but_not_the_calls(
    num_bytes: int, num_calls: int, expected: int
) -> None:
    assert copies_to_exceed(100, num_bytes, num_calls) == expected


# ---------------------------------------------------------------- checks


def test_rounding_passes_the_check_and_more_does_not() -> None:
    case, values = make_cases(LLAMA, [3])[0], torch.ones(100)
    check(case, returning(values * 1.01), returning(values))
    with pytest.raises(ValueError, match=r"add_rms_norm .* of 3 rows is wrong.* 3\.0e-02 "):
        check(case, returning(values * 1.03), returning(values))


@pytest.mark.parametrize("wrong", [torch.full((4,), torch.nan), torch.tensor([1.0, 1, 1, 0])])
def test_every_result_of_every_copy_is_checked(wrong: torch.Tensor) -> None:
    case, right = make_cases(LLAMA, [1])[0], torch.ones(4)
    expected = returning(right, right) * 2
    check(case, returning(right, right) * 2, expected)
    with pytest.raises(ValueError, match="is wrong"):
        check(case, returning(right, right) + returning(right, wrong), expected)


@pytest.mark.parametrize("wrong", [torch.ones(1), torch.ones(4).half()])
def test_another_shape_or_type_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        check(make_cases(LLAMA, [1])[0], returning(wrong), returning(torch.ones(4)))


# ---------------------------------------------------------------- the result


def test_columns_of_the_table_are_aligned_and_hold_every_field() -> None:
    header, *lines = table([ROW, {**ROW, "rows": 1, "ours_us": 1.5}]).split("\n")
    assert sorted(header.split()) == sorted(ROW)
    assert {len(line) for line in lines} == {len(header)}
    in_order = [str(ROW[name]) for name in header.split()]
    assert lines[0].split() == " ".join(in_order).split()


def test_a_row_has_the_times_their_ratio_and_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(2.0, "graph"), (5.0, "events")])
    monkeypatch.setattr(layer_ops, "device_us", lambda calls, num_calls: next(times))
    names = []

    def make(name: str) -> Call:
        names.append(name)
        return lambda: (torch.ones(2),)

    case = Case("norm", "4096", 8, 3_000_000, make)
    row = layer_ops.measure(case, num_calls=4, cold_bytes=5_000_000, gb_s=2000.0)
    assert names == ["triton"] * 3 + ["torch"] * 3
    facts = {"op": "norm", "rows": 8, "detail": "4096", "kernel": "triton", "cold": True}
    times_us = {"ours_us": 2.0, "torch_us": 5.0, "ratio": 2.5, "at_copy_bandwidth_us": 1.5}
    assert row == {**facts, "method": "graph/events", **times_us}


def test_inputs_that_stay_in_the_cache_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        layer_ops, "device_us", lambda calls, num_calls: (float(len(calls)), "graph")
    )
    case = Case("norm", "4096", 8, 100, lambda name: lambda: (torch.ones(2),))
    row = layer_ops.measure(case, num_calls=4, cold_bytes=401, gb_s=1.0)
    assert (row["cold"], row["ours_us"], row["method"]) == (False, 4.0, "graph")
    assert layer_ops.measure(case, num_calls=4, cold_bytes=399, gb_s=1.0)["cold"] is True


def test_without_a_gpu_there_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^There is no GPU.*run this where[^\n]*$"):
        layer_ops.main([])


@pytest.mark.parametrize("flags", [["--calls", "0"], ["--rows", "8", "0"]])
def test_counts_below_one_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        layer_ops.main(flags)
    assert "must be 1 or more" in capsys.readouterr().err


# ---------------------------------------------------------------- all cases, interpreted


def tiny_cases() -> list[Case]:
    return make_cases(TINY, [1, 3])


def wrong_case() -> Case:
    """The first, but ours is a tenth too large."""
    case = tiny_cases()[0]

    def make(name: str) -> Call:
        call = case.make(name)
        return (lambda: tuple(1.1 * result for result in call())) if name == "triton" else call

    return replace(case, op="wrong", make=make)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, float | str]:
    return run_interpreted("unit/benchmark/test_layer_ops_benchmark.py", "triton")


@pytest.mark.long_matrix
@pytest.mark.parametrize("label", labels_of(tiny_cases()))
def test_interpreted_kernels_pass_the_check(outcomes: dict[str, float | str], label: str) -> None:
    assert outcomes[label] == "right"


def test_a_wrong_kernel_does_not_pass_it(outcomes: dict[str, float | str]) -> None:
    (outcome,) = (outcome for label, outcome in outcomes.items() if label.startswith("wrong"))
    assert "is wrong: it differs from torch's" in str(outcome)


def main() -> None:
    torch.set_num_threads(1)
    cases = [*tiny_cases(), wrong_case()]
    for label, case in zip(labels_of(cases), cases, strict=True):
        outcome = "right"
        try:
            check(case, *(case.calls(name, 2) for name in BACKENDS))
        except (AssertionError, ValueError) as error:
            outcome = str(error) or "another shape or type"
        print(json.dumps([label, outcome]), flush=True)


if __name__ == "__main__":
    main()
