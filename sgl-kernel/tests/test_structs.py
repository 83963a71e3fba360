"""The structs that Python fills have the fields of those that C++ reads."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from sgl_kernel import ConfirmedDrafts, RaggedTrees, _structs

_INCLUDE = Path(__file__).parents[1] / "include" / "sgl_kernel"
_TYPES = {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float}


@pytest.mark.parametrize(
    ("struct", "header"),
    [
        (_structs.DraftCandidates, "build_ragged_trees.cuh"),
        (_structs.PackedTrees, "build_ragged_trees.cuh"),
        (_structs.LinkedTrees, "verify_trees.cuh"),
        (_structs.UniformVerdict, "verify_trees.cuh"),
        (_structs.PackedVerdict, "verify_trees.cuh"),
        (_structs.TreeCoins, "sample_trees.cuh"),
    ],
)
def test_structs_have_the_fields_of_their_header(
    struct: type[ctypes.Structure], header: str
) -> None:
    text = (_INCLUDE / header).read_text()
    _, _, rest = text.partition(f"struct {struct.__name__} {{")
    body = re.split(r"\n(?:};|  __device__)", rest)[0]
    fields = re.findall(r"^  (?:const )?(\w+)(\*?) (\w+);", body, re.MULTILINE)
    expected = [
        (name, ctypes.c_void_p if pointer else _TYPES[kind]) for kind, pointer, name in fields
    ]
    assert list(struct._fields_) == expected


def test_results_have_the_fields_of_their_structs() -> None:
    names = [name for name, _ in _structs.PackedTrees._fields_]
    assert names == list(RaggedTrees._fields)
    names = [name for name, _ in _structs.PackedVerdict._fields_]
    assert names == [*ConfirmedDrafts._fields, "width"]
