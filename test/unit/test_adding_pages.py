"""docs/adding_a_*.md name all files that an addition touches: additions are made in a copy of the
source, by the files that the pages list and no others, and work there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from additions import ADDITIONS, copy_with_additions
from code_shape import ROOT, only_gives_names, project_texts
from utils import make_random_model

LISTED = re.compile(r"^- `([^`]+)`: \S", re.M)
CODE = "python/"
PROMPT, NUM_NEW = [5, 9, 3, 5, 9], 12  # those of additions_at_work.py


def listed_files(page: str) -> set[str]:
    """The files under the heading `## Files`, tests apart."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    section = text.split("\n## Files\n")[1].split("\n## ")[0]
    return {path for path in LISTED.findall(section) if not path.startswith("test/")}


@pytest.mark.parametrize("page", ADDITIONS)
def test_an_addition_touches_the_files_that_its_page_lists(page: str) -> None:
    assert ADDITIONS[page].files == listed_files(page)


def test_each_page_has_an_addition() -> None:
    """A length policy works only where a test names it: there is no flag."""
    pages = {path.stem for path in (ROOT / "docs").glob("adding_a_*.md")}
    assert pages == ADDITIONS.keys() | {"adding_a_length_policy"}


def test_a_length_policy_is_named_in_the_files_that_its_page_lists() -> None:
    found = {
        path
        for path, text in project_texts().items()
        if path.startswith(CODE) and path.endswith(".py") and re.search(r"\bFixedLength\b", text)
        if not only_gives_names(text)
    }
    assert listed_files("adding_a_length_policy") == found


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A model of the added family, and what transformers' Qwen3 says with the same weights."""
    from transformers import AutoModelForCausalLM

    folder = make_random_model("qwen3", tmp_path_factory.mktemp("models") / "twin")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(NUM_NEW):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["TwinForCausalLM"], "model_type": "twin", "num_repeated": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def found(twin: tuple[Path, list[int]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    copy = copy_with_additions(tmp_path_factory.mktemp("copy"))
    places = [copy / "python", copy / "sgl-kernel" / "python"]
    script = ROOT / "test" / "support" / "additions_at_work.py"
    process = subprocess.run(
        [sys.executable, "-P", str(script), str(twin[0])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


@pytest.mark.long_matrix
def test_the_added_model_backend_and_drafter_give_the_models_tokens(
    found: dict[str, Any], twin: tuple[Path, list[int]]
) -> None:
    assert found["backend"] == "eager"
    assert found["num_drafts"] > 0
    assert found["tokens"] == twin[1]


@pytest.mark.long_matrix
def test_the_added_sampling_parameter_rules_tokens_out(found: dict[str, Any]) -> None:
    """Few enough that the best one alone is left."""
    freely, best = found["drawn"]
    assert best == found["tokens"] != freely


def test_the_added_control_call_is_answered(found: dict[str, Any]) -> None:
    assert found["noted"] == "Noted: trained"
    assert found["route"] == ["/note_weights"]


def test_the_added_metric_is_shown(found: dict[str, Any]) -> None:
    assert found["metric"] == ['sglang:ended_by_length_total{model_name="twin"} 3.0']
