"""`python -m sglang.check_model FOLDER`: would this model be served, how, and in what memory?

It reads config.json and the headers of the safetensors, no values. Exit code 1 if the model, draft
model or draft head would not be served.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

from sglang.check_env import Findings
from sglang.srt.draft_model_config import load_draft_config
from sglang.srt.head_checks import FLAGS
from sglang.srt.head_config import load_head_config
from sglang.srt.head_layouts import (
    EAGLE,
    EAGLE3,
    MTP_NAMES,
    NEXTN,
    architecture_of,
    head_mark,
    layout_of,
)
from sglang.srt.host import available_bytes, gpu_bytes
from sglang.srt.model_config import (
    ModelConfig,
    ModelPathError,
    load_model_config,
    parse_model_config,
    read_entries,
    resolve_model_path,
)
from sglang.srt.model_families import BY_TRANSFORMERS, why_no_sizes, why_not_computed
from sglang.srt.model_files import PICKLED, TOKENIZERS
from sglang.srt.processes.flag_checks import (
    CPU_KV_MAX_BYTES,
    CPU_KV_SHARE,
    DTYPE_BYTES,
    GPU_STATIC_SHARE,
    check_is_no_head,
)
from sglang.srt.registry import MODELS, OWN, TRANSFORMERS, TRANSFORMERS_MODEL, load
from sglang.srt.tensor_headers import (
    Headers,
    bytes_by_type,
    count_values,
    num_kv_values,
    read_all_headers,
    read_headers,
    unread_weight,
)
from sglang.srt.tokenizer import TokenizerError
from sglang.srt.transformers_config import text_entries, why_not_installed
from sglang.srt.weight_format import CHANNEL, WeightFormat, format_of

GIB = 1 << 30
EMBEDDING = "model.embed_tokens.weight"
HEAD_TENSOR = "fc.weight"  # joins what a head reads; no model has it


def main(argv: list[str] | None = None) -> int:
    """Prints what a start would find in a folder; returns 1 if it could not serve it, else 0."""
    given = make_parser().parse_args(sys.argv[1:] if argv is None else argv)
    findings = Findings()
    good = ""
    try:
        folder = resolve_model_path(given.folder, "FOLDER")
        entries = read_entries(folder)
        target = None if given.target is None else _target(given.target)
        if _is_head(folder, entries):
            good = _look_at_head(findings, folder, entries, target)
        else:
            good = _look_at_model(findings, folder, entries, given.device_memory)
            if target is not None:
                load_draft_config(str(folder), target, target.path, "FOLDER")
                good = f"It can draft for {given.target}: --speculative-algorithm STANDALONE."
    except (ModelPathError, TokenizerError) as error:
        findings.problems.append(" ".join(str(error).split()))
    return findings.conclude(good)


def _target(path: str) -> ModelConfig:
    """Reads the config of the model to draft for.

    Raises:
        ModelPathError: if it cannot be served.
    """
    target = load_model_config(path, "--target")
    check_is_no_head(target)
    return target


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="sglang check-model", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("folder", help="folder of a model, a draft model or a draft head")
    parser.add_argument("--target", help="folder of the model that it is to draft for")
    parser.add_argument(
        "--device-memory",
        type=_gib,
        metavar="GIB",
        help="memory of the GPU; default: that of this machine's first one",
    )
    return parser


def _gib(text: str) -> int:
    """Reads a number of GiB; gives bytes."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GiB")
    return int(number * GIB)


def _is_head(folder: Path, entries: Mapping[str, Any]) -> bool:
    """Tells whether a folder is that of a head, whose class may have a model's name."""
    is_named = any(mark in architecture_of(entries) for mark in MTP_NAMES)
    return bool(head_mark(entries)) or is_named or HEAD_TENSOR in read_headers(folder)


def _look_at_head(
    findings: Findings, folder: Path, entries: Mapping[str, Any], target: ModelConfig | None
) -> str:
    """Says which drafter takes a head, and whether it fits the target.

    Raises:
        ModelPathError: if none does, or the head is not of that target.
    """
    headers = read_headers(folder)
    layout = layout_of(entries, headers)
    if layout is None or layout.problem:
        why = f"its architecture {architecture_of(entries)!r:.80} is of no head that is known"
        raise ModelPathError(
            f"{folder / 'config.json'} cannot be used: {layout.problem if layout else why}."
        )
    # A class with a model's name may be that of either.
    is_eagle3 = entries.get("draft_vocab_size") is not None
    kind = layout.kind or (EAGLE3 if is_eagle3 else EAGLE)
    flag = f"--speculative-algorithm {FLAGS[kind]}"
    findings.row("head", f"{layout.maker}'s layout, {flag}")
    if headers:
        findings.row("weights", _weights(headers, 1))
    elif matching([file.name for file in folder.iterdir()], PICKLED):
        findings.notes.append("Its weights are pickled: the first start converts them.")
    if target is None:
        return f"A drafter takes this head; --target FOLDER says whether it fits a model ({flag})."
    head = load_head_config(str(folder), kind, target, flag="FOLDER")
    return f"It can draft for {target.path}: {flag}; {head.remark}."


def _look_at_model(
    findings: Findings, folder: Path, entries: dict[str, Any], device_bytes: int | None
) -> str:
    """Says what computes a model, which drafters it has, and what memory it takes.

    Raises:
        ModelPathError: if it cannot be served.
    """
    config = _config(folder, entries)
    is_own = config is not None and config.impl == OWN
    code = MODELS.entries[config.architecture] if config and is_own else TRANSFORMERS_MODEL
    by = "a file of its own" if is_own else "transformers' own modelling code"
    findings.row("model", f"{architecture_of(entries)}, by {by} ({code.partition(':')[0]})")
    headers, num_files = read_all_headers(folder)
    findings.row("weights", _weights(headers, num_files))
    values = num_kv_values(headers)
    problem = unread_weight(headers, format_of(entries))
    if config is not None and is_own:
        problem = problem or _mismatch(config, headers, values)
        values = _kv_values(config)
    if problem is not None:
        raise ModelPathError(f"{folder} {problem}")
    dtype = config.dtype if config else _dtype(text_entries(entries))
    _look_at_memory(findings, headers, format_of(entries), values, dtype, device_bytes)
    findings.row("drafters", _drafters(folder, text_entries(entries), config, headers))
    names = [file.name for file in folder.iterdir()]
    if not any(matching(names, each) for each in TOKENIZERS):
        findings.notes.append("There is no tokenizer here: name one with --tokenizer-path.")
    return "A server with this model should start."


def _config(folder: Path, entries: dict[str, Any]) -> ModelConfig | None:
    """Reads the config as a start does; None for a family of which it is known that transformers'
    code serves it, since to ask transformers takes seconds.

    Raises:
        ModelPathError: if it cannot be served.
    """
    if architecture_of(entries) not in BY_TRANSFORMERS:
        config = parse_model_config(folder, entries)
        if config.impl == TRANSFORMERS:
            _look_at_code(config)
        return config
    text = text_entries(entries)
    problem = why_not_computed(entries) or why_no_sizes(text) or why_not_installed()
    if problem is not None:
        raise ModelPathError(f"{folder / 'config.json'} cannot be used: {problem}.")
    return None


def _look_at_code(config: ModelConfig) -> None:
    """Makes the model without memory, as a start does, to see what its code calls.

    Raises:
        ModelPathError: if that cannot be served.
    """
    import torch

    with torch.device("meta"):
        load(config.model_class)(config, config.context_len)


def _weights(headers: Headers, num_files: int) -> str:
    """Describes what the files hold."""
    sizes = bytes_by_type(headers)
    by_type = ", ".join(f"{dtype} {_in_gib(count)}" for dtype, count in sizes.items())
    files = f"{num_files} files" if num_files > 1 else "1 file"
    return f"{_in_gib(sum(sizes.values()))} in {files}, {len(headers)} tensors: {by_type}"


def _in_gib(num_bytes: int) -> str:
    if num_bytes < GIB // 10:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"


def _mismatch(config: ModelConfig, headers: Headers, num_values: int | None) -> str | None:
    """Says how tensors contradict config.json; None if these few do not."""
    embedding = headers.get(EMBEDDING)
    wanted = (config.vocab_size, config.hidden_size)
    if embedding is not None and embedding.shape != wanted:
        found = f"{EMBEDDING} of shape {list(embedding.shape)}, but config.json asks for"
        return f"has {found} {list(wanted)}; do they belong together?"
    if num_values not in (None, _kv_values(config)):
        return (
            f"has layers with {num_values} values of K and V of a token, but config.json asks for"
            f" {_kv_values(config)}; do they belong together?"
        )
    return None


def _kv_values(config: ModelConfig) -> int:
    """Counts the values of K and V of one token in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def _dtype(entries: Mapping[str, Any]) -> str:
    return str(entries.get("dtype") or entries.get("torch_dtype") or "float32")


def _look_at_memory(
    findings: Findings,
    headers: Headers,
    form: WeightFormat,
    num_values: int | None,
    dtype: str,
    device_bytes: int | None,
) -> None:
    """Says how many tokens of KV have room beside the weights: on a GPU, else on this host.

    Raises:
        ModelPathError: if the weights alone have none.
    """
    total = gpu_bytes() if device_bytes is None else device_bytes
    dtype = "float32" if total is None else dtype
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise ModelPathError(
            f"dtype in config.json is {dtype!r:.40}, none of {known}; see --dtype."
        )
    num_short, num_all = count_values(headers)
    holds_short = total is None or (form == CHANNEL and dtype == "bfloat16")
    weights = num_all * DTYPE_BYTES[dtype]
    if num_short and holds_short:
        weights -= num_short * (DTYPE_BYTES[dtype] - 1)
        short = f"{_in_gib(num_short)} of them fp8"
    else:
        short = "fp8 becomes that" if num_short else ""
    host = available_bytes()
    room = int(total * GPU_STATIC_SHARE) if total is not None else host
    where = (
        f"{GPU_STATIC_SHARE:.0%} of {_in_gib(total)} of a GPU"
        if total is not None
        else f"the {_in_gib(host)} that are free on this host, as no GPU is used"
    )
    if weights > room:
        raise ModelPathError(
            f"The weights take {_in_gib(weights)} as {dtype}, more than {where}; use a smaller"
            " model or more memory."
        )
    left = room - weights
    if total is None:
        left = min(left, int(host * CPU_KV_SHARE), CPU_KV_MAX_BYTES)
    as_type = f"as {dtype}{short and f' ({short})'}"
    findings.row("memory", f"weights {_in_gib(weights)} {as_type}, of {where}")
    if num_values is None:
        findings.notes.append("Its layers have names of their own, so KV cannot be counted here.")
        return
    per_token = num_values * DTYPE_BYTES[dtype]
    findings.row(
        "KV", f"{per_token} bytes per token, {left // per_token} tokens in {_in_gib(left)} at most"
    )


def _drafters(
    folder: Path, entries: Mapping[str, Any], config: ModelConfig | None, headers: Headers
) -> str:
    """Names the drafters that a model has without another folder."""
    found = ["NGRAM"]
    mask = entries.get("mtp_mask_token_id")
    if type(mask) is int:
        found.insert(0, f"multi-token prediction (mask token {mask})")
    layout = layout_of({}, headers)
    if config is not None and layout is not None and layout.kind == NEXTN:
        try:
            load_head_config(str(folder), NEXTN, config, flag="FOLDER")
            found.append("NEXTN")
        except ModelPathError as error:
            found.append(f"not NEXTN ({error})")
    return ", ".join(found) + "; EAGLE, EAGLE3 and STANDALONE take another folder"


if __name__ == "__main__":
    raise SystemExit(main())
