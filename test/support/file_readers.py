"""Every file that a model's folder or a flag names, and the function that reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.lookahead.adaptive_config import read_adaptive_config
from sglang.srt.model_config import load_model_config
from sglang.srt.model_files import INDEX
from sglang.srt.model_loader.weight_files import read_directory
from sglang.srt.parser.template_files import find_templates
from sglang.srt.processes.ngram_corpus import corpus_from_flags
from sglang.srt.server_args import ServerArgs
from sglang.srt.token_map import read_token_map
from sglang.srt.tokenizer import load_tokenizer, read_tokenizer_json
from sglang.srt.tokenizer_config import read_tokenizer_config


def corpus(path: Path) -> Any:
    model = path.parent / "model"
    args = ServerArgs(
        model_path=str(model),
        speculative_algorithm="NGRAM",
        speculative_ngram_external_corpus_path=str(path),
    )
    return corpus_from_flags(args, load_model_config(str(model)))


READERS: dict[str, Callable[[Path], Any]] = {
    "model/config.json": lambda path: load_model_config(str(path.parent)),
    "model/generation_config.json": lambda path: load_model_config(str(path.parent)),
    f"model/{INDEX}": lambda path: list(read_directory(path.parent)),
    "model/tokenizer.json": lambda path: load_tokenizer(path.parent),
    "tokenizer.json": lambda path: read_tokenizer_json(path.parent),
    "tokenizer_config.json": lambda path: read_tokenizer_config(path.parent),
    "special_tokens_map.json": lambda path: read_tokenizer_config(path.parent),
    "template.jinja": lambda path: find_templates(path.parent, str(path)),
    "chat_templates/a.jinja": lambda path: _template_problem(path.parents[1]),
    "map.json": lambda path: read_token_map(path, 9),
    "map.safetensors": lambda path: read_token_map(path, 9),
    "steps.json": lambda path: read_adaptive_config(str(path)),
    "corpus.jsonl": corpus,
}


def _template_problem(folder: Path) -> None:
    raise ValueError(find_templates(folder, None).problem)
