"""Runs a client's checks in the client's own environment, which has little else."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Raised = TypeVar("Raised", bound=Exception)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))


def main(doc: str | None, kind: Callable[[str], object]) -> None:
    """Prints a JSON object: the name of each check to `ok` or to what it raised.

    Args:
        doc: of the client's module.
        kind: makes, by the URL of a server, an object whose public methods are the checks.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--url", required=True, help="such as http://127.0.0.1:30000")
    checks = kind(parser.parse_args().url)
    names = [name for name in vars(type(checks)) if not name.startswith("_")]
    outcomes = {name.replace("_", " "): _outcome(getattr(checks, name)) for name in names}
    json.dump(outcomes, sys.stdout)


def _outcome(check: Callable[[], None]) -> str:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some clients print
            check()
    except Exception as error:  # noqa: BLE001 - a check that fails says so, and others go on
        traceback.print_exc()
        return repr(error)
    return "ok"


def raises(kind: type[Raised], call: Callable[[], object]) -> Raised:
    """Gives what a call raises, which must be of this kind."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"nothing was raised, not {kind.__name__}")
