"""A step whose tokens are restricted: it asks about its drafts, and shortens requests whose answer
is late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sglang.srt.device_copies import HostCopy, to_device, when_computed
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import NUM_PROMPT, READ_START, ROW, AcceptedTokens, RowLayout
from sglang.srt.step.token_constraint import AllowedTokens, DraftedTokens, TokenConstraint


class DraftedCopy:
    """The drafts of a step on their way to the host."""

    def __init__(self, layout: RowLayout) -> None:
        lookahead = layout.lookahead
        parts = [layout.per_request]
        if lookahead is not None:
            parts += [layout.input_ids, lookahead.q_starts, lookahead.num_pending]
            parts += [] if lookahead.parents is None else [lookahead.parents]
        self._copy = HostCopy(parts)

    def read(self, requests: Sequence[int]) -> list[DraftedTokens]:
        """Reads the drafts of `requests`. Waits until the step is laid out, not for its forward
        pass."""
        per_request, *more = self._copy.read()
        starts = per_request[READ_START].tolist()
        if not more:
            return [DraftedTokens(starts[i], [], []) for i in requests]
        ids, q_starts, num_pending = (tensor.tolist() for tensor in more[:3])
        found = []
        for i in requests:
            first, end = q_starts[i] + 1, q_starts[i] + num_pending[i]
            parents = list(range(end - first))
            if len(more) > 3:
                parents = more[3][first:end].tolist()
            found.append(DraftedTokens(starts[i], ids[first:end], parents))
        return found


class ConstraintQuestion:
    """Asks a step's constraint: on a CPU before the forward pass, which occupies the thread;
    elsewhere after its launch, since the step before may still run."""

    def __init__(self, constraint: TokenConstraint, layout: RowLayout) -> None:
        self._constraint = constraint
        self._drafted: DraftedCopy | None = DraftedCopy(layout)
        if layout.per_request.device.type == "cpu":
            self._ask()

    def answer(self, logits: torch.Tensor) -> AllowedTokens:
        """Returns the allowed tokens; logits [S, V] are those of the forward pass."""
        is_computed = when_computed(logits)
        self._ask()
        return self._constraint.allowed(is_computed)

    def _ask(self) -> None:
        if self._drafted is not None:
            self._constraint.ask(self._drafted.read(self._constraint.requests))
            self._drafted = None


@dataclass(frozen=True, slots=True)
class ShortenedRows:
    """Requests of a step that get fewer tokens than the step found (`AllowedTokens.most`).

    Attributes:
        requests: [H] int64; their indices among the R.
        rows: [H] int64; rows of the request-to-token table.
        most: [H] int64; tokens that each gets at most.
        most_kept: [H] int64; rows that each keeps at most. A prompt that gets no token keeps all
            but the last, which is fed again.
    """

    requests: torch.Tensor
    rows: torch.Tensor
    most: torch.Tensor
    most_kept: torch.Tensor

    @classmethod
    def of(cls, most: Mapping[int, int], per_request: torch.Tensor) -> ShortenedRows | None:
        """Finds them; None if there are none.

        Args:
            per_request: see `RowLayout`.
        """
        if not most:
            return None
        numbers = to_device([[*most], [*most.values()]], per_request.device, torch.int64)
        requests, tokens = numbers
        num_prompt = per_request[NUM_PROMPT][requests]
        most_kept = torch.where(num_prompt > 0, num_prompt - (tokens == 0).long(), tokens)
        return cls(requests, per_request[ROW][requests], tokens, most_kept)

    def shorten(self, accepted: AcceptedTokens) -> AcceptedTokens:
        """Returns the tokens that all requests get then; drafts verified by the shortened ones do
        not count."""
        requests = self.requests
        accept_lens, kept_lens = accepted.accept_lens.clone(), accepted.kept_lens.clone()
        accept_lens[requests] = torch.minimum(accept_lens[requests], self.most)
        kept_lens[requests] = torch.minimum(kept_lens[requests], self.most_kept)
        num_drafts = accepted.num_drafts
        if num_drafts is not None:
            num_drafts = num_drafts.index_fill(0, requests, 0)
        return replace(
            accepted, accept_lens=accept_lens, kept_lens=kept_lens, num_drafts=num_drafts
        )

    def take_back(
        self, accepted: AcceptedTokens, shortened: AcceptedTokens, state: RequestRows
    ) -> None:
        """Moves watermarks back to those of `shortened`. The certain token alone is pending then,
        without drafts."""
        excess = (accepted.kept_lens - shortened.kept_lens)[self.requests]
        committed = state.committed[self.rows] - excess
        state.committed[self.rows] = committed
        state.pending_lens[self.rows] = 1
        state.num_tokens[self.rows] = committed + 1
