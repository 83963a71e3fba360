"""Each flag and argument that SGLang knows, walked: it works, has no effect here and says so, or is
refused with the remedy."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import re
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest

from code_shape import ROOT
from flag_sets import REFUSED as REFUSED_SETS
from flag_sets import WITHOUT_EFFECT, WORKING
from sglang import bench_offline_throughput
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.launch import LaunchError
from sglang.srt.entrypoints.openai.chat_settings import chat_settings_of
from sglang.srt.environ import Environ
from sglang.srt.flag_values import flags_of
from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.processes.runtime_config import resolve
from sglang.srt.server_args import ServerArgs, parse_cli
from sglang.srt.sglang_arguments import (
    NO_EFFECT,
    REFUSED,
    SGLangArgument,
    all_arguments,
    class_of,
    missing_arguments,
    own_arguments,
)
from sglang.srt.sglang_flags import TABLE
from sglang.srt.sglang_surface import facts
from speculation_flags_cases import PLATFORM

OWN = flags_of(ServerArgs)
MISSING = missing_arguments(OWN)
PLAIN = ServerArgs(model_path="m")
INITIALS = sorted({name[0] for name in MISSING})  # those of one are walked by one test
# What SGLang's default is called there, where this runtime has it under another value.
OTHER_DEFAULTS = {
    "decode_log_interval": 40,
    "log_requests_format": "text",
    "log_requests_level": 2,
    "speculative_ngram_max_bfs_breadth": 10,
}
# What a refusal tells people to do.
REMEDY = re.compile(
    r"\b(leave|use|start|bring|name|merge|write|change|give|lower|ask|take|needs|must be)\b"
)
TABLE_ROWS = [
    (kind, entry, name)
    for kind, entries in TABLE.items()
    for entry in entries
    for name in entry.names.split()
]


def started(line: str) -> None:
    """Goes as far as a start may be refused, without a process or weights."""
    args = parse_cli(["--model-path", "demo", *line.split()])
    chat_settings_of(args)
    resolve(args, PLATFORM, load_model_config(args.model_path), Environ())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that are said at the start."""
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("line", WORKING)
def test_a_usual_set_of_flags_works(line: str, caplog: pytest.LogCaptureFixture) -> None:
    started(line)
    assert warnings(caplog) == []


@pytest.mark.parametrize("line", WITHOUT_EFFECT)
def test_a_usual_set_without_an_effect_starts_and_says_so_in_one_line(
    line: str, caplog: pytest.LogCaptureFixture
) -> None:
    started(line)
    (said,) = warnings(caplog)
    assert any(word in said for word in line.split() if word.startswith("--"))
    assert "\n" not in said


@pytest.mark.parametrize("line", REFUSED_SETS)
def test_a_usual_set_that_is_refused_names_the_remedy_in_one_line(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, LaunchError)) as end:
        started(line)
    printed = capsys.readouterr().err.splitlines()
    (said,) = printed if isinstance(end.value, SystemExit) else str(end.value).splitlines()
    assert any(word in said for word in line.split() if word.startswith("--"))
    assert REMEDY.search(said)


def test_most_usual_sets_start() -> None:
    assert len(WORKING) + len(WITHOUT_EFFECT) >= 50
    assert len({*WORKING, *WITHOUT_EFFECT, *REFUSED_SETS}) == 90


def test_a_refusal_comes_before_anything_large_is_loaded() -> None:
    by_parsing = [line for line in REFUSED_SETS if "parser" not in line]
    script = f"""
import sys
from sglang.launch_server import main
for line in {by_parsing!r}:
    try:
        main(["--model-path", "demo", *line.split()])
    except SystemExit as end:
        assert end.code == 2, line
    else:
        raise AssertionError(line)
large = {{"torch", "transformers", "fastapi", "uvicorn", "tokenizers", "zmq"}}
assert not large & sys.modules.keys(), large & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


# ---------------------------------------------------------------- the table


def test_the_table_names_arguments_of_sglang() -> None:
    known = all_arguments().keys() | OWN.keys()
    assert [name for _, _, name in TABLE_ROWS if name not in known] == []


def test_an_argument_or_a_value_is_in_the_table_once() -> None:
    rows = [(name, value) for _, entry, name in TABLE_ROWS for value in entry.values or (None,)]
    assert [row for row, count in Counter(rows).items() if count > 1] == []


def test_flags_of_this_runtime_are_in_the_table_with_values_alone() -> None:
    """An entry without values would say nothing: the flag works."""
    assert [name for _, entry, name in TABLE_ROWS if name in OWN and not entry.values] == []


def test_values_of_the_table_are_none_of_the_flags_own_choices() -> None:
    for _, entry, name in TABLE_ROWS:
        if name in OWN:
            assert not {*entry.values} & {*(OWN[name].metadata["choices"] or ())}


def test_a_value_is_found_by_its_class() -> None:
    assert class_of("speculative_algorithm", "mtp", True)[0] == REFUSED
    assert class_of("attention_backend", "FA3", True)[0] == NO_EFFECT
    assert class_of("warmups", "x", False)[0] == REFUSED  # the table does not name it


def test_a_value_under_another_name_becomes_ours() -> None:
    given = {"model_path": "m", "schedule_policy": "dfs-weight"}
    assert ServerArgs(**given).schedule_policy == "lpm"
    assert ServerArgs(**{**given, "schedule_policy": "lof"}).schedule_policy == "fcfs"


def test_flags_page_shows_the_table() -> None:
    script = ROOT / "scripts/write_flags_page.py"
    spec = importlib.util.spec_from_file_location("write_flags_page", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
    assert module.page() == written, "run scripts/write_flags_page.py"
    for argument in MISSING.values():
        assert re.search(rf"`{(*argument.flags, argument.name)[0]}[ `]", written)


def test_help_shows_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_cli(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for entries in TABLE.values():
        assert all(entry.says in text for entry in entries)


# ---------------------------------------------------------------- each flag and argument


def words_for(flag: str, argument: SGLangArgument) -> list[list[str]]:
    """The command lines that give a flag its neutral values."""
    if argument.takes == 0:
        gives = not flag.startswith("--no-")
        return [[flag]] if gives in (False, argument.default) else []
    if argument.takes == "*":
        return [[flag]]
    default = argument.default
    return [[flag, ""]] + ([] if default is None else [[flag, str(default)], [f"{flag}={default}"]])


def named(initial: str) -> list[str]:
    """Gathers the arguments that begin so."""
    return [name for name in MISSING if name[0] == initial]


@pytest.mark.parametrize("initial", INITIALS)
def test_a_neutral_flag_or_argument_changes_nothing(
    initial: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in named(initial):
        for value in (MISSING[name].default, None, False, "", [], {}):
            assert ServerArgs(**{"model_path": "m", name: value}) == PLAIN, (name, value)
    assert warnings(caplog) == []


def test_neutral_flags_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    words = [
        words
        for argument in MISSING.values()
        for flag in argument.flags
        for words in words_for(flag, argument)
    ]
    assert len(words) > 500
    assert parse_cli(["--model-path", "m", *itertools.chain(*words)]) == PLAIN
    assert warnings(caplog) == []


def of_value(name: str, flag: str) -> tuple[list[str], Any]:
    """A wish that is not neutral: its words, and its value."""
    argument = MISSING[name]
    if argument.takes == 0:
        return [flag], not flag.startswith("--no-")
    return [flag, "wish"], ["wish"] if argument.takes == "*" else "wish"


@pytest.fixture(scope="module")
def whole_parser() -> Any:
    """The parser of a benchmark, made once: it takes the server's flags too."""
    return bench_offline_throughput.make_parser()


@pytest.mark.parametrize("initial", INITIALS)
def test_a_wish_is_taken_by_its_class_on_the_command_line_and_in_python(
    initial: str, whole_parser: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for name in named(initial):
        check_wish(name, whole_parser, caplog)


def check_wish(name: str, whole_parser: Any, caplog: pytest.LogCaptureFixture) -> None:
    for flag in MISSING[name].flags or (f"--{name.replace('_', '-')}",):
        words, value = of_value(name, flag)
        if value in (False, MISSING[name].default):
            continue
        kind, entry = class_of(name, value, False)
        if MISSING[name].flags:
            with pytest.raises(SystemExit) if kind == REFUSED else nullcontext():
                parsed = vars(whole_parser.parse_args(["--model-path", "m", *words]))
                assert value in parsed.values(), words
        if kind == REFUSED:
            with pytest.raises(ValueError, match=rf"^{name}=") as caught:
                ServerArgs(**{"model_path": "m", name: value})
            said = str(caught.value)
            assert said.endswith(f": SGLang has this and this runtime does not; {entry.says}.")
            continue
        caplog.clear()
        assert ServerArgs(**{"model_path": "m", name: value}) == PLAIN, (name, value)
        spelled = f"{name}={value!r} has no effect here: {entry.says}."
        assert warnings(caplog) == ([spelled] if kind == NO_EFFECT else [])


@pytest.mark.parametrize("name", sorted(facts()["flags"].keys() & OWN.keys() - {"model_path"}))
def test_flags_that_both_have_take_the_default_and_the_names_of_sglang(name: str) -> None:
    flags, takes, default = facts()["flags"][name]
    for flag in flags:
        if takes == 0:
            assert getattr(parse_cli(["--model-path", "m", flag]), name) is True
        elif default is not None:
            parsed = parse_cli(["--model-path", "m", flag, str(default)])
            given = {name: default} if name in OTHER_DEFAULTS else {}
            assert parsed == ServerArgs(**{"model_path": "m", **given})
    given = {"model_path": "m", name: None}
    assert ServerArgs(**given) == PLAIN


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("--tp 1 --dp 1 --pp 1 --ep 1 --tp-size 1 --tensor-parallel-size=1", None),
        ("--enable-metrics --kv-cache-dtype auto", None),
        ("--chunked-prefill-size -1", None),
        ("--chunked-prefill-size=-1", None),
        ("--dp 4", "--dp 4: SGLang has this and this runtime does not"),
        ("--data-parallel-size=4", "--data-parallel-size 4: SGLang has this"),
        ("--dp=4", "is one server"),
        ("--quantization awq", "--quantization awq: SGLang has this"),
        ("--kv-cache-dtype fp8_e4m3", "attention over KV of 8 bits is not built"),
        ("--lora-paths a=b c=d", "--lora-paths a=b c=d: SGLang has this"),
        ("--numa-node 0 --dp 2", "--dp 2: SGLang has this"),
        ("--attention-backend none", "--attention-backend none must be one of flashinfer, "),
        ("--model-checksum", "--model-checksum: SGLang has this"),
        ("--max-totl-tokens 5", "unknown flag --max-totl-tokens, did you mean --max-total-tokens?"),
    ],
)
def test_flags_as_people_write_them(
    line: str, error: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model-path", "m", *line.split()]
    if error is None:
        expected = -1 if "prefill" in line else None
        assert parse_cli(argv) == ServerArgs(model_path="m", chunked_prefill_size=expected)
        return
    with pytest.raises(SystemExit):
        parse_cli(argv)
    assert error in capsys.readouterr().err


def test_arguments_with_one_reason_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    parse_cli(
        [
            "--model-path",
            "m",
            "--nccl-port",
            "5",
            "--numa-node",
            "0",
            "1",
            "--dist-init-addr",
            "a:1",
        ]
    )
    assert sorted(warnings(caplog)) == [
        "--dist-init-addr a:1, --nccl-port 5 have no effect here: a server has one device and one"
        " rank.",
        "--numa-node 0 1 has no effect here: the operating system places processes and memory.",
    ]


def test_what_was_said_once_is_not_said_by_copies(caplog: pytest.LogCaptureFixture) -> None:
    args = ServerArgs(model_path="m", attention_backend="fa3", mm_attention_backend="fa3")
    assert len(warnings(caplog)) == 2
    caplog.clear()
    assert own_arguments(vars(args), ServerArgs, lambda name, _: name) == {
        name: value for name, value in vars(args).items() if value is not None and name in OWN
    }
    assert warnings(caplog) == []


def test_arguments_of_an_engine_follow_the_same_rule() -> None:
    with pytest.raises(ValueError, match=r"^dp_size=2: SGLang has this"):
        Engine(model_path="demo", dp_size=2)
    with pytest.raises(TypeError, match="tensor_paralel"):
        Engine(model_path="demo", tensor_paralel=1)
    with pytest.raises(ModelPathError):  # the next thing that is looked at
        Engine(model_path="no such model", tp_size=1, enable_metrics=True, mem_fraction_static=None)


@pytest.mark.parametrize("name", [name for name, entry in OWN.items() if entry.metadata["choices"]])
def test_an_argument_outside_its_choices_is_refused_with_all_of_them(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}='no-such-thing' must be one of ") as caught:
        ServerArgs(**{"model_path": "m", name: "no-such-thing"})
    assert "\n" not in str(caught.value)
    for choice in OWN[name].metadata["choices"]:
        assert choice in str(caught.value)


@pytest.mark.parametrize("module", ["bench_offline_throughput", "bench_one_batch"])
def test_benchmarks_refuse_flags_too(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.import_module(f"sglang.{module}")
    with pytest.raises(SystemExit) as end:
        found.main(["--model-path", "demo", "--dp", "2"])
    assert end.value.code == 2
    assert "--dp 2: SGLang has this" in capsys.readouterr().err
