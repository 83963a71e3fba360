"""Adjusts logits by the parameters of requests, before a token is drawn, by device row.

In this order: repetition, frequency and presence penalty over generated tokens, logit_bias, and
no stop token before min_new_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.sampling_ops import sampling_ops
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowAdjustments:
    """The adjustments that one request asks for.

    Attributes:
        output_ids: tokens that it generated before a retraction.
        num_prompt_tokens: length of its prompt, the position where its output begins.
        stop_token_ids: ids that cannot be drawn before min_new_tokens.
    """

    params: SamplingParams
    output_ids: list[int]
    num_prompt_tokens: int
    stop_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ExtraTokens:
    """Tokens that count as generated for one row of logits and are not recorded (yet).

    Attributes:
        tokens: [S, E] int64.
        counts: [S, E] int32; how many times each counts; 0: not at all.
    """

    tokens: torch.Tensor
    counts: torch.Tensor


class LogitAdjustments:
    """State per row of the request-to-token table; allocated when the first request needs it."""

    def __init__(self, num_rows: int, vocab_size: int, device: str) -> None:
        self._num_rows, self._vocab_size, self._device = num_rows, vocab_size, device
        self._ops = sampling_ops(torch.device(device))
        self._used_rows: set[int] = set()
        self._counts: torch.Tensor | None = None  # [num_rows, V] int32, of generated tokens
        # repetition, frequency, presence
        self._penalties = torch.tensor([[1.0, 0.0, 0.0]], device=device).repeat(num_rows, 1)
        self._bias = _SparseRows(num_rows, device)
        self._stops = _SparseRows(num_rows, device)
        self._first_stop = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def initialize(self, row: int, wanted: RowAdjustments | None) -> None:
        """Sets the state of a row that has just got a request. Call it for every request, since the
        row still has the state of the request before."""
        if wanted is None:
            if row in self._used_rows:
                self.initialize(row, RowAdjustments(SamplingParams(), [], 0, []))
                self._used_rows.remove(row)
            return
        self._used_rows.add(row)
        params = wanted.params
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._penalties[row] = to_device(penalties, self._device)
        self._set_counts(row, wanted.output_ids if params.has_penalties else None)
        bias = params.logit_bias or {}
        self._bias.set(row, [int(key) for key in bias], list(bias.values()))
        stops = wanted.stop_token_ids if params.min_new_tokens else []
        self._stops.set(row, stops, [float("-inf")] * len(stops))
        # fill_ takes the number along with its launch; an assignment would copy it and wait.
        self._first_stop[row].fill_(wanted.num_prompt_tokens + params.min_new_tokens)

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        extra: ExtraTokens | None = None,
    ) -> torch.Tensor:
        """Returns the adjusted logits; may overwrite `logits`.

        Args:
            logits: [S, V].
            rows: [S] int64.
            positions: [S] int64; index in the sequence of the token that is drawn.

        Returns:
            [S, V] float32.
        """
        if self._counts is None:
            logits = logits.float()
        else:
            extras = () if extra is None else (extra.tokens, extra.counts)
            logits = self._ops.penalize_logits(logits, self._counts, self._penalties, rows, *extras)
        self._bias.add_to(logits, rows)
        self._stops.add_to(logits, rows, positions < self._first_stop[rows])
        return logits

    def record(
        self, rows: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor | None = None
    ) -> None:
        """Counts generated tokens [S] int64 of rows [S] int64, once each or counts [S] int32 times;
        a row may have several."""
        if self._counts is not None:
            if counts is None:
                counts = torch.ones_like(tokens, dtype=torch.int32)
            places = rows * self._vocab_size + tokens
            self._counts.view(-1).scatter_add_(0, places, counts)

    def _set_counts(self, row: int, output_ids: list[int] | None) -> None:
        if self._counts is None:
            if output_ids is None:
                return
            shape = (self._num_rows, self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._counts[row] = 0
        if output_ids:
            tokens = to_device(output_ids, self._device)
            self._counts[row].scatter_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))


class _SparseRows:
    """A few (token, value) pairs per row, to be added to logits. Padded with (0, 0.0)."""

    def __init__(self, num_rows: int, device: str) -> None:
        self._ids = torch.zeros((num_rows, 0), dtype=torch.int64, device=device)
        self._values = torch.zeros((num_rows, 0), device=device)

    def set(self, row: int, ids: list[int], values: list[float]) -> None:
        """Replaces the pairs of a row; makes room for them."""
        lacking = len(ids) - self._ids.shape[1]
        if lacking > 0:
            self._ids = torch.nn.functional.pad(self._ids, (0, lacking))
            self._values = torch.nn.functional.pad(self._values, (0, lacking))
        self._ids[row] = 0
        self._values[row] = 0.0
        if ids:
            self._ids[row, : len(ids)] = to_device(ids, self._ids.device)
            self._values[row, : len(ids)] = to_device(values, self._ids.device)

    def add_to(
        self, logits: torch.Tensor, rows: torch.Tensor, where: torch.Tensor | None = None
    ) -> None:
        """Adds the pairs of `rows` [S] to logits [S, V], where `where` [S] holds."""
        if self._ids.shape[1] == 0:
            return
        values = self._values[rows]
        if where is not None:
            values = torch.where(where[:, None], values, 0.0)
        logits.scatter_add_(1, self._ids[rows], values)
