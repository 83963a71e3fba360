"""Files of folders and flags: only regular ones are read, up to a size and a depth, at once."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from file_readers import READERS
from serving_utils import make_model_dir
from sglang.srt.plain_files import (
    MAX_DEPTH,
    UnreadableFileError,
    check_folder,
    read_bytes,
    read_json,
    read_text,
)
from sglang.srt.tokenizer import load_tokenizer


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(os.path.relpath(path))


SPECIAL_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": lambda path: os.mkfifo(path),
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "loop": lambda path: path.symlink_to(path),
}


def refusal(read: Callable[[], Any], path: Path) -> str:
    """The one line of an error, which names the file."""
    with pytest.raises(ValueError) as error:
        read()
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 600 + len(str(path))
    assert str(path) in message
    return message


@pytest.mark.parametrize("make", SPECIAL_FILES.values(), ids=list(SPECIAL_FILES))
def test_what_is_no_regular_file_is_refused_at_once(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    path = tmp_path / "file"
    make(path)
    assert "cannot be read: " in refusal(lambda: read_bytes(path, 10), path)


@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_a_pipe(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    make_model_dir(tmp_path / "model")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    refusal(lambda: READERS[name](path), path)


def test_what_another_library_opens_is_looked_at_first(tmp_path: Path) -> None:
    """transformers would wait for a pipe, whatever its name is."""
    shutil.copy(make_model_dir(tmp_path / "model") / "config.json", tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "gone").symlink_to("nowhere")
    check_folder(tmp_path)
    os.mkfifo(tmp_path / "vocab.json")
    assert "no regular file" in refusal(lambda: load_tokenizer(tmp_path), tmp_path / "vocab.json")


def test_a_folder_with_tokenizer_config_json_alone_says_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shutil.copy(make_model_dir(tmp_path / "model") / "config.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    message = refusal(lambda: load_tokenizer(tmp_path), tmp_path)
    assert message.endswith("--tokenizer-path names another folder with a tokenizer.json.")


def test_sizes_have_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    assert "is larger than 4 bytes" in refusal(lambda: read_text(path, 4), path)
    assert "is larger than 4 bytes" in refusal(lambda: read_json(path, dict, 4), path)


def nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "0" + closing * depth


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["list", "dict"])
def test_depth_has_a_limit(opening: str, closing: str, tmp_path: Path) -> None:
    path, kind = tmp_path / "file.json", {"[": list, "{": dict}[opening[0]]
    path.write_text(nested(MAX_DEPTH, opening, closing))
    assert read_json(path, kind)
    for depth in (MAX_DEPTH + 1, 900, 200_000):
        path.write_text(nested(depth, opening, closing))
        assert "nested too deeply" in refusal(lambda: read_json(path, kind), path)
    path.write_text(f'["{"[" * 1000}"]')
    assert read_json(path, list) == ["[" * 1000]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not valid JSON"),
        (b'{"a": 1', "is not valid JSON"),
        (b"[1]", "must hold JSON with an object"),
        (b'{"a": "\xff"}', "is no text in UTF-8"),
        (b'{"a": ["\\ud800"]}', "is not valid JSON"),
        (b'{"\\ud800": 1}', "is not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not valid JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_json_object_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    assert said in refusal(lambda: read_json(path, dict), path)


def test_numbers_of_transformers_files_are_taken(tmp_path: Path) -> None:
    """Its own writer writes infinities, which JSON does not have."""
    path = tmp_path / "file.json"
    path.write_text(
        '{"most": Infinity, "long": 1000000000000000019884624838656, "text": "\U0001f600"}'
    )
    assert read_json(path, dict)["most"] == float("inf")


def test_the_reason_stands_alone_too(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError) as error:
        read_bytes(tmp_path / "none", 1)
    assert error.value.reason == "cannot be read: No such file or directory"
