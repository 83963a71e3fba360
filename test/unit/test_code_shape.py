"""The shape ratchet: the repository keeps every rule of `code_shape`, and every rule can fail.

A debt is listed in `ALLOWED` with its measure. The list may only shrink: a listed debt that got
smaller fails too, until its entry is lowered or removed.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from code_shape import (
    HEAVY_MODULES,
    MAX_CODE_LINES,
    MAX_FUNCTION_LINES,
    PACKAGE,
    ROOT,
    RULES,
    TEXT_RULE,
    TORCH_FREE,
    judge,
    lookahead_lines,
    module_name,
    modules_that_load,
    nodes_of,
    project_texts,
    python_sources,
)

NUM_LOOKAHEAD_LINES = 3540
# (rule, place) -> measure. Lower or remove entries; add none.
ALLOWED: dict[tuple[str, str], int] = {
    # No debt: the two places that read pickles, weights only and in processes of their own. The
    # second one runs nothing of them.
    ("unsafe", f"{PACKAGE}/srt/pickled_weights.py"): 1,
    ("unsafe", f"{PACKAGE}/srt/control/pickle_records.py"): 1,
}


@pytest.fixture(autouse=True, scope="module")
def nodes_are_in_no_collection() -> Iterator[None]:
    """A million, in no cycle: to look at them takes most of the time, and much of later tests."""
    gc.disable()
    yield
    nodes_of.cache_clear()
    gc.enable()


@pytest.mark.parametrize("name", RULES)
def test_repository_keeps_rule(name: str) -> None:
    rule = RULES[name]
    messages = judge(name, rule, python_sources(rule.roots), ALLOWED)
    assert not messages, "\n" + "\n".join(messages)


def test_what_decides_how_far_steps_look_ahead_grows_no_longer() -> None:
    """Bounds the sum: a change that makes it shorter lowers the number, which is to be 3,300."""
    lines = lookahead_lines()
    assert sum(lines.values()) == NUM_LOOKAHEAD_LINES, lines


def test_allowances_name_existing_rules() -> None:
    assert {name for name, _ in ALLOWED} <= RULES.keys()


def test_no_local_path_or_host_in_any_text_file() -> None:
    messages = judge("local text", TEXT_RULE, project_texts(), {})
    assert not messages, "\n" + "\n".join(messages)


def test_test_files_have_names_of_their_own() -> None:
    """They are in no packages, so pytest takes files of one name for the same module."""
    names = Counter(
        path.name
        for folder in ("test", "sgl-kernel/tests")
        for path in (ROOT / folder).rglob("test_*.py")
    )
    assert not [name for name, count in names.items() if count > 1]


def test_processes_without_a_model_do_not_load_torch() -> None:
    package = ROOT / PACKAGE
    files = {pattern: sorted(package.glob(pattern)) for pattern in TORCH_FREE}
    missing = [pattern for pattern, found in files.items() if not found]
    assert not missing, f"TORCH_FREE names no file: {missing}; renamed? Mend the list."
    paths = [file.relative_to(ROOT).as_posix() for found in files.values() for file in found]
    loaded = modules_that_load(
        [module_name(path) for path in paths], HEAVY_MODULES, ROOT / "python"
    )
    assert not loaded, (
        f"{loaded}: {{heavy module: first importer}}. Remedy: import it inside the function that"
        " needs it, or move what needs it to the scheduler process."
    )


# ---------------------------------------------------------------- each rule can fail

SRT = f"{PACKAGE}/srt"
BAD_SOURCES = {
    "file size": [(f"{SRT}/a.py", "x = (\n    1\n)\n" * (MAX_CODE_LINES // 2 + 1))],
    "function size": [(f"{SRT}/a.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES)],
    "global": [("scripts/a.py", "def f():\n    global x\n    x = 1\n")],
    "probe": [
        (f"{SRT}/a.py", "getattr(x, 'name', None)"),
        (f"{SRT}/a.py", "hasattr(x, 'name')"),
    ],
    "unsafe": [
        (f"{SRT}/a.py", "import pickle"),
        (f"{SRT}/a.py", "import os, marshal"),
        (f"{SRT}/a.py", "import pickletools"),
        (f"{SRT}/a.py", "multiprocessing.reduction.ForkingPickler.loads(data)"),
        (f"{SRT}/a.py", "from dill import loads"),
        (f"{SRT}/a.py", "def f(text):\n    return eval(text)"),
        (f"{SRT}/a.py", "exec('x = 1')"),
        (f"{SRT}/a.py", "torch.load(path, weights_only=True)"),
        (f"{SRT}/a.py", "load(path, weights_only=False)"),
        (f"{SRT}/a.py", "numpy.load(path, allow_pickle=True)"),
        (f"{SRT}/a.py", "AutoConfig.from_pretrained(path, trust_remote_code=True)"),
        (f"{SRT}/a.py", "def f(trust_remote_code): ..."),
    ],
    "silent handler": [
        ("benchmark/a.py", "try:\n    f()\nexcept:\n    pass"),
        ("benchmark/a.py", "try:\n    f()\nexcept Exception as error:\n    pass"),
        ("benchmark/a.py", "try:\n    f()\nexcept BaseException:\n    ..."),
    ],
    "docstring": [
        (f"{SRT}/a.py", '"""What it does."""'),
        (f"{SRT}/a.py", 'def f():\n    """Whether it is so."""'),
        (f"{SRT}/a.py", 'class A:\n    """Of a step."""'),
    ],
    "layer": [
        (f"{SRT}/managers/scheduler.py", "import sglang.srt.entrypoints.engine"),
        (f"{SRT}/workers/tp_worker.py", "from sglang.srt.managers.scheduler import Scheduler"),
        (f"{SRT}/workers/tp_worker.py", "from ..managers.scheduler import Scheduler"),
        (f"{SRT}/managers/scheduler.py", "from sglang.srt.workers.tp_worker import TpModelWorker"),
        (f"{SRT}/control/pause.py", "from sglang.srt.managers.scheduler import Scheduler"),
        (f"{SRT}/scheduling/invariants.py", "from sglang.srt.control.pause import X"),
        (f"{SRT}/scheduling/a.py", "'X.'\nfrom sglang.srt.workers.tp_worker import X as X\nx = 1"),
        (f"{SRT}/step/step_ops.py", "from sglang.srt.model_executor import model_runner"),
        (f"{SRT}/speculative/mask_drafter.py", "from ..managers import schedule_batch"),
        (f"{SRT}/model_executor/model_runner.py", "import sglang.srt.workers.tp_worker"),
        (f"{SRT}/models/llama.py", "import sglang.srt.model_executor.model_runner"),
        (f"{SRT}/models/llama.py", "import sglang.srt.mem_cache.radix_cache"),
        (f"{SRT}/layers/sampler.py", "import sglang.srt.models.llama"),
        (f"{SRT}/layers/attention/b.py", "import sglang.srt.mem_cache.allocator"),
        (f"{SRT}/mem_cache/memory_pool.py", "from sglang.srt.step import worker"),
        (f"{SRT}/mem_cache/memory_pool.py", "from sglang.srt.layers import sampler"),
        (f"{SRT}/sampling/sampling_params.py", "from sglang.srt import layers"),
        (f"{SRT}/managers/scheduler.py", "def f():\n    from sglang import Engine"),
    ],
    "queue": [
        (f"{SRT}/speculative/a.py", "from collections import Counter, deque"),
        (f"{SRT}/speculative/a.py", "import collections\nunread = collections.deque()"),
        (f"{SRT}/speculative/a.py", "step = unread.popleft()"),
        (f"{SRT}/speculative/a.py", "step = unread.pop(0)"),
    ],
    "server args": [
        (f"{SRT}/managers/scheduler.py", "from sglang.srt.server_args import ServerArgs"),
        (f"{SRT}/platform.py", "from . import server_args"),
    ],
}
GOOD_SOURCES = [
    (f"{SRT}/managers/scheduler.py", "from sglang.srt.control.control import Control"),
    (f"{SRT}/managers/a.py", '"A path."\nfrom sglang.srt.workers.tp_worker import X as X\n'),
    (f"{SRT}/workers/tp_worker.py", "from ..model_executor.model_runner import ModelRunner"),
    (f"{SRT}/models/llama.py", "from sglang.srt.layers.sampler import Sampler"),
    (f"{SRT}/layers/attention/b.py", "from sglang.srt.mem_cache.memory_pool import X"),
    (f"{SRT}/entrypoints/engine.py", "from sglang.srt.server_args import ServerArgs"),
    (f"{SRT}/a.py", 'def f():\n    """Tells whether it is so."""\n    return "What is it?"'),
    (f"{SRT}/a.py", "model.eval()\ngetattr(x, name)\n"),
    (f"{SRT}/a.py", "try:\n    f()\nexcept OSError:\n    pass"),
    (f"{SRT}/a.py", "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
    (f"{SRT}/a.py", '"""A\nb."""\n' + "# a\n\nx = (\n    'a'\n)\n" * MAX_CODE_LINES),
]


@pytest.mark.parametrize(
    ("name", "path", "source"),
    [(name, path, source) for name, cases in BAD_SOURCES.items() for path, source in cases],
)
def test_bad_source_fails_and_message_says_what_to_do(name: str, path: str, source: str) -> None:
    rule = RULES[name]
    (message,) = judge(name, rule, {path: source}, {})
    for part in (path, name, rule.limit, rule.remedy):
        assert part in message


def test_every_rule_has_a_bad_source() -> None:
    assert BAD_SOURCES.keys() == RULES.keys()


@pytest.mark.parametrize(("path", "source"), GOOD_SOURCES)
def test_good_source_passes_every_rule(path: str, source: str) -> None:
    for name, rule in RULES.items():
        assert judge(name, rule, {path: source}, {}) == []


def test_allowance_must_fit_exactly() -> None:
    path, rule = f"{SRT}/a.py", RULES["probe"]
    texts = {path: "getattr(x, 'a')\ngetattr(x, 'b')\n"}
    verdicts = {
        measure: judge("probe", rule, texts, {("probe", path): measure}) for measure in (1, 2, 3)
    }
    assert verdicts[2] == []
    assert "1 allowed here" in verdicts[1][0]
    assert "lower ALLOWED from 3" in verdicts[3][0]
    assert "remove it" in judge("probe", rule, {path: ""}, {("probe", path): 1})[0]


@pytest.mark.parametrize(
    "text",
    [
        "model in /home" + "/someone/model",
        "cd /" + "root/model",
        "see https://pypi" + ".org/project/x",
        "files.python" + "hosted.example",
        f"python {Path(__file__).resolve()}",
    ],
)
def test_local_text_is_found(text: str) -> None:
    assert "Remedy" in judge("local text", TEXT_RULE, {"a.md": text}, {})[0]


@pytest.mark.parametrize("text", ["GET /v1/models", "docs/home/page/", "see /usr/lib/x", "/tmp/x"])
def test_neutral_text_is_not_a_local_path(text: str) -> None:
    assert judge("local text", TEXT_RULE, {"a.md": text}, {}) == []


def test_heavy_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("")
    (tmp_path / "light.py").write_text("")
    (tmp_path / "careless.py").write_text("import heavy")
    loaded = modules_that_load(["light", "careless"], ("heavy",), tmp_path)
    assert loaded == {"heavy": "careless"}
