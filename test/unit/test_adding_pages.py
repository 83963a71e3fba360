"""docs/adding_a_*.md name the files that an addition touches: those of the page's own example."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from code_shape import ROOT, only_gives_names, project_texts

LISTED = re.compile(r"^- `([^`]+)`: \S", re.M)
CODE = ("python/", "sgl-kernel/")
NO_CODE = ("sgl-kernel/tests/",)


class Page(NamedTuple):
    """What its example is called in code, and how many files an addition may touch."""

    example: str
    max_files: int


PAGES = {
    "adding_a_backend": Page('TorchNativeBackend|"torch_native"', 2),
    "adding_a_control_call": Page("update_weight_version|UpdateWeightVersion", 5),
    "adding_a_drafter": Page('MaskDrafter|"mtp"', 3),
    "adding_a_length_policy": Page(r"\bFullLength\b", 2),
    "adding_a_metric": Page(r"\bnum_ended_by_grammars\b", 3),
    "adding_a_model": Page("Qwen3", 2),
    "adding_a_sampling_parameter": Page(r"\bmin_p\b", 6),
}


def listed_files(page: str) -> set[str]:
    """The files under the heading `## Files`, tests apart."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    section = text.split("\n## Files\n")[1].split("\n## ")[0]
    return {path for path in LISTED.findall(section) if not path.startswith("test/")}


def files_that_name(example: str) -> set[str]:
    """Code that names the example; a module that only gives names of another is none."""
    found = set()
    for path, text in project_texts().items():
        is_code = path.startswith(CODE) and not path.startswith(NO_CODE)
        is_code &= path.endswith((".py", ".cu", ".cuh")) and "egg-info" not in path
        if not is_code or not re.search(example, text):
            continue
        if not path.endswith(".py") or not only_gives_names(text):
            found.add(path)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_the_page_lists_the_files_that_name_its_example(name: str) -> None:
    page = PAGES[name]
    files = listed_files(name)
    assert files == files_that_name(page.example)
    assert len(files) <= page.max_files


def test_every_page_is_held_to_the_tree() -> None:
    assert {path.stem for path in (ROOT / "docs").glob("adding_a_*.md")} == set(PAGES)
