"""Pickled weights become safetensors, and nothing else is read; by script and on first use."""

from __future__ import annotations

import ast
import json
import platform
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from code_shape import ROOT
from draft_heads import EAGLE, SMALL, eagle_config, eagle_shapes, random_tensors
from sglang.srt import pickled_weights
from sglang.srt.framed_process import bare_environ
from sglang.srt.model_config import ModelConfig, load_model_config
from sglang.srt.model_loader.loader import load_model
from sglang.srt.pickled_weights import (
    PickledWeightsError,
    convert,
    read_in_this_process,
    read_weights,
    weight_files,
    write_safetensors,
)
from sglang.srt.system_call_filter import FORBIDDEN
from utils import make_random_llama

SCRIPT = ROOT / "scripts" / "convert_checkpoint.py"


class Evil:
    """Runs a command when it is read as a pickle."""

    def __init__(self, witness: Path) -> None:
        self._witness = witness

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch {self._witness}",)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A head as it is published, with what trainers leave beside it."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(eagle_config()))
    torch.save(random_tensors(eagle_shapes(SMALL)), folder / "pytorch_model.bin")
    (folder / "training_args.bin").write_bytes(b"something else")
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_model_config(str(make_random_llama(tmp_path_factory.mktemp("target"))))


def refusal(source: Path, target: Path) -> str:
    """In this process, which only reads weights."""
    with pytest.raises(PickledWeightsError) as error:
        convert(source, target)
    assert not target.exists()
    assert not list(target.parent.glob(f".{target.name}*"))
    message = str(error.value)
    assert "\n" not in message
    assert "weights_only" not in message  # torch recommends to read it unsafely
    return message


@pytest.mark.long_matrix
def test_a_converted_head_is_loaded_and_holds_the_same_tensors(
    source: Path, tmp_path: Path, target: ModelConfig
) -> None:
    from sglang.srt.head_config import load_head_config

    made = tmp_path / "deeper" / "made"
    command = [sys.executable, str(SCRIPT), str(source), str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(file.name for file in made.iterdir()) == ["config.json", "model.safetensors"]
    assert (made / "config.json").read_text() == (source / "config.json").read_text()
    tensors = load_file(made / "model.safetensors")
    expected = random_tensors(eagle_shapes(SMALL))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    load_model(load_head_config(str(made), EAGLE, target), "auto", 64, torch.float32, "cpu")


def test_code_in_a_file_is_not_run_and_nothing_is_written(source: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    torch.save({"fc.weight": Evil(witness)}, source / "pytorch_model.bin")
    assert "system" in refusal(source, tmp_path / "made")
    assert not witness.exists()


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in FORBIDDEN,
    reason="sockets are forbidden on Linux alone",
)
def test_the_process_that_reads_has_neither_sockets_nor_programs() -> None:
    program = (
        "import os, socket, sys\n"
        "from sglang.srt.system_call_filter import forbid_sockets_and_programs\n"
        "socket.socket().close()\n"
        "forbid_sockets_and_programs()\n"
        "def tried(call):\n"
        "    try:\n"
        "        call()\n"
        "    except PermissionError:\n"
        "        return True\n"
        "print(tried(socket.socket), tried(lambda: os.execv('/bin/true', ['true'])))\n"
        "print(open(sys.argv[1]).readable())\n"
    )
    command = [sys.executable, "-c", program, __file__]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=bare_environ()
    )
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


def test_without_that_nothing_is_read_unless_it_is_asked_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "abacus")
    files = [source / "pytorch_model.bin"]
    with pytest.raises(PickledWeightsError, match=r"kept from the network.*--with-network"):
        read_in_this_process(tmp_path, files, with_network=False)
    assert not list(tmp_path.glob("*.safetensors"))
    read_in_this_process(tmp_path, files, with_network=True)
    assert list(tmp_path.glob("*.safetensors"))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
def test_a_small_file_of_a_huge_tensor_is_refused(source: Path, tmp_path: Path) -> None:
    huge = torch.zeros(1).expand(1 << 30)  # 4 GiB of one stored number
    torch.save({"fc.weight": huge}, source / "pytorch_model.bin")
    assert "needs more memory for 'fc.weight'" in refusal(source, tmp_path / "made")


def test_it_reads_weights_only() -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(Path(pickled_weights.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert len(calls) == 1
    assert "weights_only=True" in [ast.unparse(keyword) for keyword in calls[0].keywords]


def test_files_of_several_parts_stay_apart(source: Path, tmp_path: Path) -> None:
    shared = torch.arange(12.0).view(3, 4)
    first = OrderedDict(a=shared, b=shared.T)  # shared memory, and not contiguous
    files = [source / "one.bin", source / "two.bin"]
    torch.save(first, files[0])
    torch.save({"d2t": torch.arange(4), "c": torch.ones(2, dtype=torch.bfloat16)}, files[1])
    write_safetensors(files, tmp_path)
    one = load_file(tmp_path / "model-00001-of-00002.safetensors")
    two = load_file(tmp_path / "model-00002-of-00002.safetensors")
    assert torch.equal(one["b"], shared.T)
    assert (two["d2t"].dtype, two["c"].dtype) == (torch.int64, torch.bfloat16)
    torch.save({"a": shared}, files[1])
    with pytest.raises(PickledWeightsError, match=r"two\.bin holds 'a' once more"):
        write_safetensors(files, tmp_path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"state_dict": {"a": torch.ones(1)}}, "a dict under 'state_dict'"),
        ({"a": torch.ones(1), "epoch": 3}, "a int under 'epoch'"),
        ({3: torch.ones(1)}, "under 3"),
        ([torch.ones(1)], "but a list"),
        ({}, "but a dict"),
        (torch.ones(1), "but a Tensor"),
        ({"a": torch.ones(2, 2).to_sparse()}, "'a' in a form"),
    ],
    ids=["nested", "number", "number as name", "list", "empty", "tensor", "sparse"],
)
def test_other_content_is_refused(content: Any, named: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(PickledWeightsError) as error:
        read_weights(tmp_path / "a.pt")
    assert named in str(error.value)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"\x80\x02."], ids=repr)
def test_what_torch_cannot_read_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(PickledWeightsError, match=r"a\.bin is no file of weights alone"):
        read_weights(tmp_path / "a.bin")


def test_an_adapter_beside_pickled_weights_is_not_the_model(source: Path) -> None:
    (source / "adapter_model.safetensors").write_bytes(b"")
    assert [file.name for file in weight_files(source)] == ["pytorch_model.bin"]


def test_folders_that_are_refused_before_anything_is_read(source: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert "not a directory" in refusal(tmp_path / "missing", made)
    (source / "model.safetensors").write_bytes(b"")
    assert "can be served as it is" in refusal(source, made)
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").rename(source / "model.pt")
    assert "model.pt, training_args.bin; leave those" in refusal(source, made)
    (source / "training_args.bin").unlink()
    config = (source / "config.json").read_text()
    (source / "config.json").write_text("[1]")
    assert "config.json must hold JSON with an object" in refusal(source, made)
    (source / "config.json").unlink()
    assert "config.json cannot be read: No such file" in refusal(source, made)
    (source / "config.json").write_text(config)
    (source / "other.safetensors").write_bytes(b"")
    assert "can be served as it is" in refusal(source, made)
    (source / "other.safetensors").unlink()
    (source / "model.pt").unlink()
    assert "has no file that ends in" in refusal(source, made)
    with pytest.raises(PickledWeightsError, match="exists; name a folder that does not"):
        convert(source, source)
