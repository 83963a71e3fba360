"""Tests what the machine says of itself."""

from __future__ import annotations

from pathlib import Path

from sglang.srt.host import bytes_left


def test_pages_of_files_are_no_use_of_a_control_group(tmp_path: Path) -> None:
    """A checkpoint that was just read is among them."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text(
        "anon 200\nactive_file 300\ninactive_file 400\nshmem 50\n"
    )
    assert bytes_left(tmp_path, 5000) == 1000 - 900 + 300 + 400


def test_a_group_without_a_limit_leaves_all(tmp_path: Path) -> None:
    assert bytes_left(tmp_path, 5000) == 5000
    (tmp_path / "memory.max").write_text("max\n")
    assert bytes_left(tmp_path, 5000) == 5000
