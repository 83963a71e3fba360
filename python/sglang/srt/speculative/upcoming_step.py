"""What the length policy hears of a step: who asks for what before its lengths are chosen, and what
was accepted when its result is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sglang.srt.speculative.acceptance_estimate import Kind
from sglang.srt.step.price_table import StepShape


class EmittingRequest(NamedTuple):
    """What a request that emits in a step asks for.

    Attributes:
        kind: None if it accepts all tokens that it predicts (static k, or no look-ahead).
        k: tokens to predict.
        is_adjustable: the policy may choose a smaller k.
        pending: tokens to feed before any mask, at most; 0 if they are the end of its prompt.
    """

    kind: Kind | None
    k: int
    is_adjustable: bool = True
    pending: int = 1


@dataclass(frozen=True, slots=True)
class UpcomingStep:
    """A step before its lengths are chosen.

    Attributes:
        emitting: how many requests ask for the same.
        kv_tokens: tokens with KV of all requests in `emitting`.
        prompt_rows, longest_prompt: prompt tokens fed, in all and by one request.
        prompt_reqs: requests that feed prompt tokens and emit nothing yet.
        prompt_row_kv: sum over the prompt rows of the tokens that each sees.
        num_ended: requests that have ended since the step before.
    """

    emitting: Counter[EmittingRequest] = field(default_factory=Counter)
    kv_tokens: int = 0
    prompt_rows: int = 0
    longest_prompt: int = 0
    prompt_reqs: int = 0
    prompt_row_kv: int = 0
    num_ended: int = 0

    @property
    def cache_key(self) -> Hashable:
        """Equal for steps in which each limit has the same price, KV aside."""
        emitting = Counter[tuple[Kind | None, int, bool, bool]]()
        for request, count in self.emitting.items():
            emitting[request.kind, request.k, request.is_adjustable, request.pending > 0] += count
        return frozenset(emitting.items()), self.prompt_rows, self.longest_prompt, self.prompt_reqs

    @property
    def is_plain(self) -> bool:
        """Whether no request has more to feed than its one pending token or its prompt."""
        return all(
            request.pending <= 1 and (request.is_adjustable or request.k == 1)
            for request in self.emitting
        )

    @property
    def longest(self) -> int:
        """The most tokens that an adjustable request wants to predict."""
        return max((request.k for request in self.emitting if request.is_adjustable), default=1)

    def steady_shape(self, limit: int, with_prompts: bool) -> StepShape:
        """The shape if the step before had this limit too and all that it predicted is pending."""
        return self._shape(limit, with_prompts, is_steady=True)

    def current_shape(self, limit: int) -> StepShape:
        """The shape with what is pending now."""
        return self._shape(limit, with_prompts=True, is_steady=False)

    def plain_shape(self) -> StepShape:
        """The shape if no adjustable request looked ahead."""
        emitting = Counter[EmittingRequest]()
        for request, count in self.emitting.items():
            if request.is_adjustable:
                request = request._replace(k=1, pending=min(request.pending, 1))
            emitting[request] += count
        return replace(self, emitting=emitting).current_shape(1)

    def _shape(self, limit: int, with_prompts: bool, is_steady: bool) -> StepShape:
        reqs = rows = read = widest = 0
        for request, count in self.emitting.items():
            length = min(request.k, limit) if request.is_adjustable else request.k
            pending = request.pending
            if not with_prompts:
                pending = max(pending, 1)
            kind = request.kind
            reads_all = kind is not None and kind.emits_only_confirmed and pending > 0
            if is_steady:
                pending = min(pending, 1) + length - 1
            fed = pending + length - 1
            reqs += count
            rows += count * fed
            read += count * (fed if reads_all else length)
            widest = max(widest, fed)
        row_kv = rows * self.kv_tokens / reqs if reqs else 0.0
        if not with_prompts:
            return StepShape(reqs, widest, rows, read, self.kv_tokens, row_kv)
        return StepShape(
            reqs + self.prompt_reqs,
            max(widest, self.longest_prompt),
            rows + self.prompt_rows,
            read,
            self.kv_tokens,
            row_kv,
            self.prompt_row_kv,
        )


class Accepted(NamedTuple):
    """What a request accepted of a step; `num_tried` tokens at most."""

    kind: Kind | None
    is_adjustable: bool
    num_tried: int
    num_accepted: int
