"""Every code block of README.md and docs/ is run, or checked as far as that needs no install.

`scripts/check_new_user.py` runs README's blocks by the letter.
"""

from __future__ import annotations

import builtins
import inspect
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest

import sgl_kernel
import sglang
from code_shape import ROOT
from page_blocks import PAGES, Block, blocks_of
from serving_utils import RunningServer, running_server
from sglang.__main__ import COMMANDS
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.replica_flags import parse_serve
from sglang.srt.environ import Environ
from sglang.srt.model_config import load_model_config
from sglang.srt.processes.runtime_config import resolve
from speculation_flags_cases import PLATFORM

pytestmark = pytest.mark.long_matrix

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
NOT_RUN = {  # by page: what a page marks as not run everywhere; the list may only shrink
    "README.md": 1,
    "docs/openai.md": 1,
    "sgl-kernel/README.md": 1,
}
DEMO = ROOT / "python/sglang/demo_models/tiny-code"
# What a reader puts into a block, and what is put into it here.
PLACEHOLDERS = {
    "/path/to/checkpoint": str(DEMO),
    "/new/checkpoint": str(DEMO),
    "/path/to/model": str(DEMO),
}
LANGUAGES = {"bash", "python", "json", "yaml", ""}
TO_SERVER = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):3000[01]")


def of_language(language: str) -> list[Any]:
    found = [block for block in BLOCKS if block.language == language and block.reason is None]
    return [pytest.param(block, id=block.place) for block in found]


def test_blocks_have_a_language_and_those_that_are_not_run_are_few() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    counted: dict[str, int] = {}
    for block in BLOCKS:
        if block.reason is not None:
            page = block.place.partition(":")[0]
            counted[page] = counted.get(page, 0) + 1
    assert counted == NOT_RUN
    assert len(BLOCKS) > 20
    fences = sum(page.read_text(encoding="utf-8").count("\n```") for page in PAGES)
    assert fences == 2 * len(BLOCKS)


# ---------------------------------------------------------------- bash


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("demo") as running:
        yield running


def serves(words: list[str], server: RunningServer) -> None:
    """A command line that starts a server is one that would start."""
    args, _ = parse_serve(words)
    resolve(args, PLATFORM, load_model_config(args.model_path), Environ())


def curls(words: list[str], server: RunningServer) -> None:
    """curl gets an answer, of JSON or events that end as they should."""
    words = [TO_SERVER.sub(server.url, word) for word in words]
    command = ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "60", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    if result.stdout.startswith("data:"):
        assert result.stdout.endswith("data: [DONE]\n\n")
    else:
        json.loads(result.stdout)


def calls_python(words: list[str], server: RunningServer) -> None:
    """`python -m` names a module; a server's flags are a server's."""
    flag, module, *rest = words
    assert flag == "-m"
    if module == "sglang.launch_server":
        serves(rest, server)
    elif module == "sglang_router.launch_router":
        reason = "the package sglang-router is not installed"
        router = pytest.importorskip(module, reason=reason)
        assert router.parse_router_args(rest).worker_urls
    elif module not in ("venv", "pytest"):
        path = module.replace(".", "/")
        roots = (ROOT, ROOT / "python", ROOT / "sgl-kernel/python")
        found = [root / f"{path}{end}" for root in roots for end in (".py", "/__main__.py")]
        assert any(file.is_file() for file in found), module


def calls_sglang(words: list[str], server: RunningServer) -> None:
    """`sglang NAME` names a command, with flags that it has."""
    name, *rest = words
    if name == "serve":
        serves(rest, server)
    elif name != "check-env":
        import_module(COMMANDS[name].module).make_parser().parse_args(rest)


def installs(words: list[str], server: RunningServer) -> None:
    """`pip install` names this project, with extras that it has."""
    command, target = words
    assert command == "install"
    extras = re.fullmatch(r"\.(?:\[(\w+)\])?", target)
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras[1] in (None, *project["optional-dependencies"])


def calls_bash(words: list[str], server: RunningServer) -> None:
    """A script is there, and its usage has the flags, or its first lines say what it takes."""
    script, *flags = words
    text = (ROOT / script).read_text(encoding="utf-8")
    assert all(flag in text for flag in flags)


def activates(words: list[str], server: RunningServer) -> None:
    assert words == [".venv/bin/activate"]


def applies(words: list[str], server: RunningServer) -> None:
    """The manifest is there; `test_manifests.py` reads it."""
    command, flag, file = words
    assert (command, flag) == ("apply", "-f")
    assert (ROOT / file).is_file()


def builds_site(words: list[str], server: RunningServer) -> None:
    """The navigation names every page once, and only those; check_new_user.py builds the site."""
    assert words[:2] == ["build", "--strict"]
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"[\w-]+\.md", nav)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


RUNNERS: dict[str, Callable[[list[str], RunningServer], None]] = {
    "curl": curls,
    "python": calls_python,
    "python3": calls_python,
    "sglang": calls_sglang,
    "pip": installs,
    "bash": calls_bash,
    "source": activates,
    "kubectl": applies,
    "mkdocs": builds_site,
}


@pytest.mark.parametrize("block", of_language("bash"))
def test_the_commands_of_a_block_work(block: Block, server: RunningServer) -> None:
    for words in block.commands():
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        for placeholder, value in PLACEHOLDERS.items():
            words = [word.replace(placeholder, value) for word in words]
        RUNNERS[words[0]](words[1:], server)


def test_a_wrong_command_of_a_block_is_found(server: RunningServer) -> None:
    """The checks can fail."""
    for line in (
        "sglang srve --model-path demo",
        "sglang serve --model-path demo --prot 1",
        "sglang serve --model-path demo --page-size 0",
        "sglang bench-serving --num-promts 3",
        "python -m sglang.benchserving",
        "pip install '.[benches]'",
        "bash scripts/test.sh --fast",
        "curl http://127.0.0.1:30000/nothing",
        "curl http://127.0.0.1:30000/generate -d '{\"text\": 1}'",
        "wget http://127.0.0.1:30000/health",
    ):
        ((name, *words),) = Block("x:1", "bash", line, None).commands()
        with pytest.raises((AssertionError, KeyError, SystemExit, OSError, ValueError)):
            RUNNERS[name](words, server)


# ---------------------------------------------------------------- python and JSON


class Names(dict[str, Any]):
    """Names of a block: those of this project keep their signatures, others are anything."""

    def __missing__(self, name: str) -> Any:
        if name in sgl_kernel.__all__:
            return create_autospec(getattr(sgl_kernel, name))
        if name in vars(builtins):
            raise KeyError(name)
        return MagicMock()


@pytest.mark.parametrize("block", of_language("python"))
def test_python_calls_what_there_is_with_its_arguments(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_autospec(Engine, instance=True)
    engine.__enter__.return_value = engine
    engine.generate.side_effect = lambda *args, **kwargs: [
        {"text": "t", "meta_info": {"finish_reason": None}}
    ]

    def make_engine(**kwargs: Any) -> Any:
        inspect.signature(sglang.ServerArgs).bind(**kwargs)
        return engine

    monkeypatch.setattr(sglang, "Engine", make_engine)
    exec(compile(block.text, block.place, "exec"), {}, Names(engine=engine))


@pytest.mark.parametrize("block", of_language("json"))
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)
