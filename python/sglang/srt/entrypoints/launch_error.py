"""The error of a start that cannot be."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """The processes cannot start; the message is one line for the user."""
