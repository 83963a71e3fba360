"""Workers without a model, which feed and accept as the real ones do, and an oracle for them.

The token after a prefix is a hash of the whole prefix, read back from the slots that the page
table names. A slot that was freed too early, given to two requests, cached under the wrong tokens
or read past the watermark changes every token after it, so comparing with `oracle` checks the
whole bookkeeping of KV.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.step_sizes import PLAIN_WIDTH, StepWidth
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch

VOCAB_SIZE = 61
MASK = VOCAB_SIZE  # fed by look-ahead rows; never a token
_MODULUS = (1 << 61) - 1


def next_token(prefix: list[int]) -> int:
    """The only right token after `prefix`."""
    value = 7
    for token in prefix:
        value = (value * 1_000_003 + token + 1) % _MODULUS
    return (value ^ value >> 17) % VOCAB_SIZE


def oracle(prompt: list[int], num_tokens: int) -> list[int]:
    """Returns the tokens that every worker here must generate, however it is scheduled."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeResult(GenerationBatchResult):
    """Knows when the host has read it: until then the step counts as running on the device."""

    __slots__ = ("rows", "unread")

    @property
    def is_ready(self) -> bool:
        return False

    def read(self) -> HostResult:
        self.unread.remove(self.rows)
        return GenerationBatchResult.read(self)


@dataclass
class _Row:
    committed: int = 0
    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)


class FakeWorker:
    """One of three ways to decode.

    Args:
        kind: `plain` feeds one row; `verify` feeds the pending token and k drafts and accepts a
            random run of them, of a request that takes no drafts the token alone; `mtp` feeds its
            pending tokens and masks up to 2k-1 rows and accepts 1 to k predictions, from the last
            prompt chunk on.
        k: drafts, or predictions per step.
    """

    def __init__(self, kind: str, k: int, num_rows: int, seed: int) -> None:
        self._kind, self._k = kind, k
        self._random = random.Random(seed)
        self._rows = [_Row() for _ in range(num_rows)]
        self._table: dict[tuple[int, int], int] = {}
        self._kv: dict[int, int] = {}
        self._unread: list[list[int]] = []
        self._kv_weights: dict[int, int] = {}  # slot to the weights that computed it
        self.weights_version = 0
        self.max_rows_in_batch = 0
        self.num_shared_prefixes = 0

    def step_width(self, params: SamplingParams) -> StepWidth:
        if self._kind == "verify" and params.speculative.is_off:
            return PLAIN_WIDTH
        return {
            "plain": PLAIN_WIDTH,
            "verify": StepWidth(1 + self._k, 0, 1 + self._k),
            "mtp": StepWidth(2 * self._k - 1, self._k - 1, self._k),
        }[self._kind]

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        for row, column, slot in batch.table_writes.entries.T.tolist():
            assert slot > 0, "The dummy slot was given to a request."
            self._table[row, column] = slot
        for new in batch.new_rows:
            assert all(new.row not in rows for rows in self._unread), "A row in flight was re-used."
            self._rows[new.row] = _Row(new.num_committed, new.tokens.tolist())
            for position in range(new.num_committed):
                weights = self._kv_weights[self._table[new.row, position]]
                assert weights == self.weights_version, "KV of other weights was re-used."
        assert len(set(batch.rows)) == len(batch.rows)
        self._check_prefixes(batch)
        self.max_rows_in_batch = max(self.max_rows_in_batch, len(batch.rows))
        accepted, kept = [], []
        for request in batch.requests:
            row, num_prompt = self._rows[request.row], request.num_prompt_tokens
            prompt_tokens = row.tokens[row.committed : row.committed + num_prompt]
            assert len(prompt_tokens) == num_prompt, "More than the prompt has."
            assert row.committed <= request.kv_len_before
            tokens, num_kept = self._step(
                request.row, row, prompt_tokens, request.max_q_len, request.emits
            )
            row.committed += num_kept
            accepted.append(tokens)
            kept.append(num_kept)
        width = max(map(len, accepted)) or 1
        padded = [tokens + [-1] * (width - len(tokens)) for tokens in accepted]
        lens = [len(tokens) for tokens in accepted]
        result = FakeResult(torch.tensor(padded), torch.tensor(lens), torch.tensor(kept))
        object.__setattr__(result, "unread", self._unread)
        object.__setattr__(result, "rows", batch.rows)
        self._unread.append(batch.rows)
        return result

    def _check_prefixes(self, batch: ScheduleBatch) -> None:
        """Asserts that all requests of a shared prefix have KV in the same slots."""
        members = [each for prefix in batch.shared_prefixes for each in prefix.requests]
        assert len(set(members)) == len(members)
        for prefix in batch.shared_prefixes:
            self.num_shared_prefixes += 1
            assert [batch.rows[request] for request in prefix.requests] == list(prefix.rows)
            assert all(self._rows[row].committed >= prefix.num_tokens for row in prefix.rows)
            heads = {
                tuple(self._table[row, place] for place in range(prefix.num_tokens))
                for row in prefix.rows
            }
            assert len(heads) == 1, "Requests have KV in different slots."

    def observe(self, result: HostResult) -> None:
        pass

    def _step(
        self, index: int, row: _Row, prompt_tokens: list[int], q_len: int, emits: bool
    ) -> tuple[list[int], int]:
        """Accepted tokens and kept rows of one request."""
        certain = prompt_tokens or row.pending
        num_drafts = 0 if prompt_tokens or self._kind != "verify" else q_len - len(certain)
        drafts = self._drafts(index, row, certain, num_drafts) if num_drafts else []
        fed = certain + drafts
        fed += [MASK] * (q_len - len(fed))
        assert len(fed) == q_len
        for offset, token in enumerate(fed):
            slot = self._table[index, row.committed + offset]
            self._kv[slot] = token
            self._kv_weights[slot] = self.weights_version
        if not emits:
            return [], len(certain)
        num_right = 0
        while num_right < len(drafts) and drafts[num_right] == next_token(
            self._prefix(index, row.committed + len(certain) + num_right)
        ):
            num_right += 1
        num_kept = len(certain) + num_right
        prefix = self._prefix(index, row.committed + num_kept)
        new = oracle(prefix, self._random.randint(1, self._k) if self._kind == "mtp" else 1)
        row.pending = new
        return drafts[:num_right] + new, num_kept

    def _drafts(self, index: int, row: _Row, certain: list[int], count: int) -> list[int]:
        prefix = self._prefix(index, row.committed) + certain
        right = oracle(prefix, count)
        return [t if self._random.random() < 0.7 else (t + 1) % VOCAB_SIZE for t in right]

    def _prefix(self, index: int, length: int) -> list[int]:
        """Tokens whose KV the row's first slots hold."""
        return [self._kv[self._table[index, position]] for position in range(length)]
