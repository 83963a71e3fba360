"""Names of models in flags: the cache of the hub first, else a download; never code, and pickles of
heads alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from draft_heads import EAGLE, SMALL, eagle_config, eagle_shapes, random_tensors
from fake_hub import COMMIT, FakeHub, fake_hub, lay_out, reach
from sglang.srt import pickled_weights
from sglang.srt.framed_process import bare_environ
from sglang.srt.head_config import load_head_config
from sglang.srt.model_config import DEMO_MODELS_DIR, ModelPathError, load_model_config
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.weight_files import read_directory
from sglang.srt.processes.model_folders import ModelFolders
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import load_tokenizer
from utils import make_random_llama

NAME = "owner/model"
HEAD = "owner/head"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two shards, as repositories have it: with a tokenizer, code and other things."""
    folder = make_random_llama(tmp_path_factory.mktemp("hub") / "model", num_shards=2)
    assert len([*folder.glob("model-*.safetensors")]) > 1
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODELS_DIR / "tiny-code" / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def published(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gives that model with what must not be fetched beside it."""
    folder = tmp_path_factory.mktemp("published") / "model"
    shutil.copytree(model, folder)
    (folder / "modeling_llama.py").write_text("raise SystemExit")
    torch.save({"a": torch.ones(1)}, folder / "pytorch_model.bin")
    save_file({"a": torch.ones(1)}, folder / "consolidated.safetensors")
    for name in ("original/consolidated.00.pth", "onnx/config.json", "README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head as it is published: pickled."""
    folder = tmp_path_factory.mktemp("published") / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(eagle_config()))
    torch.save(random_tensors(eagle_shapes(SMALL)), folder / "pytorch_model.bin")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub, which cannot be reached."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    return folder


@pytest.fixture
def hub(published: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that can be reached."""
    with fake_hub({NAME: published, HEAD: head}) as hub:
        reach(hub, monkeypatch)
        yield hub


@pytest.fixture
def reads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickled weights are read in this process, which takes less time."""
    monkeypatch.setattr(pickled_weights, "_read_in_a_child", _read_here)


def _read_here(files: Sequence[Path], folder: Path, with_network: bool) -> None:
    pickled_weights.write_safetensors(files, folder)


def found(**flags: Any) -> ServerArgs:
    return ModelFolders.find(ServerArgs(**flags)).with_weights()


def refusal(**flags: Any) -> str:
    with pytest.raises(ModelPathError) as error:
        found(**flags)
    message = str(error.value)
    assert "\n" not in message
    return message


def head_flags(path: str) -> dict[str, Any]:
    return {
        "model_path": "demo",
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": path,
    }


def check_is_head(folder: str, target: Path) -> None:
    """Loads a folder as a head, and compares it with what was pickled."""
    config = load_head_config(folder, EAGLE, load_model_config(str(target)))
    load_model(config, "auto", 64, torch.float32, "cpu")
    tensors = load_file(Path(folder) / "model.safetensors")
    expected = random_tensors(eagle_shapes(SMALL))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("revision", [None, "v1.0", COMMIT])
def test_a_model_in_the_cache_is_its_snapshot_and_nobody_is_asked(
    revision: str | None, cache: Path, model: Path
) -> None:
    snapshot = lay_out(cache, NAME, model, revision or "main")
    args = found(model_path=NAME, revision=revision)
    assert (args.model_path, args.served_model_name) == (str(snapshot), NAME)
    links = dict(read_directory(snapshot))
    files = dict(read_directory(model))
    assert links.keys() == files.keys()
    assert all(torch.equal(links[name], files[name]) for name in files)
    assert load_tokenizer(snapshot).encode("def f") == load_tokenizer(model).encode("def f")


def test_tokenizer_and_head_have_names_and_revisions_of_their_own(
    cache: Path, model: Path, head: Path
) -> None:
    tokenizer = lay_out(cache, "owner/tokenizer", model)
    draft = lay_out(cache, HEAD, head, "v2")
    flags = {"tokenizer_path": "owner/tokenizer", "speculative_draft_model_revision": "v2"}
    args = ModelFolders.find(ServerArgs(**{**head_flags(HEAD), **flags})).args
    assert args.tokenizer_path == str(tokenizer)
    assert args.speculative_draft_model_path == str(draft)


def test_download_dir_is_another_cache(tmp_path: Path, model: Path) -> None:
    snapshot = lay_out(tmp_path / "other", NAME, model)
    args = found(model_path=NAME, download_dir=str(tmp_path / "other"))
    assert args.model_path == str(snapshot)


def test_offline_each_refusal_is_one_line_with_the_way_to_bring_a_folder(
    cache: Path, model: Path
) -> None:
    command = f"`hf download {NAME} --local-dir DIR`"
    message = refusal(model_path=NAME)
    assert "HF_HUB_OFFLINE is set" in message
    assert command in message
    assert "--model-path DIR" in message
    snapshot = lay_out(cache, NAME, model)
    assert f"hf download {NAME} --revision v9 " in refusal(model_path=NAME, revision="v9")
    shard = sorted(snapshot.glob("model-*.safetensors"))[-1]
    shard.unlink()
    assert f"lacks {shard.name}, and HF_HUB_OFFLINE" in refusal(model_path=NAME)
    (snapshot / "model.safetensors.index.json").unlink()  # the names of the others tell it
    assert f"lacks {shard.name}, and HF_HUB_OFFLINE" in refusal(model_path=NAME)
    for file in snapshot.glob("model-*.safetensors"):
        file.unlink()
    assert "lacks its weights, and" in refusal(model_path=NAME)
    assert found(model_path=NAME, load_format="dummy").model_path == str(snapshot)
    (snapshot / "tokenizer.json").unlink()
    assert "lacks tokenizer.json, and" in refusal(model_path=NAME)
    assert found(model_path=NAME, tokenizer_path="demo", load_format="dummy").model_path
    (snapshot / "config.json").unlink()
    assert "lacks config.json and 1 more," in refusal(model_path=NAME)
    assert "--speculative-draft-model-path DIR" in refusal(**head_flags(HEAD))


def test_a_link_without_its_blob_is_missing_and_one_to_a_pipe_is_not_waited_for(
    cache: Path, model: Path
) -> None:
    snapshot = lay_out(cache, NAME, model)
    shard = min(snapshot.glob("model-*.safetensors"))
    shard.resolve().unlink()
    assert f"lacks {shard.name}" in refusal(model_path=NAME)
    os.mkfifo(cache / "pipe")
    shard.unlink()
    shard.symlink_to(cache / "pipe")
    assert f"lacks {shard.name}" in refusal(model_path=NAME)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(cache / "pipe")
    assert "lacks config.json" in refusal(model_path=NAME)


# ---------------------------------------------------------------- folders


def test_folders_and_bundled_models_never_touch_the_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / NAME).symlink_to(model)
    program = (
        "import sys\n"
        "from sglang.srt.entrypoints import server_process\n"
        "from sglang.srt.processes.model_folders import ModelFolders\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "for path in sys.argv[1:]:\n"
        "    args = ServerArgs(model_path=path, tokenizer_path='demo')\n"
        "    print(ModelFolders.find(args).with_weights().model_path)\n"
        "print('huggingface_hub' in sys.modules)\n"
    )
    paths = ["demo", str(model), NAME, f"~/{NAME}", f"./{NAME}"]
    done = subprocess.run(
        [sys.executable, "-c", program, *paths],
        env={**bare_environ(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    *folders, has_hub = done.stdout.splitlines()
    assert has_hub == "False", done.stderr
    assert [Path(each).resolve() for each in folders[1:]] == [model] * 4
    assert folders[0] == str(DEMO_MODELS_DIR / "tiny-code")


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/no/such",
        "a/b/c",
        "word",
        "a/..",
        "a..b/c",
        "a/b/",
        "./a/b",
        "~/a",
        "a/b\n",
        "a/b c",
        "a--b/c",
        "a" * 97 + "/b",
    ],
)
def test_what_is_neither_a_folder_nor_a_name_is_one_line(
    path: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for flags in ({"model_path": path}, {"model_path": "demo", "tokenizer_path": path}):
        assert "is neither a directory nor a name of the Hugging Face hub" in refusal(**flags)
    assert not hub.asked


def test_a_file_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/model.gguf").write_bytes(b"GGUF")
    assert "is not a directory" in refusal(model_path="models/model.gguf")
    assert not hub.asked


@pytest.mark.parametrize("revision", ["../../x", "/etc/passwd", "", "a b"])
def test_a_revision_is_no_path(revision: str, hub: FakeHub) -> None:
    assert "--revision" in refusal(model_path=NAME, revision=revision)
    assert not hub.asked


# ---------------------------------------------------------------- downloads


def test_a_download_has_weights_config_tokenizer_and_templates_and_is_made_once(
    hub: FakeHub, published: Path, model: Path, cache: Path
) -> None:
    folders = ModelFolders.find(ServerArgs(model_path=NAME))
    small = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"}
    others = {"generation_config.json", "model.safetensors.index.json"}
    template = "additional_chat_templates/tool_use.jinja"
    assert {*hub.fetched} == small | others | {template}
    args = folders.with_weights()
    shards = {file.name for file in model.glob("model-*.safetensors")}
    assert {*hub.fetched} == small | others | {template} | shards
    assert len(hub.fetched) == len({*hub.fetched})
    assert args.model_path == str(cache / "models--owner--model" / "snapshots" / COMMIT)
    got = dict(read_directory(Path(args.model_path)))
    assert all(torch.equal(tensor, got[name]) for name, tensor in read_directory(model))
    hub.asked.clear()
    assert found(model_path=NAME).model_path == args.model_path
    assert not hub.asked


def test_dummy_weights_are_not_fetched(hub: FakeHub) -> None:
    found(model_path=NAME, load_format="dummy")
    assert not [name for name in hub.fetched if name.endswith((".safetensors", ".bin", ".py"))]
    assert "config.json" in hub.fetched


def test_an_interrupted_download_goes_on(hub: FakeHub, cache: Path, model: Path) -> None:
    snapshot = lay_out(cache, NAME, model)
    shard = max(snapshot.glob("model-*.safetensors"))
    shard.resolve().unlink()
    shard.unlink()
    found(model_path=NAME)
    assert hub.fetched == [shard.name]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"model_path": "owner/other"}, "the hub knows no such model"),
        ({"model_path": NAME, "revision": "v9"}, "no such revision"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(
    flags: dict[str, Any], said: str, hub: FakeHub
) -> None:
    assert said in refusal(**flags)


def test_a_hub_that_cannot_be_reached_is_one_line_at_once(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    message = refusal(model_path=NAME)
    assert "it cannot be downloaded (ConnectError" in message
    assert f"`hf download {NAME} --local-dir DIR`" in message


def test_a_cache_that_cannot_be_written_is_one_line(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refusal(model_path=NAME, download_dir=str(tmp_path / "file"))
    assert "it cannot be written there" in message
    assert "--download-dir names another cache" in message


def test_a_model_of_pickled_weights_is_refused_before_they_are_fetched(
    hub: FakeHub, head: Path
) -> None:
    flags = {"model_path": HEAD, "tokenizer_path": "demo"}
    assert "pytorch_model.bin is not read, since such files can hold code" in refusal(**flags)
    assert "pytorch_model.bin" not in hub.fetched


# ---------------------------------------------------------------- pickled heads


def test_a_pickled_head_of_the_hub_is_converted_once(
    hub: FakeHub, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = found(**head_flags(HEAD)).speculative_draft_model_path
    assert folder is not None
    assert Path(folder).is_relative_to(tmp_path / "ours" / "sglang-adaptive" / "converted")
    check_is_head(folder, model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(subprocess, "run", None)
    assert found(**head_flags(HEAD)).speculative_draft_model_path == folder


def test_a_local_pickled_head_is_converted_anew_when_it_is_written_anew(
    head: Path, model: Path, tmp_path: Path, reads_here: None
) -> None:
    folder = shutil.copytree(head, tmp_path / "head")
    first = found(**head_flags(str(folder))).speculative_draft_model_path
    os.utime(folder / "pytorch_model.bin", ns=(0, 0))
    second = found(**head_flags(str(folder))).speculative_draft_model_path
    assert first is not None
    assert second is not None
    assert first != second
    check_is_head(second, model)
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")  # goes first
    assert found(**head_flags(str(folder))).speculative_draft_model_path == str(folder)


def test_a_conversion_that_fails_leaves_nothing_and_says_why(
    tmp_path: Path, head: Path, monkeypatch: pytest.MonkeyPatch, reads_here: None
) -> None:
    folder = shutil.copytree(head, tmp_path / "head")
    (folder / "pytorch_model.bin").write_bytes(b"no weights")
    message = refusal(**head_flags(str(folder)))
    assert message.startswith("--speculative-draft-model-path: ")
    assert "pytorch_model.bin is no file of weights alone" in message
    assert not list((tmp_path / "ours").rglob("*.safetensors"))
    assert not list((tmp_path / "ours" / "sglang-adaptive" / "converted").iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    message = refusal(**head_flags(str(folder)))
    assert "Set XDG_CACHE_HOME to a folder with room that can be written" in message


def test_of_two_servers_that_convert_at_once_both_get_a_whole_folder(
    head: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = []

    def read_beside_another(files: Sequence[Path], folder: Path, with_network: bool) -> None:
        monkeypatch.setattr(pickled_weights, "_read_in_a_child", _read_here)
        others.append(pickled_weights.converted(head))
        _read_here(files, folder, with_network)

    monkeypatch.setattr(pickled_weights, "_read_in_a_child", read_beside_another)
    folder = pickled_weights.converted(head)
    assert others == [folder]
    assert [*folder.parent.iterdir()] == [folder]
    check_is_head(str(folder), model)


def test_a_revision_of_a_folder_has_no_effect_and_a_line_says_so(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The default branch needs none."""
    draft = {"speculative_draft_model_path": str(model)}
    for revision in ("main", "v2"):
        args = found(model_path=str(model), speculative_draft_model_revision=revision, **draft)
        assert args.speculative_draft_model_path == str(model)
    assert caplog.messages == [f"Revision v2 has no effect: {model} is a folder."]
