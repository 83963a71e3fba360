"""Choosing the next token from logits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

import sgl_kernel
import sgl_kernel.reference
from sglang.srt.device_copies import to_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the S rows to sample, on the device.

    Attributes:
        temperature: [S] float32; greedy rows hold 0.
        top_p, min_p: [S] float32.
        top_k: [S] int64; the vocabulary size where all tokens are kept.
        seeds: [S] int64.
        positions: [S] int64; index in the sequence of the token that is drawn.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    def scale(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] divided by each row's temperature; greedy rows stay as they are."""
        return logits / torch.where(self.temperature == 0, 1.0, self.temperature)[:, None]


@dataclass(frozen=True, slots=True)
class BestTokens:
    """The most likely token of each row.

    Attributes:
        tokens: [S] int64.
        probs: [S] float32; its probability at temperature 1.
    """

    tokens: torch.Tensor
    probs: torch.Tensor


class Sampler:
    """Draws tokens, never a banned one.

    The noise of a row depends on (seed, position) alone, so a token does not depend on the batch,
    on overlap or on an earlier retraction. Where the kernels of `sgl_kernel` cannot be had for a
    GPU, its torch references do the same, slower.
    """

    def __init__(self, device: torch.device, banned_ids: Sequence[int]) -> None:
        self._banned = to_device(banned_ids, device, torch.int64) if banned_ids else None
        self._ops: ModuleType = sgl_kernel
        if device.type != "cpu":
            try:
                sgl_kernel.warm_up(device)
            except sgl_kernel.KernelUnavailableError as error:
                logger.warning("Tokens are sampled by torch, which is slower: %s", error)
                self._ops = sgl_kernel.reference

    def sample(self, logits: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
        """Draws one token per row.

        Args:
            logits: [S, V].
            rows: None where all rows are greedy.

        Returns:
            [S] int64.
        """
        if rows is None:
            return self._ops.argmax(logits, self._banned)
        return self._ops.sample_tokens(
            logits,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.seeds,
            rows.positions,
            self._banned,
        )

    def best(self, logits: torch.Tensor) -> BestTokens:
        """The best token of each row of logits [S, V]."""
        tokens, best, logsumexp = self._ops.argmax_logsumexp(logits, self._banned)
        return BestTokens(tokens, torch.exp(best - logsumexp))

    def logprobs(self, logits: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
        """[S, V] float32: of the distribution that tokens are drawn from, before top-k, top-p and
        min-p."""
        logits = logits.float()
        if rows is not None:
            logits = rows.scale(logits)
        if self._banned is not None:
            logits = logits.index_fill(1, self._banned, float("-inf"))
        return torch.log_softmax(logits, dim=-1)
