"""Writes what SGLang's clients may send and say: names and defaults, read from its sources.

    pip download --no-deps sglang==VERSION && unzip sglang-VERSION-*.whl -d SOURCES
    python scripts/read_sglang_surface.py SOURCES

Nothing is imported: the sources are parsed. The result is `python/sglang/srt/sglang_surface.json`.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parents[1] / "python/sglang/srt/sglang_surface.json"
IO, OPENAI = "managers/io_struct.py", "entrypoints/openai/protocol.py"
BODIES = {
    "generate": (IO, "GenerateReqInput"),
    "session_params": (IO, "SessionParams"),
    "sampling_params": ("sampling/sampling_params.py", "SamplingParams"),
    "/v1/completions": (OPENAI, "CompletionRequest"),
    "/v1/chat/completions": (OPENAI, "ChatCompletionRequest"),
    "stream_options": (OPENAI, "StreamOptions"),
    "/tokenize": (OPENAI, "TokenizeRequest"),
    "/detokenize": (OPENAI, "DetokenizeRequest"),
    "/abort_request": (IO, "AbortReq"),
    "/pause_generation": (IO, "PauseGenerationReqInput"),
    "/continue_generation": (IO, "ContinueGenerationReqInput"),
    "/update_weights_from_disk": (IO, "UpdateWeightFromDiskReqInput"),
    "/update_weights_from_tensor": (IO, "UpdateWeightsFromTensorReqInput"),
    "/update_weights_from_distributed": (IO, "UpdateWeightsFromDistributedReqInput"),
    "/init_weights_update_group": (IO, "InitWeightsUpdateGroupReqInput"),
    "/destroy_weights_update_group": (IO, "DestroyWeightsUpdateGroupReqInput"),
    "/begin_weight_update": (IO, "BeginWeightUpdateReqInput"),
    "/end_weight_update": (IO, "EndWeightUpdateReqInput"),
    "/update_weight_version": (IO, "UpdateWeightVersionReqInput"),
    "/release_memory_occupation": (IO, "ReleaseMemoryOccupationReqInput"),
    "/resume_memory_occupation": (IO, "ResumeMemoryOccupationReqInput"),
}
SWITCH, OPTIONAL, ONE, MANY = 0, "?", 1, "*"  # how many values a flag takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path, help="Directory of an unpacked wheel.")
    root = parser.parse_args().sources
    (metadata,) = root.glob("sglang-*.dist-info")
    srt = root / "sglang" / "srt"
    bodies = {
        surface: {name: default for name, _, default in class_fields(srt / file, owner)}
        for surface, (file, owner) in BODIES.items()
    }
    surface = {
        "version": metadata.name.removesuffix(".dist-info").partition("-")[2],
        "bodies": bodies,
        "flags": read_flags(srt),
    }
    RESULT.write_text(to_text(surface), encoding="utf-8")
    print(f"{RESULT.name}: {len(surface['flags'])} flags, {len(bodies)} bodies")


def to_text(surface: dict[str, Any]) -> str:
    """JSON with one line per field."""
    lines = []
    for name, value in surface.items():
        if name == "bodies":
            groups = ",\n".join(f"  {json.dumps(k)}: {_rows(v, 4)}" for k, v in value.items())
            text = f"{{\n{groups}\n }}"
        else:
            text = _rows(value, 2) if isinstance(value, dict) else json.dumps(value)
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rows(entries: dict[str, Any], indent: int) -> str:
    rows = (f"{' ' * indent}{json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
    return "{\n" + ",\n".join(rows) + "\n" + " " * (indent - 1) + "}"


@cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def class_fields(path: Path, owner: str) -> list[tuple[str, ast.expr, Any]]:
    """(name, annotation, default or None) of a class and of its bases in the same file."""
    classes = {node.name: node for node in _module(path).body if isinstance(node, ast.ClassDef)}
    node = classes[owner]
    found = []
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found += class_fields(path, base.id)
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            name = entry.target.id
            if not name.startswith("_") and "ClassVar" not in ast.unparse(entry.annotation):
                found.append((name, entry.annotation, value_of(entry.value, path)))
    return found


def value_of(node: ast.expr | None, path: Path) -> Any:
    """The value of a default; None for what is no plain value."""
    match node:
        case ast.Constant(value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if isinstance(value, int | float):
            return -value
        case ast.BinOp(ast.Constant(base), ast.LShift(), ast.Constant(bits)):
            return int(str(base)) << int(str(bits))
        case ast.List() | ast.Tuple() | ast.Dict():
            return ast.literal_eval(node)
        case ast.Name(name):
            values = {target.id: value for target, value in _assignments(path)}
            return value_of(values[name], path) if name in values else None
        case ast.Call(keywords=keywords):
            given = {keyword.arg: keyword.value for keyword in keywords}
            if ast.unparse(given.get("default_factory", ast.Constant(None))) in ("list", "dict"):
                return []
            return value_of(given.get("default"), path)
    return None


def _assignments(path: Path) -> Iterator[tuple[ast.Name, ast.expr]]:
    for node in _module(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0], node.value


def read_flags(srt: Path) -> dict[str, Any]:
    """Field of ServerArgs to [its flags, how many values they take, default]."""
    found: dict[str, Any] = {}
    for path in sorted((srt / "arg_groups/fields").glob("*.py")):
        for node in _module(path).body:
            if isinstance(node, ast.ClassDef) and "_NS_PATH" in ast.unparse(node):
                for name, annotation, default in class_fields(path, node.name):
                    if "Derived(" not in ast.unparse(annotation):
                        found[name] = [*_flag(name, annotation), default]
    for names, arguments in _added_by_hand(srt / "server_args.py"):
        field = arguments.get("dest") or names[0].removeprefix("--").replace("-", "_")
        takes = ONE if arguments.get("action", "") in ("", "DeprecatedStoreConstAction") else SWITCH
        flags, known, default = found.get(field, [[], takes, None])
        found[field] = [[*flags, *names], known if flags else takes, default]
    return dict(sorted(found.items()))


def _added_by_hand(path: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    for node in ast.walk(_module(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "parser.add_argument":
            names = [str(item.value) for item in node.args if isinstance(item, ast.Constant)]
            yield names, {str(k.arg): ast.unparse(k.value).strip("'") for k in node.keywords}


def _flag(name: str, annotation: ast.expr) -> tuple[list[str], Any]:
    """The names of a field's flag, none for an argument without one, and how many values."""
    inner, *metadata = (
        annotation.slice.elts
        if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)
        else [annotation]
    )
    calls = [item for item in metadata if isinstance(item, ast.Call)]
    given = {str(k.arg): k.value for call in calls for k in call.keywords}
    names = [f"--{name.replace('_', '-')}"]
    if "cli_name" in given:
        names = [ast.literal_eval(given["cli_name"])]
    names += ast.literal_eval(given["aliases"]) if "aliases" in given else []
    kind = ast.unparse(inner)
    if "no_cli" in given or not metadata:
        return [], ONE
    if "BooleanOptionalAction" in ast.unparse(given.get("action", ast.Constant(None))):
        return [*names, *(f"--no-{item.removeprefix('--')}" for item in names)], SWITCH
    if "nargs" in given:
        return names, OPTIONAL if ast.literal_eval(given["nargs"]) == "?" else MANY
    if "action" in given or ("List[" in kind and "type_parser" not in given):
        return names, MANY
    return names, SWITCH if kind in ("bool", "Optional[bool]") else ONE


if __name__ == "__main__":
    main()
