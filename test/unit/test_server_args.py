"""The command line is the dataclass, field by field."""

from __future__ import annotations

import argparse
import logging
import re
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

import pytest

from sglang.srt.server_args import ServerArgs, parse_cli

FIELDS = {entry.name: entry for entry in fields(ServerArgs) if entry.metadata}
HINTS = get_type_hints(ServerArgs)
BOOLS = [name for name in FIELDS if HINTS[name] is bool]
VALUES = [name for name in FIELDS if name not in BOOLS]
CHOOSING = [name for name in VALUES if FIELDS[name].metadata["choices"]]


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def example(name: str) -> tuple[str, Any]:
    """A text for a flag, and the value it stands for; never the default."""
    entry: Field[Any] = FIELDS[name]
    if choices := entry.metadata["choices"]:
        other = next((choice for choice in choices if choice != entry.default), choices[0])
        return other, other
    hint = str(HINTS[name])
    if "int" in hint:
        return "123", 123
    if "float" in hint:
        return "0.25", 0.25
    return "some text", "some text"


@pytest.mark.parametrize("name", FIELDS)
def test_every_flag_says_what_it_does(name: str) -> None:
    text = FIELDS[name].metadata["help"]
    assert len(text) > 5
    assert text.endswith(".")


def test_help_lists_every_flag_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Formatting it must work too: a stray percent sign would break it."""
    with pytest.raises(SystemExit) as end:
        parse_cli(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name in FIELDS:
        assert re.search(rf"{flag(name)}\b", text)
    assert "(default: 30000)" in text
    assert "MISSING" not in text


def test_without_flags_the_command_line_gives_the_dataclass_defaults() -> None:
    assert parse_cli(["--model-path", "m"]) == ServerArgs(model_path="m")


def test_the_model_is_the_only_thing_that_must_be_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [name for name, entry in FIELDS.items() if entry.default is MISSING] == ["model_path"]
    with pytest.raises(SystemExit) as end:
        parse_cli([])
    assert end.value.code == 2
    assert "--model-path" in capsys.readouterr().err


@pytest.mark.parametrize("name", VALUES)
def test_a_flag_sets_its_field_and_no_other(name: str) -> None:
    text, value = example(name)
    base: dict[str, Any] = {"model_path": "m"}
    argv = [] if name == "model_path" else ["--model-path", "m"]
    parsed = parse_cli([*argv, flag(name), text])
    assert parsed == ServerArgs(**{**base, name: value})
    assert type(getattr(parsed, name)) is type(value)


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("-1", -1), ("512", 512)])
def test_chunks_are_a_word_or_a_number(text: str, value: str | int) -> None:
    parsed = parse_cli(["--model-path", "m", "--chunked-prefill-size", text])
    assert parsed.chunked_prefill_size == value
    assert type(parsed.chunked_prefill_size) is type(value)


@pytest.mark.parametrize("name", BOOLS)
def test_a_switch_turns_its_field_on_and_is_off_by_default(name: str) -> None:
    assert FIELDS[name].default is False
    parsed = parse_cli(["--model-path", "m", flag(name)])
    expected: dict[str, Any] = {"model_path": "m", name: True}
    assert parsed == ServerArgs(**expected)


@pytest.mark.parametrize(
    ("alias", "name"),
    [(alias, name) for name, entry in FIELDS.items() for alias in entry.metadata["aliases"]],
)
def test_an_alias_sets_the_same_field(alias: str, name: str) -> None:
    others = [] if name == "model_path" else ["--model-path", "m"]
    value = "3" if isinstance(FIELDS[name].default, int) else "x"
    assert parse_cli([*others, alias, value]) == parse_cli([*others, flag(name), value])


def test_the_old_name_of_the_model_flag_works() -> None:
    assert parse_cli(["--model", "x"]).model_path == "x"


@pytest.mark.parametrize("name", CHOOSING)
def test_a_value_outside_the_choices_is_refused_with_all_of_them(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_cli(["--model-path", "m", flag(name), "no-such-thing"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert flag(name) in error
    for choice in FIELDS[name].metadata["choices"]:
        assert choice in error


@pytest.mark.parametrize("name", CHOOSING)
def test_a_default_is_one_of_the_choices(name: str) -> None:
    default = FIELDS[name].default
    assert default is None or default in FIELDS[name].metadata["choices"]


def test_every_log_level_is_one_of_logging() -> None:
    choices = FIELDS["log_level"].metadata["choices"]
    assert {choice.upper() for choice in choices} <= logging.getLevelNamesMapping().keys()


@pytest.mark.parametrize(
    ("name", "text"),
    [("port", "http"), ("page_size", "1.5"), ("mem_fraction_static", "half"), ("num_threads", "")],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_flag(
    name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_cli(["--model-path", "m", flag(name), text])
    assert end.value.code == 2
    assert flag(name) in capsys.readouterr().err


def test_an_unknown_flag_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_cli(["--model-path", "m", "--no-such-flag"])
    assert end.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


def test_flags_can_be_added_to_another_parser() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-prompts", type=int)
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(["--num-prompts", "3", "--model-path", "m"])
    assert (parsed.num_prompts, parsed.model_path) == (3, "m")


class PrefixingParser:
    """Has `add_argument` replaced while flags are added: each name gets a prefix, and some flags
    are skipped, as a trainer does that has flags of its own."""

    def __init__(self, prefix: str, skipped: set[str]) -> None:
        self.parser = argparse.ArgumentParser()
        plain = self.parser.add_argument

        def add(*names: str, **settings: Any) -> None:
            dest = settings.get("dest", names[0].strip("-").replace("-", "_"))
            if dest in skipped:
                return
            if "dest" in settings:
                settings["dest"] = f"{prefix}_{dest}"
            plain(*(f"--{prefix}-{name.strip('-')}" for name in names), **settings)

        self.parser.add_argument = add  # type: ignore[method-assign, assignment]
        ServerArgs.add_cli_args(self.parser)


def test_flags_take_the_prefix_of_a_parser_that_gives_them_one() -> None:
    parser = PrefixingParser("sglang", {"model_path", "port"}).parser
    args = parser.parse_args(["--sglang-max-running-requests", "3", "--sglang-page-size=2"])
    assert (args.sglang_max_running_requests, args.sglang_page_size) == (3, 2)
    assert not {"sglang_model_path", "sglang_port", "port"} & vars(args).keys()
    assert (args.sglang_dp_size, args.sglang_data_parallel_size) == (1, 1)
    named = {name: vars(args)[f"sglang_{name}"] for name in FIELDS if f"sglang_{name}" in args}
    assert ServerArgs(model_path="m", **named) == ServerArgs(
        model_path="m", max_running_requests=3, page_size=2
    )


def test_a_prefix_does_not_hide_that_a_flag_of_sglang_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = PrefixingParser("sglang", {"model_path"}).parser
    with pytest.raises(SystemExit):
        parser.parse_args(["--sglang-dp-size", "2"])
    assert "--dp-size 2: SGLang has this" in capsys.readouterr().err
    parser.parse_args(["--sglang-no-dllm-fdfo"])


def test_a_parsed_namespace_becomes_server_args() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-prompts", type=int, default=5)
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(["--model-path", "m", "--port", "7", "--trust-remote-code"])
    assert ServerArgs.from_cli_args(parsed) == ServerArgs(model_path="m", port=7)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.7", "http://10.0.0.7:5"),
        ("0.0.0.0", "http://127.0.0.1:5"),
        ("::", "http://[::1]:5"),
        ("fd00::7", "http://[fd00::7]:5"),
    ],
)
def test_the_url_reaches_the_address(host: str, url: str) -> None:
    assert ServerArgs(model_path="m", host=host, port=5).url() == url


def test_a_launcher_may_change_flags_and_read_the_ranks() -> None:
    args = ServerArgs(model_path="m", host="[::1]", tp_size=1, node_rank=0, nnodes=1)
    args.host = args.host.strip("[]")
    assert (args.url(), args.node_rank, args.tp_size) == ("http://[::1]:30000", 0, 1)
    with pytest.raises(ValueError, match=r"^dp_size=2: .*one server, and"):
        ServerArgs(model_path="m", dp_size=2)


def test_help_is_grouped_and_unknown_flags_get_a_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_cli(["--help"])
    text = capsys.readouterr().out
    for section in ("Model:", "HTTP:", "Memory and schedule:", "Execution:", "Logging:"):
        assert f"\n{section}\n" in text
    with pytest.raises(SystemExit) as exit_info:
        parse_cli(["--model-path", "demo", "--max-totl-tokens", "5"])
    assert exit_info.value.code == 2
    assert "did you mean --max-total-tokens?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_cli(["--model-path", "demo", "--page", "5"])  # no abbreviations


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", [name for name in VALUES if "float" in str(HINTS[name])])
def test_a_number_that_is_not_finite_is_refused_by_its_name(
    name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On its way to the other processes it would become None, and so the default."""
    with pytest.raises(SystemExit):
        parse_cli(["--model-path", "demo", f"{flag(name)}={text}"])
    assert flag(name) in capsys.readouterr().err
    with pytest.raises(ValueError, match=name):
        ServerArgs(model_path="demo", **{name: float(text)})
