"""`--config FILE`: flags from a YAML file, below those of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang import bench_offline_throughput
from sglang.srt.argument_parsing import parse_flags
from sglang.srt.server_args import ServerArgs, parse_cli


def flag_file(folder: Path, text: str) -> Path:
    path = folder / "server.yaml"
    path.write_text(text)
    return path


def test_a_file_gives_what_the_same_flags_give(tmp_path: Path) -> None:
    path = flag_file(
        tmp_path,
        "model-path: demo\nport: 31000\n--page-size: 4\nmem_fraction_static: 0.5\n"
        "disable-radix-cache: true\nlog-requests: false\napi-key: '--odd'\ntokenizer-path:\n"
        "preferred-sampling-params:\n  temperature: 0.5\n",
    )
    words = ["--model-path=demo", "--port=31000", "--page-size=4", "--mem-fraction-static=0.5"]
    words += ["--disable-radix-cache", "--api-key=--odd"]
    words += ['--preferred-sampling-params={"temperature": 0.5}']
    expected = parse_cli(words)
    assert parse_cli(["--config", str(path)]) == expected
    assert parse_cli([f"--config={path}"]) == expected


def test_the_command_line_wins_wherever_the_file_stands(tmp_path: Path) -> None:
    path = flag_file(tmp_path, "model: demo\nport: 31000\npage-size: 4\n")
    for words in (["--port", "5", "--config", str(path)], ["--config", str(path), "--port", "5"]):
        assert parse_cli(words) == ServerArgs(model_path="demo", port=5, page_size=4)


def test_a_file_of_benchmark_flags_is_read_too(tmp_path: Path) -> None:
    path = flag_file(tmp_path, "model-path: demo\nnum-prompts: 3\n")
    parser = bench_offline_throughput.make_parser()
    namespace, given = parse_flags(parser, ["--config", str(path)], ServerArgs)
    assert namespace.num_prompts == 3
    assert given["model_path"] == "demo"


def test_an_argument_of_sglang_in_a_file_is_taken_by_its_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = flag_file(tmp_path, "model-path: demo\nenable-metrics: true\n")
    assert parse_cli(["--config", str(path)]) == ServerArgs(model_path="demo")
    path = flag_file(tmp_path, "model-path: demo\nenable-lora: true\n")
    with pytest.raises(SystemExit):
        parse_cli(["--config", str(path)])
    assert "--enable-lora: SGLang has this" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot: 31000", "unknown key prot, did you mean port?"),
        ("xyzzy: 1", "unknown key xyzzy."),
        ("config: other.yaml", "unknown key config"),
        ("port: http", "argument --port"),
        ("port: [1, 2]", "port: takes one value, not [1, 2]"),
        ("grammar-backend: no", "grammar-backend: takes a value, not false; a word goes in quotes"),
        ("disable-radix-cache: 1", "disable-radix-cache: is a switch, true or false, not 1"),
        ("port: {", "is not valid YAML"),
        ("weight-version: 2026-13-45", "server.yaml is not valid YAML: month"),
        ("[" * 5000, "is not valid YAML"),
        ("- port", "must hold flags with their values"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_with_the_key(
    text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = flag_file(tmp_path, text)
    with pytest.raises(SystemExit) as end:
        parse_cli(["--model-path", "demo", "--config", str(path)])
    assert end.value.code == 2
    assert reason in capsys.readouterr().err.splitlines()[0]


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_cli(["--config", str(tmp_path / "none.yaml")])
    assert "none.yaml cannot be read" in capsys.readouterr().err
