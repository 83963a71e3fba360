"""Runs a program under Triton's interpreter without what that does in vain, most of its time:

- it prepares `triton.language` at every call of a device function, though the launch has done that;
- it looks for overflows of integers at every operation, and then says nothing of them, since only
  `InterpreterOptions.debug` would let it;
- it makes a table of types whenever it needs one of them.

What kernels compute is the same, bit for bit.

    export TRITON_INTERPRET=1 PYTHONPATH=python:sgl-kernel/python:test/support
    python test/support/quick_interpreter.py test/support/attention_cases.py triton

Without a program it reads lines, each a list of a program, its arguments and the environment that
it gets besides. Each runs in a fork of this process, so torch and Triton are imported once. The
answer is a line, a list of its exit status, its output and its errors.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any

import torch
import triton
from triton import language
from triton.runtime import interpreter

KNOWN = "3.9."  # version whose private names these are; others run as they come
TIMEOUT_S = 900  # of a fork: twenty times what the longest table takes on a machine of its own
MODULES = (language, language.core)  # that a function may name, and that are then prepared


class PreparedOnce:
    """Stands for `_patch_lang`: does nothing for modules that this launch has prepared already."""

    def __init__(self, prepare: Callable[[Any], Any]) -> None:
        self._prepare = prepare
        self._named: dict[Any, frozenset[str]] = {}
        self._prepared: set[str] = set()

    def __call__(self, function: Any) -> Any:
        if function not in self._named:
            values = list(function.__globals__.values())
            self._named[function] = frozenset(
                module.__name__ for module in MODULES if any(value is module for value in values)
            )
        named = self._named[function]
        if named and named <= self._prepared:
            return None  # of a device function, which undoes nothing
        self._prepared |= named
        scope = self._prepare(function)
        undo = scope.restore

        def restore() -> None:  # at the end of the launch
            self._prepared.clear()
            undo()

        scope.restore = restore
        return scope


def main(program: str, *arguments: str) -> None:
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def serve() -> None:
    """Answers lines until there are no more."""
    torch.set_num_threads(1)  # a fork has none of the other threads
    for line in sys.stdin:
        program, arguments, variables = json.loads(line)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            status = forked(functools.partial(main, program, *arguments), variables, output, errors)
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read())
        print(json.dumps([status, *texts]), flush=True)


def forked(
    run: Callable[[], None], variables: dict[str, str], output: IO[str], errors: IO[str]
) -> int:
    """Returns the exit status of a fork that runs this, negative: the signal that ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        signal.alarm(TIMEOUT_S)
        for number, file in enumerate((output, errors), 1):
            os.dup2(file.fileno(), number)
        os.environ.update(variables)
        run()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def shorten() -> None:
    """Leaves out what is done in vain."""
    interpreter._patch_lang = PreparedOnce(interpreter._patch_lang)
    numpy_dtype = interpreter._get_np_dtype
    of_numbers = functools.cache(numpy_dtype)  # other types have no hash
    interpreter._get_np_dtype = lambda dtype: (
        numpy_dtype(dtype) if dtype.scalar.is_ptr() else of_numbers(dtype.scalar)
    )
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows would be told: look for them"
    builder.options = replace(builder.options, sanitize_overflow=False)


if __name__ == "__main__":
    if triton.__version__.startswith(KNOWN):
        shorten()
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        serve()
