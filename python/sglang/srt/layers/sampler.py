"""Chooses the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sgl_kernel import SamplingRows
from sgl_kernel.reference import kept_tokens
from sglang.srt.device_copies import to_device
from sglang.srt.layers.logprobs import (
    MAX_KEPT,
    KnownTokens,
    LogprobQueries,
    LogprobTensors,
    query_logprobs,
)
from sglang.srt.layers.sampling_ops import sampling_ops

# Number of logits that `Sampler.probs` sorts at once: each takes some 30 bytes of further memory.
MAX_SORTED_LOGITS = 1 << 22


def in_aligned_float32(logits: torch.Tensor) -> torch.Tensor:
    """Copies logits [S, V] to float32, each row at a multiple of 16 bytes: how kernels cut a row
    into parts, and so the order of their sums, then depends on V alone."""
    rows, size = logits.shape
    room = logits.new_empty((rows, -(-size // 4) * 4), dtype=torch.float32)
    return room[:, :size].copy_(logits)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens drawn from S rows of logits.

    Attributes:
        tokens: [S] int64.
        logprobs: [S] float32; in the distribution of all tokens that may be emitted, at the row's
            temperature (1 for greedy rows), before the filters.
        known: tokens that other log-probabilities are computed from; None: those drawn.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    known: KnownTokens | None = None

    def at(self, index: torch.Tensor) -> ScoredTokens:
        """Those of some rows, [Q] int64."""
        known = None if self.known is None else self.known.at(index)
        return ScoredTokens(self.tokens[index], self.logprobs[index], known)


class Sampler:
    """Draws tokens, never a banned one.

    The noise of a token depends on (seed, position, token) alone, so the drawn token does not
    depend on the batch, on overlap or on an earlier retraction.

    Attributes:
        banned: [B] int64; ids that are never drawn; None: there are none.
    """

    def __init__(self, device: torch.device, banned_ids: Sequence[int]) -> None:
        self.banned = to_device(banned_ids, device, torch.int64) if banned_ids else None
        self._ops = sampling_ops(device)

    def sample(self, logits: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
        """Draws one token per row.

        Args:
            logits: [S, V].
            rows: None where all rows are greedy.

        Returns:
            [S] int64.
        """
        if rows is None:
            return self._ops.argmax(logits, self.banned)
        return self.sample_scored(logits, rows).tokens

    def sample_scored(
        self, logits: torch.Tensor, rows: SamplingRows | None, as_in_prompts: bool = False
    ) -> ScoredTokens:
        """Returns the tokens of `sample` with their log-probabilities. Arguments as there.

        Args:
            as_in_prompts: with the bits of `query_prompt_logprobs` at temperatures 0 and 1, which
                reads the logits once more.
        """
        if rows is None:
            tokens, _, logprobs = self._ops.argmax_logprob(logits, self.banned)
            return ScoredTokens(tokens, logprobs)
        tokens, logprobs = self._ops.sample_tokens(logits, rows, self.banned)
        drawn = ScoredTokens(tokens, logprobs)
        return self._as_in_prompts(logits, rows, drawn) if as_in_prompts else drawn

    def _as_in_prompts(
        self, logits: torch.Tensor, rows: SamplingRows, drawn: ScoredTokens
    ) -> ScoredTokens:
        """Returns the same tokens. Log-probabilities of rows at temperatures 0 and 1 are computed
        from the row's best token, as those of prompts are."""
        _, best, of_best = self._ops.argmax_logprob(logits, self.banned)
        known, is_own = _known(logits, rows.temperature, drawn), rows.temperature == 1
        is_own |= rows.temperature == 0
        known = replace(
            known,
            logits=torch.where(is_own, best, known.logits),
            logprobs=torch.where(is_own, of_best, known.logprobs),
        )
        return self.score(logits, rows, replace(drawn, known=known), drawn.tokens)

    def probs(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Returns the distributions that `sample` draws from: at each row's temperature, over the
        tokens that its filters keep. Sorts all rows, which takes longer than drawing from them.

        Args:
            logits: [S, V].
            rows: greedy rows get the distribution that their filters keep at temperature 1.

        Returns:
            [S, V] float32; each row sums up to 1.
        """
        most = max(MAX_SORTED_LOGITS // logits.shape[1], 1)
        probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        for start in range(0, len(logits), most):
            end = start + most
            part = SamplingRows(*(values[start:end] for values in rows))
            self._write_probs(probs[start:end], logits[start:end], part)
        return probs

    def _write_probs(self, out: torch.Tensor, logits: torch.Tensor, rows: SamplingRows) -> None:
        logits = self._without_banned(logits.float())
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        divisor = torch.where(rows.temperature > 0, rows.temperature, 1.0)
        probs = torch.softmax(ordered / divisor[:, None], dim=-1)
        kept = torch.where(kept_tokens(probs, rows), probs, 0.0)
        out.scatter_(1, order, kept / kept.sum(-1, keepdim=True))

    def score(
        self,
        logits: torch.Tensor,
        rows: SamplingRows | None,
        drawn: ScoredTokens,
        tokens: torch.Tensor,
    ) -> ScoredTokens:
        """Returns the log-probabilities of other tokens than those drawn.

        Args:
            logits: [S, V]; what `drawn` was drawn from, with `rows`.
            tokens: [S] int64.
        """
        known = _known(logits, None if rows is None else rows.temperature, drawn)
        logprobs = known.logprobs_of(logits.gather(1, tokens[:, None])).squeeze(1)
        return ScoredTokens(tokens, logprobs, known)

    def query(
        self,
        logits: torch.Tensor,
        rows: SamplingRows | None,
        drawn: ScoredTokens,
        queries: LogprobQueries,
        wanted: torch.Tensor | None,
    ) -> LogprobTensors:
        """Returns log-probabilities in the distribution that tokens were drawn from, before the
        filters. Where the kept tokens are wanted, the drawn token's log-probability is that among
        the kept ones.

        Args:
            logits: [S, V]; what `drawn` was drawn from, with `rows`.
            wanted: [Q] int64; the rows of the `queries`; None for all, in order.
        """
        places = [place for place, is_wanted in enumerate(queries.kept) if is_wanted]
        if wanted is not None:
            drawn = drawn.at(wanted)
            rows = None if rows is None else SamplingRows(*(values[wanted] for values in rows))
        if not queries.has_more and not places:
            return LogprobTensors.of_targets(drawn.logprobs)
        if wanted is not None:
            logits = logits[wanted]
        answers = LogprobTensors.of_targets(drawn.logprobs)
        if queries.has_more:
            known = _known(logits, None if rows is None else rows.temperature, drawn)
            allowed = self._without_banned(logits)
            answers = query_logprobs(allowed, drawn.tokens, known, queries)
        return self._among_kept(answers, logits, rows, drawn, places) if places else answers

    def _among_kept(
        self,
        answers: LogprobTensors,
        logits: torch.Tensor,
        rows: SamplingRows | None,
        drawn: ScoredTokens,
        places: list[int],
    ) -> LogprobTensors:
        """Adds to the answers the tokens that filters keep at some of the Q places. The drawn token
        is always among them, even if it is an accepted draft that the filters would not keep; in
        greedy rows it is the only one. Arguments as in `query`, for the Q places."""
        index = to_device(places, logits.device, torch.int64)
        logits, drawn = logits[index], drawn.at(index)
        is_kept = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        if rows is not None:
            rows = SamplingRows(*(values[index] for values in rows))
            is_kept = (self.probs(logits, rows) > 0) & (rows.temperature > 0)[:, None]
        is_kept.scatter_(1, drawn.tokens[:, None], True)
        known = _known(logits, None if rows is None else rows.temperature, drawn)
        logprobs = known.logprobs_of(logits).masked_fill_(~is_kept, -torch.inf)
        best = logprobs.topk(min(MAX_KEPT, logits.shape[1]), dim=-1)
        num_all = len(answers.target)
        kept_ids = best.indices.new_zeros((num_all, best.indices.shape[1]), dtype=torch.int32)
        num_kept = kept_ids.new_zeros(num_all)
        return replace(
            answers,
            target=answers.target.index_add(0, index, -logprobs.logsumexp(-1)),
            kept_ids=kept_ids.index_copy(0, index, best.indices.int()),
            num_kept=num_kept.index_copy(0, index, is_kept.sum(-1, dtype=torch.int32)),
        )

    def _without_banned(self, logits: torch.Tensor) -> torch.Tensor:
        if self.banned is None:
            return logits
        return logits.index_fill(1, self.banned, float("-inf"))


def _known(
    logits: torch.Tensor, temperature: torch.Tensor | None, drawn: ScoredTokens
) -> KnownTokens:
    """Returns `ScoredTokens.known`; logits [S, V], temperature [S] float32, None where all rows are
    greedy."""
    if drawn.known is not None:
        return drawn.known
    of_drawn = logits.gather(1, drawn.tokens[:, None]).squeeze(1).float()
    scale = None
    if temperature is not None:
        scale = 1 / torch.where(temperature == 0, 1.0, temperature)
    return KnownTokens(of_drawn, drawn.logprobs, scale)
