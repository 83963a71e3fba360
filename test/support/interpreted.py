"""Runs conformance tables beside this process, with Triton's interpreter on the CPU: Triton reads
TRITON_INTERPRET where kernels are defined."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TypeVar

import pytest

from code_shape import ROOT

Case = TypeVar("Case")
ASKED = "INTERPRETED_CASES"  # a list of names; without it a program runs all


def asked(cases: Mapping[str, Case]) -> dict[str, Case]:
    """Picks those cases of a table that this process was started for."""
    names = os.environ.get(ASKED)
    return {name: cases[name] for name in cases if names is None or name in json.loads(names)}


def run_interpreted(
    program: str, name: str, request: pytest.FixtureRequest | None = None
) -> dict[str, float | str]:
    """Reads the lines that `test/<program> <name>` prints: the largest error of each case, or what
    was wrong with it.

    Args:
        request: of a fixture of a module; cases that no test names which reads the fixture, and is
            to run, are left out. None: none is.
    """
    variables = {} if request is None else {ASKED: json.dumps(sorted(named(request)))}
    process = _interpreter()
    assert process.stdin is not None
    assert process.stdout is not None
    asked_for = [str(ROOT / "test" / program), [name], variables]
    print(json.dumps(asked_for), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, "Triton's interpreter has ended"
    status, output, errors = json.loads(answer)
    assert status == 0, f"the table ended early, with status {status}:\n{errors}"
    return dict(json.loads(line) for line in output.splitlines())


@functools.cache
def _interpreter() -> subprocess.Popen[str]:
    """A process that has imported torch and Triton, for all tables that this one asks for."""
    paths = (ROOT, ROOT / "python", ROOT / "sgl-kernel/python", ROOT / "test/support")
    process = subprocess.Popen(
        [sys.executable, ROOT / "test/support/quick_interpreter.py"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)  # which closes its input, and so ends it
    return process


def named(request: pytest.FixtureRequest) -> set[str]:
    """Gathers the parameters that are text, names of cases, of the tests that read this fixture."""
    return {
        value
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
        if request.fixturename in item.fixturenames and hasattr(item, "callspec")
        for value in item.callspec.params.values()
        if isinstance(value, str)
    }
