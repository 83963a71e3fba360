"""Prompts for benchmarks. Nothing is downloaded: data sets are made up or read from a file."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_PLAIN_ID = 3  # special tokens usually come first
DEFAULT_OUTPUT_LEN = 128


class DatasetError(ValueError):
    """A data set that cannot be had; the message names the remedy."""


@dataclass(frozen=True)
class BenchPrompt:
    """One request: `text` or `ids` is set.

    Attributes:
        output_len: tokens to generate.
    """

    text: str | None
    ids: list[int] | None
    output_len: int


def add_dataset_args(parser: argparse.ArgumentParser) -> None:
    """Flags of all benchmarks, with SGLang's names."""
    add = parser.add_argument_group("data set").add_argument
    add(
        "--dataset-name",
        choices=("random", "random-ids", "sharegpt", "custom", "generated-shared-prefix"),
        default="random",
    )
    add("--dataset-path", type=Path, help="File of `sharegpt` (JSON) or `custom` (JSON lines).")
    add("--num-prompts", type=int, default=1000)
    add("--random-input-len", type=int, default=1024)
    add("--random-output-len", type=int, default=1024)
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="Lengths are drawn from ratio x length .. length; 1 is exact.",
    )
    add("--sharegpt-output-len", type=int, help="Instead of the length of the recorded answer.")
    add("--gsp-num-groups", type=int, default=16)
    add("--gsp-prompts-per-group", type=int, default=8)
    add("--gsp-system-prompt-len", type=int, default=512)
    add("--gsp-question-len", type=int, default=64)
    add("--gsp-output-len", type=int, default=64)
    add("--seed", type=int, default=1)


def load_prompts(args: argparse.Namespace, vocab_size: int) -> list[BenchPrompt]:
    """The prompts that the flags describe; the same for the same seed.

    Raises:
        DatasetError: if a file is missing or not of the right form.
    """
    chooser = random.Random(args.seed)
    if args.dataset_name in ("random", "random-ids"):
        return [
            BenchPrompt(
                None,
                _random_ids(chooser, _length(chooser, args.random_input_len, args), vocab_size),
                _length(chooser, args.random_output_len, args),
            )
            for _ in range(args.num_prompts)
        ]
    if args.dataset_name == "generated-shared-prefix":
        return _shared_prefix(chooser, args, vocab_size)
    read = _read_sharegpt if args.dataset_name == "sharegpt" else _read_custom
    prompts = list(read(_require_file(args), args))
    if not prompts:
        raise DatasetError(f"{args.dataset_path} holds no usable prompts.")
    return [prompts[index % len(prompts)] for index in range(args.num_prompts)]


def _length(chooser: random.Random, full: int, args: argparse.Namespace) -> int:
    return chooser.randint(max(1, int(full * args.random_range_ratio)), full)


def _random_ids(chooser: random.Random, length: int, vocab_size: int) -> list[int]:
    return [chooser.randrange(FIRST_PLAIN_ID, vocab_size) for _ in range(length)]


def _shared_prefix(
    chooser: random.Random, args: argparse.Namespace, vocab_size: int
) -> list[BenchPrompt]:
    prompts = []
    for _ in range(args.gsp_num_groups):
        system = _random_ids(chooser, args.gsp_system_prompt_len, vocab_size)
        for _ in range(args.gsp_prompts_per_group):
            question = _random_ids(chooser, args.gsp_question_len, vocab_size)
            prompts.append(BenchPrompt(None, system + question, args.gsp_output_len))
    chooser.shuffle(prompts)
    return prompts


def _require_file(args: argparse.Namespace) -> Path:
    if args.dataset_path is None or not args.dataset_path.is_file():
        raise DatasetError(
            f"--dataset-name {args.dataset_name} needs --dataset-path with a file; nothing is"
            " downloaded. Use --dataset-name random for made-up prompts."
        )
    return args.dataset_path


def _read_sharegpt(path: Path, args: argparse.Namespace) -> Iterator[BenchPrompt]:
    """A JSON list of conversations; the first question and the length of its answer."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetError(f"{path} is not valid JSON: {error}.") from None
    for entry in entries:
        turns = entry.get("conversations") or entry.get("conversation") or []
        if len(turns) >= 2:
            answer_len = max(4, len(turns[1]["value"]) // 4)  # about 4 characters per token
            yield BenchPrompt(turns[0]["value"], None, args.sharegpt_output_len or answer_len)


def _read_custom(path: Path, args: argparse.Namespace) -> Iterator[BenchPrompt]:
    """JSON lines with `prompt` (text or token ids) and, if wanted, `output_len`."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry: dict[str, Any] = json.loads(line)
            prompt = entry["prompt"]
        except (ValueError, KeyError, TypeError):
            raise DatasetError(f'{path}, line {number}: needs an object with "prompt".') from None
        length = int(entry.get("output_len") or args.sharegpt_output_len or DEFAULT_OUTPUT_LEN)
        is_text = isinstance(prompt, str)
        yield BenchPrompt(prompt if is_text else None, None if is_text else prompt, length)
