"""Chooses the number of programs among which the KV of a step's items is split, where a GPU runs
one program of an item and a KV head on each multiprocessor at a time."""

from __future__ import annotations

from collections.abc import Sequence

MAX_SPLITS = 8  # of the KV of an item
MAX_ROUNDS = 2  # programs of splits for each multiprocessor; memory is reserved for them
# Times on an H100, in tiles of KV: of a program beside its tiles; of leaving and adding up splits;
# of each program's part in adding up.
PROGRAM_TILES, SUM_TILES, SUM_TILES_OF_A_PROGRAM = 1.0, 2.0, 1 / 32


def choose_splits(
    tiles: Sequence[int],
    num_kv_heads: int,
    num_multiprocessors: int,
    max_splits: int = MAX_SPLITS,
) -> int:
    """Returns the number of splits with which a step's items should end earliest.

    Args:
        tiles: of KV that each item sees.
    """
    most = MAX_ROUNDS * num_multiprocessors // max(len(tiles) * num_kv_heads, 1)
    choices = range(1, max(1, min(most, max_splits)) + 1)
    return min(choices, key=lambda n: _tiles_until_end(tiles, num_kv_heads, num_multiprocessors, n))


def _tiles_until_end(
    tiles: Sequence[int], num_kv_heads: int, num_multiprocessors: int, num_splits: int
) -> float:
    """Estimates the time until the last multiprocessor ends, in tiles: programs of one length run
    in rounds, and no multiprocessor ends before its longest program."""
    longest = -(-max(tiles, default=0) // num_splits)
    mean = sum(tiles) / max(len(tiles), 1) / num_splits
    num_programs = len(tiles) * num_kv_heads * num_splits
    rounds = -(-num_programs // num_multiprocessors)
    end = max(longest + PROGRAM_TILES, rounds * (mean + PROGRAM_TILES))
    sums = SUM_TILES + SUM_TILES_OF_A_PROGRAM * num_programs
    return end + (sums if num_splits > 1 else 0)
