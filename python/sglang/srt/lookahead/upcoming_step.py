"""The terms in which a policy hears of a step, plain data: who asks for what before its lengths are
chosen, and what was accepted when its result is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.contract import StepRecord
from sglang.srt.step.price_table import PromptChunk, StepShape
from sglang.srt.step.worker import HostResult, ScheduleBatch

# Maps (kind, k) to the share of requests with drafts pending; k tokens were predicted last step.
ShareWithDrafts = Callable[[Kind, int], float]
MARGIN = 2.0  # standard deviations of the number of requests with drafts


class EmittingRequest(NamedTuple):
    """The wishes of a request that emits in a step."""

    kind: Kind | None  # None: it accepts all that it predicts (static k, or no look-ahead)
    k: int  # tokens to predict: the step's own, and as many masks or drafts as it wishes
    is_adjustable: bool = True  # the policy may choose a smaller k
    pending: int = 1  # tokens to feed before any mask, at most; 0 if they end its prompt


@dataclass(frozen=True)
class UpcomingStep:
    """A step before its lengths are chosen."""

    emitting: Mapping[EmittingRequest, int] = field(default_factory=dict)  # how many ask for it
    kv_tokens: int = 0  # tokens with KV of all these requests
    prompt_reqs: int = 0  # requests that feed prompt tokens and emit nothing yet
    prompts: tuple[PromptChunk, ...] = ()
    is_packed: bool = False  # the device divides its rows among requests (`Budget.num_rows`)
    is_fed: bool = True  # the drafter's model has been fed all tokens of those that emit
    num_reqs: int = field(init=False)  # those that emit
    num_plain: int = field(init=False)  # of these, who do not look ahead
    num_new: int = field(init=False)  # and who have just fed the end of their prompts
    prompt_rows: int = field(init=False)  # prompt tokens fed, in all
    longest_prompt: int = field(init=False)  # and by one request

    @classmethod
    def of(
        cls,
        batch: ScheduleBatch,
        emitting: Mapping[EmittingRequest, int],
        *,
        is_packed: bool = False,
        is_fed: bool = True,
    ) -> UpcomingStep:
        """The step of a batch, whose requests ask for this."""
        split = batch.num_prompts
        fed = batch.requests[:split]
        new = [each.kv_len_before + each.num_prompt_tokens for each in fed if each.emits]
        chunks = [PromptChunk(each.kv_len_before, each.num_prompt_tokens) for each in fed]
        return cls(
            emitting=emitting,
            kv_tokens=sum(batch.kv_lens_before[split:]) + sum(new),
            prompt_reqs=split - len(new),
            prompts=tuple(chunks),
            is_packed=is_packed,
            is_fed=is_fed,
        )

    def __post_init__(self) -> None:
        num_reqs = num_plain = num_new = 0
        for request, count in self.emitting.items():
            num_reqs += count
            num_plain += count * (request.k == 1)
            num_new += count * (request.pending == 0)
        self.__dict__.update(num_reqs=num_reqs, num_plain=num_plain, num_new=num_new)
        rows = [chunk.num_rows for chunk in self.prompts]
        self.__dict__.update(prompt_rows=sum(rows), longest_prompt=max(rows, default=0))

    @property
    def cache_key(self) -> Hashable:
        """Equal for steps in which each limit has the same price, KV aside."""
        emitting = Counter[tuple[Kind | None, int, bool, bool]]()
        for request, count in self.emitting.items():
            emitting[request.kind, request.k, request.is_adjustable, request.pending > 0] += count
        return frozenset(emitting.items()), self.prompt_rows, self.longest_prompt, self.prompt_reqs

    @property
    def beside(self) -> float:
        """Tokens of those who do not look ahead, for each of those who do."""
        return self.num_plain / (self.num_reqs - self.num_plain)

    @property
    def longest(self) -> int:
        """The most tokens that an adjustable request wants to predict."""
        return max((request.k for request in self.emitting if request.is_adjustable), default=1)

    def mean_lengths(self, runs: Callable[[Kind], Sequence[float]]) -> list[float]:
        """Tokens that a request which looks ahead is given on average, where adjustable ones have
        0, 1, ... masks or drafts. `runs`: tokens of a kind with so many."""
        totals, runs_of = [0.0] * self.longest, dict[Kind, Sequence[float]]()
        for (kind, k, is_adjustable, _), count in self.emitting.items():
            if k == 1:
                continue
            if kind is not None and kind not in runs_of:
                runs_of[kind] = runs(kind)
            for place in range(len(totals)):
                length = min(k, 1 + place) if is_adjustable else k
                totals[place] += count * (length if kind is None else runs_of[kind][length - 1])
        return [total / (self.num_reqs - self.num_plain) for total in totals]

    def current_shape(
        self,
        limit: int,
        share: ShareWithDrafts | None = None,
        is_steady: bool = False,
        with_prompts: bool = True,
    ) -> StepShape:
        """The shape with what is pending now or, if `is_steady`, all that a step of this limit
        before predicted; of requests that can be cut the most or, by their share, probably enough
        rows."""
        reqs = rows = read = widest = 0
        for (kind, k, is_adjustable, pending), count in self.emitting.items():
            pending = pending if with_prompts else max(pending, 1)
            can_be_cut = kind is not None and kind.emits_only_confirmed and pending > 0
            length = min(k, limit) if is_adjustable else k
            pending = min(pending, 1) + length - 1 if is_steady else pending
            num_rows = count * (pending + length - 1)
            if self.is_packed and can_be_cut and kind is not None and share and pending > 1:
                chance = share(kind, pending)
                likely = count * chance + MARGIN * math.sqrt(count * chance * (1.0 - chance))
                num_rows = count * length + math.ceil(min(count, likely) * (pending - 1))
            reqs += count
            rows += num_rows
            read += num_rows if can_be_cut else count * length
            widest = max(widest, pending + length - 1)
        row_kv = rows * self.kv_tokens / reqs if reqs else 0.0
        if not with_prompts:
            return StepShape(reqs, widest, rows, read, self.kv_tokens, row_kv)
        reqs, rows = reqs + self.prompt_reqs, rows + self.prompt_rows
        widest = max(widest, self.longest_prompt)
        return StepShape(reqs, widest, rows, read, self.kv_tokens, row_kv, self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """A step of R requests that has been read."""

    record: StepRecord
    result: HostResult
    # R counts of tokens that each could accept: 1 without look-ahead, 0 of one that emits nothing.
    num_tried: Sequence[int]
    # R; where the step was cut some may be a guess. 0: nothing is learnt of it.
    num_accepted: Sequence[int]
    kinds: Sequence[Kind | None] = ()  # R; empty where the policy does not go by them
