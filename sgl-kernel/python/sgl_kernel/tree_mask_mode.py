"""The ways in which `build_tree_kernel_efficient` writes the mask of a tree."""

from __future__ import annotations

import enum


class TreeMaskMode(enum.IntEnum):
    """The mask of R trees of W nodes; row i of a tree sees itself, the nodes on its path, and the
    root.

    Attributes:
        FULL_MASK: bool; one block [W, L + W] per request, one after the other. The first L columns,
            the request's prefix, are the caller's: nothing writes them.
        QLEN_ONLY: bool [R, W, W].
        QLEN_ONLY_BITPACKING: uint8 [R, W, B], B = 1, 2 or 4 bytes for W up to 8, 16 or 32; bit j of
            a row, from the lowest bit of its first byte on, is node j.
    """

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


def packed_row_bytes(num_nodes: int) -> int:
    """Bytes of a row of QLEN_ONLY_BITPACKING."""
    return 1 if num_nodes <= 8 else 2 if num_nodes <= 16 else 4
