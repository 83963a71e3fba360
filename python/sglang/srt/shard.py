"""The part of a model that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Cut(NamedTuple):
    """The part of a weight that a rank holds: `size` of the `whole` entries of a dimension.

    Attributes:
        start: the first of them, if there are no `parts`.
        parts: sizes of what the dimension consists of, if the rank holds a part of each; empty: its
            entries follow each other.
    """

    dim: int
    start: int
    size: int
    whole: int
    parts: tuple[int, ...] = ()

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First entry and number of entries that the rank holds of each part, or of all."""
        found, before = list[tuple[int, int]](), 0
        for part in self.parts or (self.whole,):
            start, size = (part * each // self.whole for each in (self.start, self.size))
            found.append((before + start, size))
            before += part
        return found


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's place among those that hold a model together, each a part of every large weight."""

    rank: int = 0
    num_ranks: int = 1

    @property
    def is_whole(self) -> bool:
        """Tells whether one rank holds all."""
        return self.num_ranks == 1

    def cut(self, dim: int, whole: int, parts: tuple[int, ...] = ()) -> Cut:
        """This rank's part of a dimension. All parts have the same size, but for the last ones if
        the ranks do not divide it. Ranks must divide each of `parts`, see `Cut`."""
        most = -(-whole // self.num_ranks)
        start = min(self.rank * most, whole)
        return Cut(dim, start, min(most, whole - start), whole, parts)

    def part(self, whole: int) -> int:
        """The size of this rank's part of what the ranks divide."""
        assert whole % self.num_ranks == 0, "See `check_ranks`."
        return whole // self.num_ranks


WHOLE = Shard()
