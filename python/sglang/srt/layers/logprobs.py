"""Log-probabilities of drawn tokens, of prompts, of the best tokens and of chosen ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.sampling_ops import sampling_ops

MAX_KEPT = 16_384  # limit of kept tokens returned at a position
MAX_ROWS_AT_ONCE = 256  # bounds the memory of a long prompt's logits: rows x vocabulary


@dataclass(frozen=True, slots=True)
class LogprobQueries:
    """The log-probabilities that are wanted at Q positions.

    Attributes:
        top_num: number of best tokens, the most that any position wants.
        token_ids: Q lists of ids wanted there.
        kept: Q flags: the tokens that the filters keep are wanted, and the log-probability of the
            position's token among them. Empty if no position wants them.
    """

    top_num: int
    token_ids: list[list[int]]
    kept: list[bool] = field(default_factory=list)

    @property
    def has_more(self) -> bool:
        """Tells whether more is wanted than the positions' own tokens."""
        return self.top_num > 0 or any(self.token_ids)


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Answers at Q positions, on the device.

    Attributes:
        target: [Q] float32; of the position's token.
        top_values, top_ids: [Q, top_num]; best first.
        chosen: [Q, E] float32; of `LogprobQueries.token_ids`, E the longest list.
        kept_ids: [Q, K] int32; the first `num_kept` of a row are tokens that the filters keep, best
            first, K of them at most.
        num_kept: [Q] int32; [0] if not wanted.
    """

    target: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor
    chosen: torch.Tensor
    kept_ids: torch.Tensor
    num_kept: torch.Tensor

    @classmethod
    def of_targets(cls, target: torch.Tensor) -> LogprobTensors:
        """Makes answers that have only the positions' own tokens."""
        nothing = target.new_empty((len(target), 0))
        no_ids = nothing.int()
        return cls(target, nothing, nothing.long(), nothing, no_ids, no_ids.new_empty(0))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns all tensors, in the order of `HostLogprobs`."""
        values = (self.target, self.top_values, self.top_ids, self.chosen)
        return (*values, self.kept_ids, self.num_kept)


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """`LogprobTensors`, on the host.

    Attributes:
        kept: bytes of int32 ids; None: there are more than the device returned.
    """

    target: list[float]
    top_values: list[list[float]]
    top_ids: list[list[int]]
    chosen: list[list[float]]
    kept: list[bytes | None]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> HostLogprobs | None:
        """Reads copies of `LogprobTensors.tensors`; None if there are none."""
        if not tensors:
            return None
        *values, kept_ids, num_kept = tensors
        target, top_values, top_ids, chosen = (tensor.tolist() for tensor in values)
        kept: list[bytes | None] = [b""] * len(target)
        if len(num_kept):
            kept = [
                row[:count].tobytes() if count <= len(row) else None
                for row, count in zip(kept_ids.numpy(), num_kept.tolist(), strict=True)
            ]
        return cls(target, top_values, top_ids, chosen, kept)


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """One token, with known log-probability, for each of Q rows of logits. Log-probabilities of
    other tokens differ from it by the difference of logits, so no sum over the vocabulary is
    needed.

    Attributes:
        logits, logprobs: [Q] float32.
        scale: [Q] float32; one over the temperature of the distribution; None for 1.
    """

    logits: torch.Tensor
    logprobs: torch.Tensor
    scale: torch.Tensor | None = None

    def at(self, index: torch.Tensor) -> KnownTokens:
        """Those of some rows, [S] int64."""
        scale = None if self.scale is None else self.scale[index]
        return KnownTokens(self.logits[index], self.logprobs[index], scale)

    def logprobs_of(self, logits: torch.Tensor) -> torch.Tensor:
        """[Q, E] float32, of tokens with these logits [Q, E]."""
        distance = logits.float() - self.logits[:, None]
        if self.scale is not None:
            distance *= self.scale[:, None]
        return distance + self.logprobs[:, None]


def query_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    known: KnownTokens,
    queries: LogprobQueries,
) -> LogprobTensors:
    """Answers the queries from logits [Q, V] at Q positions, and the targets [Q] int64 there."""
    target = known.logprobs_of(logits.gather(1, targets[:, None])).squeeze(1)
    answers = LogprobTensors.of_targets(target)
    if queries.top_num:
        top = logits.topk(queries.top_num, dim=-1)
        answers = replace(answers, top_values=known.logprobs_of(top.values), top_ids=top.indices)
    if any(queries.token_ids):
        ids = _padded(queries.token_ids, logits.device)
        answers = replace(answers, chosen=known.logprobs_of(logits.gather(1, ids)))
    return answers


def _padded(token_ids: list[list[int]], device: torch.device) -> torch.Tensor:
    """[Q, E] int64: Q lists, filled up with 0. Positions of one request share a list, which goes to
    the device once."""
    distinct = {id(ids): ids for ids in token_ids}
    width = max(map(len, distinct.values()))
    padded = [ids + [0] * (width - len(ids)) for ids in distinct.values()]
    place = {key: index for index, key in enumerate(distinct)}
    index = [place[id(ids)] for ids in token_ids]
    return to_device(padded, device, torch.int64)[to_device(index, device, torch.int64)]


def query_prompt_logprobs(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    targets: list[int],
    queries: LogprobQueries,
    banned: torch.Tensor | None = None,
) -> LogprobTensors:
    """Answers the queries at Q prompt rows by log-softmax of the model's own logits, a few rows at
    a time.

    Args:
        hidden: [T, hidden_size].
        rows: [Q] int64; which of the T.
        targets: the Q tokens that follow.
        banned: [B] int64; ids that are never emitted: their log-probability is -inf.
    """
    argmax_logprob = sampling_ops(hidden.device).argmax_logprob
    parts = []
    for start in range(0, len(targets), MAX_ROWS_AT_ONCE):
        end = start + MAX_ROWS_AT_ONCE
        logits = compute_logits(hidden[rows[start:end]])
        wanted = to_device(targets[start:end], hidden.device)
        _, best, of_best = argmax_logprob(logits, banned)
        part = LogprobQueries(queries.top_num, queries.token_ids[start:end])
        if banned is not None:
            logits = logits.index_fill(1, banned, -torch.inf)
        parts.append(query_logprobs(logits, wanted, KnownTokens(best, of_best), part))
    width = max(part.chosen.shape[1] for part in parts)
    pad = torch.nn.functional.pad
    return replace(
        LogprobTensors.of_targets(torch.cat([part.target for part in parts])),
        top_values=torch.cat([part.top_values for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        chosen=torch.cat([pad(p.chosen, (0, width - p.chosen.shape[1])) for p in parts]),
    )
