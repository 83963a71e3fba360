"""Says how many KV slots the pool gets, and how many a request may have: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


def row_width(context_len: int, max_decode_rows: int, page_size: int) -> int:
    """Returns the columns of a row of the request-to-token table, in whole pages. When a request
    reaches the end of its context, two of the widest decode steps may be in flight, and drafts for
    a third one are written after the rows that those keep."""
    num_tokens = context_len + 3 * max_decode_rows
    return -(-num_tokens // page_size) * page_size


@dataclass(frozen=True, kw_only=True)
class KVSizing:
    """The limits that decide the size of the pool.

    Attributes:
        available_bytes: memory that the pool may take.
        bytes_per_token: K and V of one token in all layers.
        wished_tokens: `--max-total-tokens`, if given.
        max_useful_tokens: tokens of all running requests at full context; more are never used.
    """

    available_bytes: int
    bytes_per_token: int
    page_size: int
    wished_tokens: int | None
    max_useful_tokens: int

    @property
    def affordable_tokens(self) -> int:
        """Tokens that the memory holds."""
        return self.available_bytes // self.bytes_per_token

    @property
    def reason(self) -> str:
        """Explains the size of the pool to a reader of the start-up summary."""
        if self.wished_tokens is not None:
            return "as --max-total-tokens says"
        if self.affordable_tokens > self.max_useful_tokens:
            return "all that --max-running-requests can use"
        return f"what fits into the {self.available_bytes >> 20} MiB left (--mem-fraction-static)"

    def num_pages(self) -> int:
        """Pages of the pool.

        Raises:
            ValueError: if not even one page fits, or fewer than `wished_tokens`.
        """
        affordable, wished = self.affordable_tokens, self.wished_tokens
        tokens = min(affordable, self.max_useful_tokens if wished is None else wished)
        if tokens < self.page_size:
            raise ValueError(
                f"The KV pool has no room for one page of {self.page_size} tokens"
                f" ({self.bytes_per_token} bytes each, {self._room}); raise --max-total-tokens or"
                " --mem-fraction-static, or lower --page-size."
            )
        if wished is not None and wished > affordable:
            raise ValueError(
                f"--max-total-tokens {wished} needs {wished * self.bytes_per_token >> 20} MiB for"
                f" the KV pool ({self._room}); lower it or raise --mem-fraction-static."
            )
        return tokens // self.page_size

    @property
    def _room(self) -> str:
        if self.available_bytes < 0:
            return f"{-self.available_bytes >> 20} MiB more are in use than it may take"
        return f"{self.available_bytes >> 20} MiB may be used"
