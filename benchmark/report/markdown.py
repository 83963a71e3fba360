"""Holds what the tables share: their form, and where a figure is from."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]  # a stored result


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def measured_by(result: Result) -> str:
    """The commit that was measured and its command, which may have another path today."""
    return f"commit {result['commit'][:12]} (at that commit: `{result['command']}`)"


def provenance(result: Result) -> str:
    """Names the source of a figure: one line below a table."""
    machine, versions = result["machine"], result["versions"]
    where: str = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    what = f"torch {versions['torch']}"
    what += f", CUDA {versions['cuda']}" if "cuda" in versions else ""
    return f"{where}, {what}; {measured_by(result)}.\n"


def verdict(reached: float, asked: float, is_least: bool) -> str:
    """Returns "yes" if a figure is as it was asked to be, else "no" in bold.

    Args:
        is_least: it must be `asked` or more, else at most that.
    """
    good = reached >= asked if is_least else reached <= asked
    return "yes" if good else "**no**"
