"""Flags that cannot be met are one line with the remedy, before any process is started and without
torch: of a server with exit code 1, of an Engine as a ValueError."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from code_shape import HEAVY_MODULES, ROOT
from sglang import Engine
from sglang.srt import host
from sglang.srt.entrypoints import server_process
from sglang.srt.entrypoints.server_process import run_server
from sglang.srt.processes import tokenizer_flags
from sglang.srt.server_args import ServerArgs, parse_cli
from sglang.srt.tokenizer import load_tokenizer

EAGLE3 = "--speculative-algorithm EAGLE3 --speculative-draft-model-path demo-eagle3"
BY_EMA = "--speculative-adaptive --speculative-adaptive-strategy ema"
NGRAM = "--speculative-algorithm NGRAM"
BOTH = "--speculative-algorithm EAGLE3,NGRAM --speculative-draft-model-path demo-eagle3"
A_MODEL_AND_NGRAM = (
    "--speculative-algorithm STANDALONE,NGRAM --speculative-draft-model-path demo-draft"
)
# Words of a command line behind `--model-path demo --device cpu`, and what the line says.
WRONG = {
    "--speculative-algorithm EAGLE4": "EAGLE4 is unknown; there are EAGLE, EAGLE3",
    "--speculative-algorithm EAGLE3": "needs --speculative-draft-model-path",
    "--speculative-algorithm STANDALONE": "needs --speculative-draft-model-path",
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path nowhere": "nowhere",
    "--speculative-algorithm EAGLE --speculative-draft-model-path demo-eagle3": "use"
    " --speculative-algorithm EAGLE3.",
    "--speculative-algorithm STANDALONE --speculative-draft-model-path demo-eagle": "use"
    " --speculative-algorithm EAGLE, EAGLE3, NEXTN or DFLASH",
    "--speculative-draft-model-path demo-eagle3": "needs --speculative-algorithm EAGLE, EAGLE3,"
    " NEXTN, DFLASH or STANDALONE; ",
    "--speculative-adaptive-config aggressive": "NEXTN, DFLASH or STANDALONE; ",
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path demo-draft": "a draft model"
    " takes --speculative-algorithm STANDALONE",
    f"{EAGLE3} --speculative-num-steps 0": "-num-steps 0 must be a whole number from 1 to",
    f"{EAGLE3} --speculative-num-steps 64": "-num-steps 64 must be a whole number from 1 to",
    f"{EAGLE3} --speculative-num-draft-tokens 1": "-tokens 1 must be a whole number from 2 to",
    f"{EAGLE3} --speculative-eagle-topk 0": "-eagle-topk 0 must be a whole number from 1 to 64",
    f"{EAGLE3} --speculative-eagle-topk 65": "--speculative-eagle-topk 65",
    f"{EAGLE3} --speculative-eagle-topk 2 --speculative-load-aware on": "leave it out",
    f"{EAGLE3} --speculative-token-map nowhere.json": "remove --speculative-token-map",
    f"{EAGLE3} --speculative-accept-threshold-single 2": "must be a number from 0 to 1",
    f"{EAGLE3} --speculative-accept-threshold-acc -1": "must be a number from 0 to 1",
    f"{EAGLE3} --speculative-adaptive-config aggressive": "needs --speculative-adaptive",
    f"{EAGLE3} --speculative-adaptive-strategy ema": "needs --speculative-adaptive",
    f"{EAGLE3} --speculative-adaptive --speculative-load-aware off": "leave out",
    f"{EAGLE3} --speculative-adaptive --speculative-adaptive-config nowhere": "cannot be read",
    f"{EAGLE3} {BY_EMA} --speculative-num-steps 4": "the candidate_steps",
    f"{EAGLE3} --tile-spec --max-running-requests 513": "lower --max-running-requests",
    f"{EAGLE3} --tile-spec-cache-dir x": "needs --tile-spec",
    f"{EAGLE3} --speculative-ngram-capacity 5": "needs --speculative-algorithm NGRAM",
    f"{BOTH} --speculative-eagle-topk 2": "-algorithm EAGLE3,NGRAM does not take"
    " --speculative-eagle-topk; leave it out: two drafters on one server draft chains.",
    f"{BOTH} --speculative-ngram-max-bfs-breadth 2": "leave it out: two drafters on one server",
    f"{BOTH} --speculative-ngram-capacity 1": "must be a whole number from 2 to",
    "--speculative-algorithm EAGLE3,NGRAM": "name the folder of a head",
    "--speculative-algorithm EAGLE3,STANDALONE": "name one of them, or one and NGRAM",
    "--speculative-algorithm EAGLE3,PHOENIX": "-algorithm PHOENIX is unknown; there are",
    f"{A_MODEL_AND_NGRAM} --speculative-token-map m.json": "does not take --speculative-token-map;"
    " leave it out.",
    "--speculative-algorithm EAGLE3,": "-algorithm EAGLE3, lacks a name beside a comma; name",
    "--speculative-algorithm NGRAM,NGRAM": "NGRAM,NGRAM names one drafter twice; name it once.",
    f"{NGRAM} --speculative-draft-model-path demo-eagle3": "leave it out",
    f"{NGRAM} --speculative-ngram-max-trie-depth 65": "must be a whole number from 1 to 64",
    f"{NGRAM} --speculative-ngram-capacity 1": "must be a whole number from 2 to",
    f"{NGRAM} --speculative-ngram-max-bfs-breadth 64": "must be a whole number from 1 to 63",
    f"{NGRAM} --speculative-ngram-min-bfs-breadth 2": "lower it, or raise the other",
    f"{NGRAM} --speculative-num-draft-tokens 65": "must be a whole number from 2 to 64",
    f"{NGRAM} --speculative-ngram-external-sam-budget 2": "needs --speculative-ngram-external",
    f"{NGRAM} --speculative-ngram-external-corpus-path nowhere": "nowhere",
    "--attention-backend triton": "runs on cuda, not on cpu; leave it out, or use torch_native",
    "--attention-backend flashinfer": "runs on cuda, not on cpu; leave it out",
    "--enable-deterministic-inference": "needs a GPU: products of torch on a CPU may round by",
    "--enable-deterministic-requests": "needs a GPU: products of torch on a CPU may round by",
    "--device cuda": "torch finds no GPU",
    "--base-gpu-id 1": "there is no GPU here; leave it out",
    "--mem-fraction-static 2": "--mem-fraction-static must be between 0 and 1",
    "--mem-fraction-static 0": "--mem-fraction-static must be between 0 and 1",
    "--mem-fraction-static 1e-9": "raise --max-total-tokens or --mem-fraction-static",
    "--max-total-tokens 1000000000000": "lower it or raise --mem-fraction-static",
    "--max-total-tokens 1": "raise --max-total-tokens",
    "--max-total-tokens 10 --page-size 16": "or lower --page-size",
    "--page-size 0": "--page-size 0 must be",
    "--max-running-requests 0": "--max-running-requests 0 must be",
    "--page-size 65536 --max-running-requests 65536 --mem-fraction-static 0.9": "tables",
    "--context-length 0": "--context-length 0 must be between 1 and",
    "--context-length 1000000": "must be between 1 and",
    "--context-length 1": "at least 2 are needed",
    "--num-threads 100000": "must be",
    "--chunked-prefill-size 0": "--chunked-prefill-size must be at least 1",
    "--chunked-prefill-size 64 --max-step-ms 10": "leave one of them out",
    "--max-step-ms -1": "--max-step-ms must be",
    "--schedule-conservativeness 0": "must be a number above 0",
    "--decode-log-interval -1": "--decode-log-interval -1 must be",
    "--mtp-mask-token-id -1": "must be a token id below",
    "--mtp-mask-token-id 10000000": "must be a token id below",
    "--mtp-max-k 0": "--mtp-max-k 0 must be",
    "--preferred-sampling-params {": "must be a JSON object",
    '--preferred-sampling-params {"temperature":-1}': "preferred-sampling-params.temperature",
    '--preferred-sampling-params {"mtp_enabled":true,"mtp_k":99}': "must be at most 8",
    f'{NGRAM} --preferred-sampling-params {{"mtp_enabled":true}}': "leave mtp_enabled out",
    "--log-requests --log-requests-target /nowhere/log": "cannot be written",
    "--hidden-states-folder /nowhere": "is no folder that can be written to; make it first",
    "--hidden-states-layers 1": "there is no --hidden-states-folder; add that",
    "--hidden-states-folder /tmp --hidden-states-layers 1,4": "3 the input of the last layer; name",
    "--hidden-states-folder /tmp --hidden-states-layers 1,1": "must be different numbers",
    "--max-hidden-states-bytes 0": "--max-hidden-states-bytes 0 must be",
    "--watchdog-timeout -1": "--watchdog-timeout -1.0 must be",
}
# Of a server alone: an Engine has no routes.
WRONG_OF_ROUTES = {
    "--chat-template nowhere": "nowhere",
    "--tool-call-parser none-such": "none-such",
    "--reasoning-parser none-such": "none-such",
    "--default-chat-template-kwargs [": "--default-chat-template-kwargs",
    "--allowed-origins nonsense": "--allowed-origins",
    "--allowed-origins *": "--allowed-origins",
    "--api-key=": "--api-key",
    "--host nowhere.invalid": "Choose another --port or --host",
}
MODELS = {"demo-eagle3": "serve that one", "nowhere": "nowhere"}


load_tokenizer_once = cache(load_tokenizer)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every process that was started."""
    found: list[Any] = []

    def start(*args: Any, **_: Any) -> None:
        found.append(args)
        raise AssertionError(f"{args} was started.")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(server_process, "configure_logging", lambda *_: None)
    monkeypatch.setattr(tokenizer_flags, "load_tokenizer", load_tokenizer_once)
    monkeypatch.setattr(host, "may_have_cuda", lambda: False)
    monkeypatch.setattr(host, "available_bytes", lambda: 8 << 30)
    return found


def check_refusal(
    args: ServerArgs, said: str, starts: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_server(args) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sglang: error: ")
    assert said in line
    with pytest.raises(ValueError, match=r"\S") as error:
        Engine(args)
    assert f"sglang: error: {' '.join(str(error.value).split())}" == line
    assert not starts


@pytest.mark.parametrize(("words", "said"), WRONG.items(), ids=list(WRONG))
def test_a_wrong_value_is_one_line_before_any_process(
    words: str, said: str, starts: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if "--device" in words else ["--device", "cpu"]
    argv = ["--model-path", "demo", "--port", "0", *device, *words.split()]
    check_refusal(parse_cli(argv), said, starts, capsys)


@pytest.mark.parametrize(("words", "said"), WRONG_OF_ROUTES.items(), ids=list(WRONG_OF_ROUTES))
def test_a_wrong_value_of_routes_is_one_line_before_any_process(
    words: str, said: str, starts: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_server(parse_cli(["--model-path", "demo", "--port", "0", *words.split()])) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not starts


@pytest.mark.parametrize(("model", "said"), MODELS.items())
def test_a_model_that_cannot_be_served_is_one_line_before_any_process(
    model: str, said: str, starts: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    check_refusal(ServerArgs(model_path=model, port=0), said, starts, capsys)


@pytest.mark.parametrize("name", ["SGLANG_SIMULATE_ACC_LEN", "SGLANG_TEST_RETRACT"])
def test_a_wrong_variable_is_one_line_before_any_process(
    name: str,
    starts: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, "many")
    check_refusal(ServerArgs(model_path="demo", port=0), name, starts, capsys)


def test_a_refusal_needs_no_torch() -> None:
    """Its import alone takes seconds."""
    program = (
        "import sys\n"
        "from sglang.launch_server import main\n"
        "code = main(sys.argv[1:])\n"
        f"print(code, sorted({{*sys.modules}} & {{*{HEAVY_MODULES}}}))\n"
    )
    flags = f"--model-path demo {EAGLE3} --device cpu --preferred-sampling-params ["
    done = subprocess.run(
        [sys.executable, "-c", program, *flags.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "1 []\n"
    assert "--preferred-sampling-params" in done.stderr


@pytest.mark.parametrize(
    ("visible", "has_driver", "may_have"),
    [
        (None, True, True),
        ("0,1", True, True),
        ("", True, False),
        ("-1", True, False),
        (None, False, False),
        ("0", False, False),
    ],
)
def test_a_gpu_is_ruled_out_only_where_torch_could_find_none(
    visible: str | None, has_driver: bool, may_have: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    libc = "libc.so.6"
    monkeypatch.setattr(host, "CUDA_DRIVER", libc if has_driver else "no-such-library.so")
    assert host.may_have_cuda() == may_have
