"""A result names the commit of its tree, wherever the tree was copied to."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmark.environment import COMMIT_VARIABLE, ROOT, measured_commit, shown_command

COMMIT = "a" * 40


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    command = ["git", "-C", str(root), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "benchmark").mkdir(parents=True)
    shutil.copy(ROOT / ".gitattributes", root)
    (root / "benchmark" / "commit.txt").write_text("$Format:%H$\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    return root


def test_a_checkout_says_its_commit_and_whether_files_differ(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    environ = {COMMIT_VARIABLE: COMMIT}
    assert measured_commit(checkout, environ) == {"commit": commit, "dirty": False}
    (checkout / "new.py").write_text("")
    assert measured_commit(checkout, environ) == {"commit": commit, "dirty": True}


def test_an_archive_carries_its_commit_even_below_another_checkout(checkout: Path) -> None:
    copy = checkout / "copy"
    copy.mkdir()
    subprocess.run(
        f"git -C {checkout} archive HEAD benchmark | tar x -C {copy}", shell=True, check=True
    )
    commit = git(checkout, "rev-parse", "HEAD")
    assert measured_commit(copy, {}) == {"commit": commit, "dirty": False}


def test_another_copy_is_told_its_commit_by_who_made_it(checkout: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    for told, expected in (
        (COMMIT, {"commit": COMMIT, "dirty": False}),
        (f"{COMMIT}-dirty", {"commit": COMMIT, "dirty": True}),
    ):
        assert measured_commit(copy, {COMMIT_VARIABLE: told}) == expected
    assert measured_commit(copy, {}) == {"commit": "unknown", "dirty": False}


def test_a_command_names_no_folder_of_the_machine() -> None:
    argv = [str(ROOT / "benchmark" / "headline.py"), "--out", "/opt/results", "--dir=/a/b"]
    assert shown_command(argv) == "python -m benchmark.headline --out results --dir=b"
