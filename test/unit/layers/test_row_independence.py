"""Kernels of --enable-deterministic-inference in Triton's interpreter: right, and with the same
bits for a row in any company. The interpreter has one tile for all products but those of few rows;
test/gpu/test_row_independence_gpu.py compares all tiles on a GPU."""

from __future__ import annotations

import pytest
import torch

from attention_cases import CASES, HOLE_CASES, PACKED_CASES, TOLERANCE
from interpreted import run_interpreted
from row_independence_cases import DEFAULT_BACKEND, PARTS, SMALL, SMALL_ATTENTION
from sglang.srt.layers.attention.triton_ops.parts_kernel import num_parts
from sglang.srt.layers.ops.ordered_products import LIBRARY_ROWS, divide
from sglang.srt.registry import ROW_INDEPENDENT

ORACLE_CASES = CASES | PACKED_CASES | HOLE_CASES
RIGHT = [name for name, case in ORACLE_CASES.items() if not case.trees]


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/attention_cases.py", ROW_INDEPENDENT, request)


@pytest.fixture(scope="module")
def differences(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/row_independence_cases.py", ROW_INDEPENDENT, request)


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", RIGHT)
def test_attention_equals_the_oracle(errors: dict[str, float | str], name: str) -> None:
    error = errors[name]
    assert isinstance(error, float), error
    assert error <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", SMALL)
def test_a_row_has_the_same_bits_among_any_rows(
    differences: dict[str, float | str], name: str
) -> None:
    assert differences[name] == 0


@pytest.mark.parametrize("name", SMALL_ATTENTION)
def test_attention_of_a_row_has_the_same_bits_in_any_step(
    differences: dict[str, float | str], name: str
) -> None:
    assert differences[name] == ""


@pytest.mark.parametrize("name", [DEFAULT_BACKEND])
def test_the_comparison_sees_that_the_default_kernels_have_others(
    differences: dict[str, float | str], name: str
) -> None:
    assert "rows differ in" in str(differences[name])


@pytest.mark.parametrize("name", [PARTS])
def test_the_device_finds_the_parts_of_all_positions(
    differences: dict[str, float | str], name: str
) -> None:
    assert differences[name] == 0


def test_parts_are_counted_as_they_lie() -> None:
    first_len, ends, end = 8, list[int](), 0
    for length in (8, 16, 32, 64):
        for _ in range(16):
            end += length
            ends.append(end)
    for length in (*range(1, 600), 1919, 1920):
        assert num_parts(length, first_len) == sum(1 for part in ends if part < length) + 1


@pytest.mark.parametrize("num_rows", [1, 127, 128, 129, 1023, 1024, 1500, 3000, 8192, 20_001])
@pytest.mark.parametrize("sizes", [(), (256,), (128, 2048), LIBRARY_ROWS], ids=str)
def test_rows_are_divided_among_numbers_that_the_library_may_compute(
    num_rows: int, sizes: tuple[int, ...]
) -> None:
    pieces = divide(num_rows, frozenset(sizes))
    assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == num_rows
    assert all(piece.end > piece.start for piece in pieces)
    assert {p.end - p.start for p in pieces if p.by_library} <= {*sizes}
    assert sum(not piece.by_library for piece in pieces) <= 1
