"""Text on the device that requests draft from: that of requests of the same namespace which have
ended, and a corpus for all.

Ended texts are in a ring of slots, each with a token and the tag of its namespace. A text takes one
slot more than it has tokens: the last one has no tag, so whoever walks from slot to slot stops
between texts. New texts overwrite the oldest slots, and the slot before the oldest one is then the
end of the newest text. The corpus never changes.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
import torch

from sglang.srt.device_copies import overwrite, to_device
from sglang.srt.mem_cache.base_prefix_cache import Namespace
from sglang.srt.speculative.ngram_texts import NOT_A_TOKEN
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import EndedText, NewRow

NO_TAG = 0  # of slots that no text has, or that end one


class NgramMemory:
    """The last texts, of all namespaces together.

    Aborted requests leave nothing, as in the prefix cache, nor do retracted ones until they end.
    Of a text, what was a cached prefix is left out: whoever has the same prefix has it in its own
    row, and it is part of an earlier text, unless that is still running or was aborted.

    Attributes:
        capacity: C, slots.
        tokens: [C] int32.
        tags: [C] int64; NO_TAG between texts.
        head: [1] int64; the oldest slot, which is overwritten next.
        row_tags: [N] int64; of the requests in the rows of the token table.
        corpus: [K] int32; texts that all may draft from, NOT_A_TOKEN after each. K may be 0.

    Args:
        state: whose ended texts are kept.
        capacity: at least 2.
        corpus: see `joined_texts`; None: there is none.
    """

    def __init__(self, state: RequestRows, capacity: int, corpus: np.ndarray | None = None) -> None:
        self._state = state
        device = state.tokens.device
        self.capacity = capacity
        self.tokens = torch.full((capacity,), NOT_A_TOKEN, dtype=torch.int32, device=device)
        self.tags = torch.full((capacity,), NO_TAG, dtype=torch.int64, device=device)
        self.head = torch.zeros(1, dtype=torch.int64, device=device)
        self.row_tags = torch.full((len(state.tokens),), NO_TAG, dtype=torch.int64, device=device)
        given = np.empty(0, dtype=np.int32) if corpus is None else corpus
        self.corpus = to_device(given, device, torch.int32)
        self._host_head = 0
        self._key = secrets.token_bytes(16)
        state.on_end.append(self.append)

    def tag_of(self, namespace: Namespace) -> int:
        """A number that stands for a namespace, 1 at least. It is a keyed hash of 62 bits, so that
        nothing has to be remembered of namespaces that come and go; no one who does not know the
        key can name two that share one."""
        text = repr(namespace).encode()
        digest = hashlib.blake2b(text, digest_size=8, key=self._key).digest()
        return 1 + (int.from_bytes(digest) >> 2)

    def admit(self, new_rows: list[NewRow]) -> None:
        """Requests that have just got a row."""
        if not new_rows:
            return
        pairs = [(new.row, self.tag_of(new.namespace)) for new in new_rows]
        rows, tags = to_device(pairs, self.row_tags.device, torch.int64).T
        self.row_tags[rows] = tags

    def append(self, texts: list[EndedText]) -> None:
        """Copies texts from the token table; of one that is too long, its end."""
        for text in texts:
            start = max(text.start, text.end - (self.capacity - 1))
            if start < text.end:
                self._append(text.row, start, text.end, self.tag_of(text.namespace))
        overwrite(self.head, [self._host_head])

    def _append(self, row: int, start: int, end: int, tag: int) -> None:
        while start < end:
            count = min(end - start, self.capacity - self._host_head)
            slots = slice(self._host_head, self._host_head + count)
            self.tokens[slots] = self._state.tokens[row, start : start + count]
            self.tags[slots] = tag
            start += count
            self._host_head = (self._host_head + count) % self.capacity
        gap = slice(self._host_head, self._host_head + 1)  # writing to one index waits for the GPU
        self.tokens[gap] = NOT_A_TOKEN
        self.tags[gap] = NO_TAG
        self._host_head = (self._host_head + 1) % self.capacity
