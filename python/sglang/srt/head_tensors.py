"""Reads what a head's file says about it without its weights: shapes, and tokens; no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open

from sglang.srt.model_files import weight_names
from sglang.srt.tensor_headers import read_headers

Shapes = dict[str, tuple[int, ...]]
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
FETCH = "use the files as they were published"


def read_shapes(folder: Path) -> Shapes:
    """Returns the shape of each tensor in a folder's safetensors; nothing where there are none,
    such as before they are fetched or converted.

    Raises:
        ModelPathError: if a file is broken.
    """
    return {name: header.shape for name, header in read_headers(folder).items()}


def vocabulary_problem(folder: Path, names: dict[str, str], vocab_size: int) -> str:
    """Says how `d2t`, each draft token's distance to the target's, contradicts `t2d`, which marks
    the target's tokens that the head has; empty if it does not, or one of them is missing.

    Args:
        names: in the files, of the tensors by the head's names.
    """
    if DRAFT_TO_TARGET not in names or TARGET_TO_DRAFT not in names:
        return ""
    d2t, t2d = (_read(folder, names[each]) for each in (DRAFT_TO_TARGET, TARGET_TO_DRAFT))
    if d2t is None or t2d is None or d2t.dtype.kind not in "iu" or t2d.dtype.kind != "b":
        return ""  # the loader names types and shapes
    ids = d2t.ravel() + np.arange(d2t.size)
    if d2t.ndim != 1 or t2d.shape != (vocab_size,) or np.any((ids < 0) | (ids >= vocab_size)):
        return ""
    marked = np.flatnonzero(t2d)
    if np.array_equal(ids, marked):
        return ""
    if len(ids) != len(marked):
        said = f"d2t names {len(ids)} tokens of the target, but t2d marks {len(marked)}"
        return f"{said}; {FETCH}"
    first = int(np.flatnonzero(ids != marked)[0])
    said = f"d2t says token {ids[first]} of the target of draft token {first}, t2d {marked[first]}"
    return f"{said}; {FETCH}"


def _files(folder: Path) -> list[Path]:
    """Returns the safetensors of a folder; none where one is missing."""
    present = [file.name for file in folder.iterdir() if file.is_file()]
    names, _ = weight_names(folder, present)
    return [folder / name for name in names] if set(names) <= set(present) else []


def _read(folder: Path, name: str) -> np.ndarray | None:
    """Returns a tensor; None for one of a type that numpy does not have."""
    for file in _files(folder):
        with safe_open(file, framework="np") as tensors:
            if name in tensors.keys():  # noqa: SIM118
                try:
                    values: np.ndarray = tensors.get_tensor(name)
                except (TypeError, KeyError, AttributeError):
                    return None
                return values
    return None
