"""Says how many rows steps and requests may have. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# Of steps whose rows the device divides.
MAX_REQUESTS = 512
MAX_DRAFTS = 64


@dataclass(frozen=True, slots=True)
class StepWidth:
    """Rows that one step of a request may take, known before its result.

    Attributes:
        decode_rows: slots that a decode step needs beyond the watermark: for the rows that it
            feeds, and for those that a drafter's own steps feed after the kept rows.
        lookahead_rows: slots that it needs after the last prompt chunk.
        max_kept: tokens by which a decode step may move the watermark, at most.
    """

    decode_rows: int
    lookahead_rows: int
    max_kept: int


PLAIN_WIDTH = StepWidth(decode_rows=1, lookahead_rows=0, max_kept=1)
