"""The part of a model that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Cut(NamedTuple):
    """The part of a weight that a rank holds: `size` of the `whole` entries of a dimension."""

    dim: int
    start: int
    size: int
    whole: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's place among those that hold a model together, each a part of every large weight."""

    rank: int = 0
    num_ranks: int = 1

    @property
    def is_whole(self) -> bool:
        """Tells whether one rank holds all."""
        return self.num_ranks == 1

    def cut(self, dim: int, whole: int) -> Cut:
        """This rank's part of a dimension. All parts have the same size, but for the last ones if
        the ranks do not divide it."""
        most = -(-whole // self.num_ranks)
        start = min(self.rank * most, whole)
        return Cut(dim, start, min(most, whole - start), whole)

    def part(self, whole: int) -> int:
        """The size of this rank's part of what the ranks divide."""
        assert whole % self.num_ranks == 0, "See `check_ranks`."
        return whole // self.num_ranks


WHOLE = Shard()
