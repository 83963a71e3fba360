"""--grammar-backend and --max-grammar-bytes, from the flag to what a request is told."""

from __future__ import annotations

import pytest

from scheduler_infos import scheduler_info
from sglang.srt.entrypoints.limits_from_flags import limits_from_flags
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.sampling_validation import check_sampling_params
from sglang.srt.processes.grammar_flags import grammar_setup
from sglang.srt.server_args import ServerArgs, parse_cli

INFO = scheduler_info()


def test_without_a_backend_nothing_is_set_up_and_requests_hear_the_remedy() -> None:
    args = parse_cli(["--model-path", "demo", "--grammar-backend", "none"])
    assert grammar_setup(args, 100, [1]) is None
    limits = limits_from_flags(args, INFO)
    with pytest.raises(RequestError, match="start it without that flag") as caught:
        check_sampling_params({"regex": "a"}, limits, "sampling_params")
    assert caught.value.field == "sampling_params.regex"


def test_by_default_there_is_one_for_the_model_s_tokenizer() -> None:
    args = ServerArgs(model_path="demo", max_grammar_bytes=3)
    setup = grammar_setup(args, 100, [7, 1], (2,))
    assert setup is not None
    assert setup.tokenizer_path.endswith("tiny-code")
    assert (setup.vocab_size, setup.eos_token_ids, setup.never_allowed) == (100, [1, 7], [2])
    limits = limits_from_flags(args, INFO)
    assert check_sampling_params({"regex": "aé"}, limits, "p").grammar is not None
    with pytest.raises(RequestError, match="--max-grammar-bytes"):
        check_sampling_params({"regex": "aéb"}, limits, "p")
