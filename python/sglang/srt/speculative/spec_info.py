"""Names of `--speculative-algorithm` that SGLang has and this runtime does not, and how much may be
drafted. Those that there are: `ALGORITHMS` in `processes/draft_algorithms.py`."""

from __future__ import annotations

NOT_BUILT = ("NEXTN", "DFLASH", "DSPARK")
NGRAM = "NGRAM"  # drafts from earlier text and has no draft model
MAX_NUM_STEPS = 63  # tokens drafted one behind the other
