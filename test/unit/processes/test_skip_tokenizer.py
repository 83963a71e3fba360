"""--skip-tokenizer-init: what a server without a tokenizer refuses, each by its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler_infos import scheduler_info
from serving_utils import make_model_dir
from sglang.srt.entrypoints.launch import LaunchError, check_model
from sglang.srt.entrypoints.limits_from_flags import limits_from_flags
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.generate_body import check_generate_request
from sglang.srt.frontend.tokenizer_bodies import check_detokenize, check_tokenize
from sglang.srt.model_config import load_model_config
from sglang.srt.processes.end_of_text import with_tokenizer_eos
from sglang.srt.processes.grammar_flags import grammar_setup
from sglang.srt.processes.ngram_corpus import corpus_from_flags
from sglang.srt.processes.tokenizer_flags import tokenizer_folder, tokenizer_from_flags
from sglang.srt.server_args import ServerArgs, parse_cli

ARGS = parse_cli(["--model-path", "demo", "--skip-tokenizer-init"])
LIMITS = limits_from_flags(ARGS, scheduler_info())
ASK = {"input_ids": [1, 2]}


@pytest.mark.parametrize(
    ("body", "field", "remedy"),
    [
        ({"text": "hi"}, "text", "give input_ids"),
        ({"text": ["hi"]}, "text", "give input_ids"),
        ({**ASK, "sampling_params": {"stop": "x"}}, "sampling_params.stop", "stop_token_ids"),
        (
            {**ASK, "sampling_params": {"stop_regex": ["x+"]}},
            "sampling_params.stop_regex",
            "stop_token_ids",
        ),
        ({**ASK, "sampling_params": {"regex": "a"}}, "sampling_params.regex", "start the server"),
        (
            {**ASK, "sampling_params": {"json_schema": "{}"}},
            "sampling_params.json_schema",
            "start the server",
        ),
        ({**ASK, "return_text_in_logprobs": True}, "return_text_in_logprobs", "leave it out"),
    ],
)
def test_a_field_that_needs_a_text_is_refused_with_the_remedy(
    body: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(RequestError, match=remedy) as caught:
        check_generate_request(body, LIMITS)
    assert caught.value.field == field
    assert "--skip-tokenizer-init" in caught.value.message


def test_token_ids_and_empty_texts_are_taken() -> None:
    params = {"stop": [], "stop_regex": "", "stop_token_ids": [3], "regex": ""}
    body = {**ASK, "text": "", "sampling_params": params, "return_logprob": True}
    [prompt] = check_generate_request(body, LIMITS).prompts
    assert prompt.input_ids == [1, 2]


def test_texts_are_neither_made_into_tokens_nor_back() -> None:
    for check, body in ((check_tokenize, {"prompt": "a"}), (check_detokenize, {"tokens": [1]})):
        with pytest.raises(RequestError, match=r"--skip-tokenizer-init.* yourself"):
            check(msgspec.json.encode(body), LIMITS)


def test_flags_that_need_a_tokenizer_end_the_start() -> None:
    args = ServerArgs(
        model_path="demo", skip_tokenizer_init=True, preferred_sampling_params='{"stop": ["x"]}'
    )
    with pytest.raises(LaunchError, match=r"preferred-sampling-params\.stop: .*stop_token_ids"):
        limits_from_flags(args, scheduler_info())
    args = ServerArgs(
        model_path="demo",
        skip_tokenizer_init=True,
        speculative_ngram_external_corpus_path="corpus.jsonl",
    )
    with pytest.raises(ValueError, match="leave out --skip-tokenizer-init"):
        corpus_from_flags(args, load_model_config("demo"))
    assert grammar_setup(args, 100, [1]) is None


def test_nothing_of_a_tokenizer_is_read(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("no JSON")
    args = ServerArgs(model_path=str(folder), skip_tokenizer_init=True)
    tokenizer = check_model(args)
    assert tokenizer.decode([5, 6]) == ""
    assert tokenizer_folder(args) is None
    model = load_model_config(str(folder))
    assert with_tokenizer_eos(model, None, tokenizer_from_flags(args)) == model
