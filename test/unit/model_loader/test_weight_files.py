"""The files of a folder that are the model's: those that transformers takes, for a start and for an
update from disk alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.model_loader.loader import WeightPlaces, load_model
from sglang.srt.model_loader.weight_files import read_directory
from sglang.srt.weight_sync.weight_reader import WeightUpdateError
from sglang.srt.weight_sync.weight_store import WeightStore
from utils import make_random_llama

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("models") / "sharded", num_shards=3)


@pytest.fixture(scope="module")
def store(whole: Path) -> WeightStore:
    """Returns the weights of a running model that has others than the files."""
    config = load_model_config(str(whole))
    return WeightStore(load_model(config, "dummy", 64, torch.float32, "cpu"), config)


def add_files_of_others(path: Path) -> None:
    for name in ("consolidated", "adapter_model", "optimizer", "rng_state"):
        save_file({"layers.0.attention.wq.weight": torch.ones(2)}, path / f"{name}.safetensors")
    save_file({NORM: torch.ones(64)}, path / "consolidated.00.safetensors")


def add_index(path: Path, files: dict[str, str]) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def weight_map(path: Path) -> dict[str, str]:
    """Reads the index: the file of each weight."""
    names: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    return names


def add_index_of_missing_shards(path: Path) -> None:
    add_index(path, {NORM: "model-00001-of-00002.safetensors"})


def add_index_of_older_shards(path: Path) -> None:
    older = {name: tensor + 1 for name, tensor in load_file(path / WEIGHTS).items()}
    save_file(older, path / "model-00001-of-00001.safetensors")
    add_index(path, dict.fromkeys(older, "model-00001-of-00001.safetensors"))


def add_nonsense_index(path: Path) -> None:
    (path / INDEX).write_text("{")


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("model-*.safetensors"))


def store_twice(path: Path, right: int, other: int) -> None:
    """The index names `right` of the shards for the norm; `other` has other values under it."""
    for number, value in ((right, 2.0), (other, 3.0)):
        file = shards(path)[number]
        save_file({**load_file(file), NORM: torch.full((64,), value)}, file, {"format": "pt"})
    add_index(path, {**weight_map(path), NORM: shards(path)[right].name})


def leave_out(path: Path, name: str) -> None:
    add_index(path, {each: file for each, file in weight_map(path).items() if each != name})


def name_another_shard(path: Path) -> None:
    """Each weight is in the file before the one that the index names."""
    names = [file.name for file in shards(path)]
    files = weight_map(path).items()
    add_index(path, {name: names[names.index(file) - 1] for name, file in files})


FORMS_OF_WHOLE: dict[str, Callable[[Path], Any]] = {
    "files of others": add_files_of_others,
    "an index of missing shards": add_index_of_missing_shards,
    "an index of older shards": add_index_of_older_shards,
    "a nonsense index": add_nonsense_index,
}
FORMS_OF_SHARDED: dict[str, Callable[[Path], Any]] = {
    "files of others": add_files_of_others,
    "a weight in two shards": lambda path: store_twice(path, right=-1, other=0),
    "a weight that the index leaves out": lambda path: leave_out(path, NORM),
    "an index that names other shards": name_another_shard,
}


@pytest.mark.parametrize(
    ("is_sharded", "form"),
    [
        *(pytest.param(False, form, id=f"whole, {name}") for name, form in FORMS_OF_WHOLE.items()),
        *(
            pytest.param(True, form, id=f"shards, {name}")
            for name, form in FORMS_OF_SHARDED.items()
        ),
    ],
)
def test_a_folder_gives_the_weights_that_transformers_takes(
    whole: Path,
    sharded: Path,
    store: WeightStore,
    tmp_path: Path,
    is_sharded: bool,
    form: Callable[[Path], Any],
) -> None:
    from transformers import AutoModelForCausalLM

    path = Path(shutil.copytree(sharded if is_sharded else whole, tmp_path / "model"))
    form(path)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    config = load_model_config(str(path))
    places = WeightPlaces(load_model(config, "auto", 64, torch.float32, "cpu"), config)
    staged = store.reader.from_directory(str(path))
    assert set(places.names) == staged.keys()
    for name in places.names:
        assert torch.equal(places[name], expected[name]), name
        assert torch.equal(staged[name], expected[name]), name


@pytest.mark.parametrize(("right", "other"), [(0, 1), (0, -1), (-1, 0)])
@pytest.mark.parametrize("in_memory", [False, True])
def test_of_a_weight_in_two_shards_the_index_says_which(
    sharded: Path, tmp_path: Path, right: int, other: int, in_memory: bool
) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "model"))
    store_twice(path, right, other)
    read = [tensor for name, tensor in read_directory(path, in_memory) if name == NORM]
    assert len(read) == 1
    assert torch.equal(read[0], torch.full((64,), 2.0))


def test_without_an_index_shards_are_read_and_files_of_others_are_not(
    sharded: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "model"))
    expected = dict(read_directory(path))
    add_files_of_others(path)
    (path / INDEX).unlink()
    read = dict(read_directory(path))
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in read)


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        (["pytorch_model.bin"], "sglang convert-checkpoint"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "pytorch_model-"),
        (["pytorch_model.bin", "adapter_model.safetensors"], "sglang convert-checkpoint"),
        (["consolidated.00.pth"], "sglang convert-checkpoint"),
        (["model.Q4_K_M.gguf"], "GGUF"),
        (["tf_model.h5", "flax_model.msgpack"], "Convert weights"),
        ([], "is the download complete?"),
    ],
    ids=str,
)
def test_a_folder_without_safetensors_is_refused_in_one_line(
    whole: Path, store: WeightStore, tmp_path: Path, files: list[str], remedy: str
) -> None:
    shutil.copy(whole / "config.json", tmp_path)
    for name in files:
        (tmp_path / name).write_bytes(b"never read")
    with pytest.raises(ModelPathError) as at_start:
        dict(read_directory(tmp_path))
    with pytest.raises(WeightUpdateError) as at_update:
        store.reader.from_directory(str(tmp_path))
    for message in (str(at_start.value), str(at_update.value)):
        assert remedy in message
        assert str(tmp_path) in message
        assert "\n" not in message
