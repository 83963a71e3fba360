"""The algorithm that has no draft model, and how much may be drafted. Those with one: `ALGORITHMS`
in `processes/draft_algorithms.py`."""

from __future__ import annotations

NGRAM = "NGRAM"  # drafts from earlier text and has no draft model
MAX_NUM_STEPS = 63  # tokens drafted one after the other
