"""The part of long matrices that a run of the suite takes."""

from __future__ import annotations

import pytest

from turns import PARTS, case_of, chosen

TESTS = [*(f"test/a.py::test_pairs[{pair}]" for pair in range(PARTS + 1)), "test/a.py::test_alone"]


@pytest.mark.parametrize("turn", ["0", "7", "31000"])
def test_a_turn_and_more_of_it_have_no_test_twice(turn: str) -> None:
    part, more = chosen(turn, TESTS), chosen(f"more-of-{turn}", TESTS)
    assert not part & more
    assert len(part) in range(1, 4)
    assert len(more) in range(1, 4)
    assert "test/a.py::test_alone" in part | more, "CI takes each test"


def test_turns_differ_and_each_says_the_same_again() -> None:
    parts = [chosen(str(turn), TESTS) for turn in range(200)]
    assert parts == [chosen(str(turn), TESTS) for turn in range(200)]
    assert set.union(*parts) == set(TESTS)
    assert not set.intersection(*parts)
    assert set.union(*(chosen(f"more-of-{turn}", TESTS) for turn in range(200))) == set(TESTS)


def test_a_test_of_no_matrix_is_not_drawn(request: pytest.FixtureRequest) -> None:
    assert case_of(request.node) is None


@pytest.mark.long_matrix
def test_a_marked_test_is_a_case(request: pytest.FixtureRequest) -> None:
    assert case_of(request.node) == request.node.nodeid


@pytest.mark.long_matrix
def test_a_marked_file_is_one_case(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = request.node.getparent(pytest.Module)
    monkeypatch.setattr(file, "own_markers", [pytest.mark.long_matrix.mark])
    assert case_of(request.node) == f"files[{file.nodeid}]"
