"""Checks of the shape ratchet: sizes, probes, unsafe names, silent handlers, layers, local paths.

Every check takes a path and a text and returns what breaks it. `unit/test_code_shape.py` feeds
them the repository and, to show that each can fail, small bad sources.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "python/sglang"
EVERYWHERE = (PACKAGE, "sgl-kernel", "scripts", "benchmark", "training")
MAX_CODE_LINES = 320  # of a file
MAX_FUNCTION_LINES = 60

# The files that answer how far steps look ahead, all that goes by prices and estimates.
LOOKAHEAD = (
    "lookahead/*.py",
    "model_executor/measured_times.py",
    "model_executor/price_measurement.py",
    "speculative/adaptive_*.py",
    "speculative/left_out.py",
    "speculative/ngram_confidence.py",
    "speculative/rounds.py",
    "speculative/tile_spec/*.py",
    "step/price_table.py",
)

QUESTION_WORDS = ("What", "Which", "Whether", "How", "Of", "By", "That", "Who", "Where", "When")

UNSAFE_MODULES = {"pickle", "pickletools", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_NAMES = {"eval", "exec"}  # as plain calls; `module.eval()` of torch is another thing
UNSAFE_WORDS = {"trust_remote_code", "ForkingPickler"}
UNSAFE_KEYWORDS = {("weights_only", False), ("allow_pickle", True)}

# What a room, a folder of `srt`, may import beside itself: rooms, or a module of one. `base` is the
# files of `srt` and the rooms BASE; `entrypoints` is also what lies beside `srt`.
BASE = ("sampling", "observability")
MAY_IMPORT = {
    "base": "",
    "mem_cache": "base",
    "distributed": "base",
    "layers": "mem_cache.memory_pool base",
    "models": "layers base",
    "step": "layers mem_cache base",
    "model_loader": "models layers base",
    "weight_sync": "model_loader models mem_cache base",
    "utils": "weight_sync base",
    "model_executor": "distributed step weight_sync model_loader models layers mem_cache base",
    "lookahead": "step layers mem_cache base",
    "speculative": "lookahead model_executor models step layers mem_cache base",
    "workers": "lookahead speculative model_executor step layers mem_cache base",
    "parser": "base",
    "constrained": "base",
    "function_call": "parser base",
    "messages": "base",
    "frontend": "messages constrained base",
    "scheduling": "lookahead messages constrained step layers mem_cache base",
    "control": "scheduling frontend messages utils weight_sync base",
    "managers": "control scheduling frontend messages constrained lookahead utils step mem_cache"
    " base",
    "processes": "managers control scheduling frontend messages constrained"
    " workers distributed speculative lookahead model_executor step weight_sync mem_cache base",
    "entrypoints": "processes managers control frontend function_call parser messages constrained"
    " utils"
    " model_executor base",
}
STEP_ROOMS = ("lookahead", "speculative", "step", "workers")  # keep no steps in flight
SERVER_ARGS_READERS = re.compile(
    rf"{PACKAGE}/(__init__|launch_server|check_env|bench_\w+|srt/(entrypoints|processes)/.+)\.py"
)

# Modules that a process without a model loads: torch would cost it seconds and memory.
TORCH_FREE = (
    "__main__.py",
    "check_env.py",
    "check_model.py",
    "launch_server.py",
    "srt/entrypoints/**/*.py",
    "srt/messages/*.py",
    "srt/frontend/*.py",
    "srt/function_call/*.py",
    "srt/parser/*.py",
    "srt/constrained/*.py",
    "srt/control/client.py",
    "srt/lookahead/adaptive_config.py",
    "srt/managers/io_struct.py",
    "srt/managers/tokenizer_manager.py",
    "srt/processes/detokenizer_process.py",
)
HEAVY_MODULES = ("torch", "transformers")

# Assembled from pieces so that this file does not break its own rule.
LOCAL_TEXT = re.compile(
    "|".join(
        (
            r"(?<![\w.])/(?:home|Users)/\w[\w.-]*/",
            r"(?<![\w.])/" + "root" + "/",
            r"\bpypi" + r"\.org\b",
            "python" + "hosted",
            "npm" + "js",
            r"\bdeb\." + "debian",
        )
    )
)


class Finding(NamedTuple):
    """A breach: where, how much (lines or occurrences), and the details for the message."""

    place: str
    measure: int
    detail: str


Check = Callable[[str, str], list[Finding]]


class Rule(NamedTuple):
    """A check, the roots it holds for, and what its failure message says."""

    check: Check
    roots: tuple[str, ...]
    limit: str
    remedy: str


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def _counted(path: str, hits: Iterable[tuple[int, str]]) -> list[Finding]:
    """One finding for all hits `(line, what)` in a file."""
    found = sorted(hits)
    detail = "; ".join(f"line {line}: {what}" for line, what in found)
    return [Finding(path, len(found), detail)] if found else []


def num_code_lines(source: str) -> int:
    """Counts lines with a name, a keyword or a number: not those of comments, text, brackets."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    words = (token for token in tokens if token.type in (tokenize.NAME, tokenize.NUMBER))
    return len({token.start[0] for token in words})


def check_file_size(path: str, source: str) -> list[Finding]:
    # A file of fewer lines has no more lines of code; to read its tokens would take longer.
    if source.count("\n") <= MAX_CODE_LINES:
        return []
    lines = num_code_lines(source)
    return [Finding(path, lines, "lines of code")] if lines > MAX_CODE_LINES else []


def check_function_size(path: str, source: str) -> list[Finding]:
    findings = []
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                findings.append(
                    Finding(f"{path}::{node.name}", lines, f"lines, from line {node.lineno}")
                )
    return findings


def check_globals(path: str, source: str) -> list[Finding]:
    nodes = (node for node in nodes_of(source) if isinstance(node, ast.Global))
    return _counted(path, ((node.lineno, f"global {', '.join(node.names)}") for node in nodes))


def check_probes(path: str, source: str) -> list[Finding]:
    def hits() -> Iterator[tuple[int, str]]:
        for node in nodes_of(source):
            match node:
                case ast.Call(
                    func=ast.Name("getattr" | "hasattr" as name),
                    args=[_, ast.Constant(attribute), *_],
                ):
                    yield node.lineno, f"{name}(..., {attribute!r})"

    return _counted(path, hits())


def check_unsafe(path: str, source: str) -> list[Finding]:
    def hits() -> Iterator[tuple[int, str]]:
        for node in nodes_of(source):
            for what in _unsafe_parts(node):
                yield _line_of(node), what

    return _counted(path, hits())


def _line_of(node: ast.AST) -> int:
    """The line of a node; `ast.AST` itself declares none."""
    assert isinstance(node, ast.expr | ast.stmt | ast.keyword | ast.arg)
    return node.lineno


def _unsafe_parts(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names):
            modules = {alias.name.partition(".")[0] for alias in names}
            yield from (f"import {name}" for name in modules & UNSAFE_MODULES)
        case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in UNSAFE_MODULES:
            yield f"from {module} import"
        case ast.Name(name) if name in UNSAFE_NAMES | UNSAFE_WORDS:
            yield name
        case ast.Attribute(ast.Name("torch"), "load"):
            yield "torch.load"
        case ast.Attribute(attr=name) if name in UNSAFE_WORDS:
            yield name
        case ast.arg(name) if name in UNSAFE_WORDS:
            yield name
        case ast.keyword(arg=str(name), value=value):
            constant = value.value if isinstance(value, ast.Constant) else None
            if name in UNSAFE_WORDS or (name, constant) in UNSAFE_KEYWORDS:
                yield f"{name}={ast.unparse(value)}"


def check_silent_handlers(path: str, source: str) -> list[Finding]:
    def hits() -> Iterator[tuple[int, str]]:
        for node in nodes_of(source):
            match node:
                case ast.ExceptHandler(
                    type=None | ast.Name("Exception" | "BaseException"),
                    body=[ast.Pass() | ast.Expr(ast.Constant())],
                ):
                    yield node.lineno, "swallows every error"

    return _counted(path, hits())


def check_docstrings(path: str, source: str) -> list[Finding]:
    """Finds docstrings, those of constants too, that begin with a word of QUESTION_WORDS."""

    def hits() -> Iterator[tuple[int, str]]:
        for node in nodes_of(source):
            match node:
                case ast.Expr(ast.Constant(str() as text)) if (
                    text.partition(" ")[0] in QUESTION_WORDS
                ):
                    yield node.lineno, text.partition("\n")[0]

    return _counted(path, hits())


def check_queues(path: str, source: str) -> list[Finding]:
    """Finds queues: whoever keeps steps until they are read has one."""

    def hits() -> Iterator[tuple[int, str]]:
        for node in nodes_of(source):
            match node:
                case ast.ImportFrom(module="collections" | "queue", names=names):
                    queues = ("deque", "Queue", "SimpleQueue")
                    yield from ((node.lineno, each.name) for each in names if each.name in queues)
                case ast.Attribute(attr="deque" | "popleft" as name):
                    yield node.lineno, name
                case ast.Call(func=ast.Attribute(attr="pop"), args=[ast.Constant(0)]):
                    yield node.lineno, "pop(0)"

    return _counted(path, hits())


def module_name(path: str) -> str:
    dotted = path.removeprefix("python/").removesuffix(".py").replace("/", ".")
    return dotted.removesuffix(".__init__")


def _room(module: str) -> str:
    """The room of a module, or of a name in it."""
    parts = module.split(".")
    if parts[1:2] != ["srt"]:
        return "entrypoints"
    name = parts[2] if len(parts) > 2 else ""
    return name if name in MAY_IMPORT and name not in BASE else "base"


def only_gives_names(source: str) -> bool:
    """Tells whether a module has no code: it gives names of another one under SGLang's path."""
    docstring, *others = ast.parse(source).body
    return isinstance(docstring, ast.Expr) and all(
        isinstance(node, ast.ImportFrom) and all(a.asname == a.name for a in node.names)
        for node in others
        if getattr(node, "module", "") != "__future__"
    )


def imported_names(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Lines and full names of what a module imports of this package, at any depth."""
    package = module_name(path).split(".")
    if not path.endswith("/__init__.py"):
        package = package[:-1]
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "sglang")


def check_layers(path: str, source: str) -> list[Finding]:
    own = _room(module_name(path))
    allowed = {own, *MAY_IMPORT[own].split()}
    modules = tuple(f"sglang.srt.{entry}." for entry in allowed if "." in entry)
    breaches = [
        (line, f"{own} imports {name} of {_room(name)}")
        for line, name in imported_names(path, source)
        if _room(name) not in allowed and not f"{name}.".startswith(modules)
    ]
    return [] if breaches and only_gives_names(source) else _counted(path, breaches)


def check_server_args_readers(path: str, source: str) -> list[Finding]:
    if SERVER_ARGS_READERS.fullmatch(path):
        return []
    imports = imported_names(path, source)
    return _counted(path, ((line, name) for line, name in imports if ".server_args" in name))


def check_local_text(path: str, text: str) -> list[Finding]:
    beside = re.compile(re.escape(str(ROOT.parent)) + r"/([\w.-]+)")
    may_name = ROOT.parent != Path("/") and beside.search(text) is not None

    def hits() -> Iterator[tuple[int, str]]:
        for number, line in enumerate(text.splitlines(), 1):
            if match := LOCAL_TEXT.search(line):
                yield number, match.group()
            if may_name:
                for match in beside.finditer(line):
                    if (ROOT.parent / match.group(1)).exists():
                        yield number, match.group()

    return _counted(path, hits())


RULES = {
    "file size": Rule(
        check_file_size, EVERYWHERE, f"{MAX_CODE_LINES} lines of code", "split by responsibility"
    ),
    "function size": Rule(
        check_function_size, EVERYWHERE, f"{MAX_FUNCTION_LINES} lines", "name a part and move it"
    ),
    "global": Rule(check_globals, EVERYWHERE, "0", "keep state in an object that is passed in"),
    "probe": Rule(
        check_probes, EVERYWHERE, "0", "declare the attribute in a type and read it plainly"
    ),
    "unsafe": Rule(
        check_unsafe, EVERYWHERE, "0", "use msgspec, JSON or safetensors; never run foreign code"
    ),
    "silent handler": Rule(
        check_silent_handlers, EVERYWHERE, "0", "catch the one expected error, or log and raise"
    ),
    "docstring": Rule(
        check_docstrings,
        (*EVERYWHERE, "test"),
        "0",
        "begin with a verb (Tells whether, Returns), of a class or property a noun phrase",
    ),
    "layer": Rule(
        check_layers, (PACKAGE,), "0", "import downwards only: pass the thing in or move it down"
    ),
    "queue": Rule(
        check_queues,
        tuple(f"{PACKAGE}/srt/{room}" for room in STEP_ROOMS),
        "0",
        "put what is to be learnt of a launched step into its `StepRecord`",
    ),
    "server args": Rule(
        check_server_args_readers,
        (PACKAGE,),
        "0",
        "take the resolved sub-config of runtime_config instead of ServerArgs",
    ),
}
TEXT_RULE = Rule(check_local_text, ("",), "0", "write a relative path or a neutral example")


def judge(
    rule_name: str, rule: Rule, texts: dict[str, str], allowed: dict[tuple[str, str], int]
) -> list[str]:
    """Failure messages of one rule over `{path: text}`: new breaches, then stale allowances."""
    listed = {place: measure for (name, place), measure in allowed.items() if name == rule_name}
    messages = []
    for path, text in texts.items():
        for place, measure, detail in rule.check(path, text):
            limit = listed.pop(place, None)
            if limit is None or measure > limit:
                allowance = "" if limit is None else f", {limit} allowed here"
                messages.append(
                    f"{place}: {rule_name}: {measure} ({detail}); limit {rule.limit}{allowance}."
                    f" Remedy: {rule.remedy}."
                )
            elif measure < limit:
                messages.append(f"{place}: {rule_name}: now {measure}; lower ALLOWED from {limit}.")
    messages += [f"{place}: {rule_name}: clean; remove it from ALLOWED." for place in listed]
    return messages


def modules_that_load(modules: list[str], heavy: tuple[str, ...], path: Path) -> dict[str, str]:
    """`{heavy module: the module whose import loaded it}`, found in a fresh interpreter."""
    program = (
        "import importlib, sys\n"
        "modules, heavy = (text.split(',') for text in sys.argv[1:])\n"
        "seen = set()\n"
        "for module in modules:\n"
        "    importlib.import_module(module)\n"
        "    for name in sorted(set(heavy) & set(sys.modules) - seen):\n"
        "        seen.add(name)\n"
        "        print(name, module)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, ",".join(modules), ",".join(heavy)],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, f"an import failed:\n{result.stderr}"
    return dict(line.split() for line in result.stdout.splitlines())


def python_sources(roots: tuple[str, ...]) -> dict[str, str]:
    files = (file for root in roots for file in sorted((ROOT / root).rglob("*.py")))
    paths = {file.relative_to(ROOT).as_posix(): file for file in files}
    demo_models = f"{PACKAGE}/demo_models/"
    return {
        path: file.read_text(encoding="utf-8")
        for path, file in paths.items()
        if not path.startswith(demo_models)
    }


def lookahead_lines() -> dict[str, int]:
    """Lines of each file of LOOKAHEAD, most first."""
    root = ROOT / PACKAGE / "srt"
    files = [file for pattern in LOOKAHEAD for file in root.glob(pattern)]
    lines = {
        file.relative_to(root).as_posix(): file.read_text(encoding="utf-8").count("\n")
        for file in files
    }
    return dict(sorted(lines.items(), key=lambda each: -each[1]))


def project_texts() -> dict[str, str]:
    """Every text file that is tracked, or untracked and not ignored."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # a copy without its repository
        return python_sources((*EVERYWHERE, "test"))
    texts = {}
    for name in filter(None, names.split("\0")):
        data = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in data[:8192]:
            texts[name] = data.decode("utf-8", errors="replace")
    return texts
