"""Names of the algorithms, and how much may be drafted."""

from __future__ import annotations

from enum import StrEnum


class SpeculativeAlgorithm(StrEnum):
    """Names what makes drafts: `--speculative-algorithm`. The flags and the options of each are in
    `ALGORITHMS` (`processes/speculation_flags.py`)."""

    EAGLE = "EAGLE"
    EAGLE3 = "EAGLE3"
    NEXTN = "NEXTN"  # a layer of the model itself, if no head is named
    DFLASH = "DFLASH"
    STANDALONE = "STANDALONE"
    NGRAM = "NGRAM"  # drafts from earlier text and has no draft model

    @classmethod
    def from_string(cls, name: str) -> SpeculativeAlgorithm:
        """Reads a name, in any case.

        Raises:
            ValueError: for an algorithm that this runtime does not have; the text says which it
                has.
        """
        try:
            return cls(name.upper())
        except ValueError:
            *others, last = cls
            known = f"{', '.join(others)} and {last}"
            raise ValueError(
                f"--speculative-algorithm {name} is unknown; there are {known}."
            ) from None


NGRAM = SpeculativeAlgorithm.NGRAM
