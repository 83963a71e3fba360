"""Says which files of a model's folder are read, by the names in it."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import filter as matching
from fnmatch import fnmatch
from pathlib import Path

from sglang.srt.model_config import ModelPathError
from sglang.srt.plain_files import UnreadableFileError, read_json

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"
PICKLED = "pytorch_model*.bin"
CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "vocab.json", "*.model", "*.tiktoken")  # any of them is one
SMALL_FILES = ("*.json", "*.txt", "*.jinja", *TOKENIZERS)
TEMPLATE_FOLDERS = ("chat_templates", "additional_chat_templates")  # the second: transformers' name

PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
REMEDIES = {  # by the endings of files in other formats
    PICKLE_ENDINGS: (
        "since such files can hold code: convert the folder with sglang convert-checkpoint"
    ),
    (".gguf",): "since it is GGUF: use the checkpoint that it was made of",
}


def is_small_file(name: str) -> bool:
    """Tells whether a name, with slashes, is of a config, a tokenizer or a chat template."""
    folder, _, last = name.rpartition("/")
    if folder in TEMPLATE_FOLDERS:
        return last.endswith(".jinja")
    return not folder and any(fnmatch(last, pattern) for pattern in SMALL_FILES)


def weight_names(folder: Path, names: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Names the files that hold a model, sorted, and for each tensor that an index names its file.

    As transformers has it: `model.safetensors`, or else the files of the index. Beyond it: without
    either, all that are named as shards are; without those, all *.safetensors. None if there are
    none.

    Args:
        folder: has the index, if there is one.
        names: of all files, which need not be in the folder.

    Raises:
        ModelPathError: if the index is none.
    """
    if WHOLE in names:
        return [WHOLE], {}
    if (folder / INDEX).exists():
        shards = _read_index(folder / INDEX)
        return sorted(set(shards.values())), shards
    found = matching(names, "model*.safetensors")
    # Beside pickled weights, safetensors of other names are something else, such as an adapter.
    if not found and not matching(names, PICKLED):
        found = matching(names, "*.safetensors")
    return sorted(found), {}


def why_no_weights(names: Collection[str]) -> str:
    """Says what to do about files among which are no safetensors."""
    for endings, remedy in REMEDIES.items():
        found = [name for name in sorted(names) if name.endswith(endings)]
        if found:
            return f"{found[0]} is not read, {remedy}"
    return "is the download complete? Convert weights in another format"


def _read_index(index: Path) -> dict[str, str]:
    """Reads the name of the file of each tensor.

    Raises:
        ModelPathError: if it cannot be read as an index.
    """
    try:
        weight_map = read_json(index, dict)["weight_map"]
        # Only names inside the directory: an index must not reach other files.
        shards = {name: Path(file).name for name, file in weight_map.items()}
    except UnreadableFileError as error:
        raise ModelPathError(f"{error}.") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelPathError(f"{index} is not a safetensors index.") from None
    if not shards:
        raise ModelPathError(f"{index} names no file.")
    return shards
