"""Texts of token ids, side by side in one array. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

NOT_A_TOKEN = -1  # after each text


def joined_texts(texts: Iterable[Sequence[int]]) -> np.ndarray:
    """[K] int32; texts of token ids as `NgramMemory.corpus` has them."""
    parts = [np.array([*text, NOT_A_TOKEN], dtype=np.int32) for text in texts]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
