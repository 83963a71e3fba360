"""What `--speculative-algorithm` may name, as in SGLang, and how much may be drafted."""

from __future__ import annotations

from sglang.srt.head_config import EAGLE, EAGLE3

# Algorithm: the architecture of its draft model, in `HEADS` (registry.py).
HEAD_OF_ALGORITHM = {"EAGLE": EAGLE, "EAGLE3": EAGLE3}
# SGLang has these too.
NOT_BUILT = ("STANDALONE", "NEXTN", "DFLASH", "DSPARK")
NGRAM = "NGRAM"  # drafts from earlier text and has no draft model
MAX_NUM_STEPS = 63  # tokens drafted one behind the other


def head_architecture(algorithm: str) -> str:
    """The draft model's architecture.

    Args:
        algorithm: in any case.

    Raises:
        ValueError: for an algorithm that this runtime does not have; the text says which it has.
    """
    name = algorithm.upper()
    if name in HEAD_OF_ALGORITHM:
        return HEAD_OF_ALGORITHM[name]
    known = f"{', '.join(HEAD_OF_ALGORITHM)} and {NGRAM}"
    what = "is not built yet" if name in NOT_BUILT else "is unknown"
    raise ValueError(f"--speculative-algorithm {algorithm} {what}; there are {known}.")
