"""Text that comes bit by bit and may end in the middle of a marker."""

from __future__ import annotations


def num_held(text: str, marker: str) -> int:
    """Counts the last characters of a text that may be the beginning of a marker that is not in
    it."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
