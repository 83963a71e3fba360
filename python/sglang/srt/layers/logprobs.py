"""Log-probabilities of tokens: of those drawn, of prompts, of the best and of chosen ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.srt.device_copies import to_device

MAX_ROWS_AT_ONCE = 256  # bounds the memory of a long prompt's logits: rows x vocabulary


@dataclass(frozen=True, slots=True)
class LogprobQueries:
    """What is wanted at Q positions.

    Attributes:
        top_num: best tokens, the most that any position wants.
        token_ids: Q lists of ids wanted there.
    """

    top_num: int
    token_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Answers at Q positions, on the device.

    Attributes:
        target: [Q] float32; of the token there.
        top_values, top_ids: [Q, top_num]; best first.
        chosen: [Q, E] float32; of `LogprobQueries.token_ids`, E the longest list.
    """

    target: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor
    chosen: torch.Tensor

    def read(self) -> HostLogprobs:
        return HostLogprobs(
            self.target.tolist(),
            self.top_values.tolist(),
            self.top_ids.tolist(),
            self.chosen.tolist(),
        )


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """`LogprobTensors`, read."""

    target: list[float]
    top_values: list[list[float]]
    top_ids: list[list[int]]
    chosen: list[list[float]]


def query_logprobs(
    logprobs: torch.Tensor, targets: torch.Tensor, queries: LogprobQueries
) -> LogprobTensors:
    """Looks up logprobs [Q, V] float32 at targets [Q] int64 and at what the queries ask."""
    top = logprobs.topk(queries.top_num, dim=-1)
    width = max(map(len, queries.token_ids), default=0)
    padded = [ids + [0] * (width - len(ids)) for ids in queries.token_ids]
    ids = to_device(padded, logprobs.device, torch.int64)
    return LogprobTensors(
        target=logprobs.gather(1, targets[:, None]).squeeze(1),
        top_values=top.values,
        top_ids=top.indices,
        chosen=logprobs.gather(1, ids.view(len(padded), width)),
    )


def query_prompt_logprobs(
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    targets: list[int],
    queries: LogprobQueries,
) -> LogprobTensors:
    """Log-softmax of the model's own logits at Q prompt rows, a few rows at a time.

    Args:
        hidden: [Q, hidden_size].
        targets: the Q tokens that follow.
    """
    parts = []
    for start in range(0, len(targets), MAX_ROWS_AT_ONCE):
        end = start + MAX_ROWS_AT_ONCE
        logprobs = torch.log_softmax(compute_logits(hidden[start:end]).float(), dim=-1)
        wanted = to_device(targets[start:end], hidden.device)
        part = LogprobQueries(queries.top_num, queries.token_ids[start:end])
        parts.append(query_logprobs(logprobs, wanted, part))
    width = max(part.chosen.shape[1] for part in parts)
    pad = torch.nn.functional.pad
    return LogprobTensors(
        target=torch.cat([part.target for part in parts]),
        top_values=torch.cat([part.top_values for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        chosen=torch.cat([pad(p.chosen, (0, width - p.chosen.shape[1])) for p in parts]),
    )
