"""Plans how many masks each request feeds, as far as the host knows what is pending."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.contract import Budget, Planner, StepPlan, StepRecord
from sglang.srt.lookahead.length_policy import LengthPolicy
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.step_ops import PackedSize, StepCounts
from sglang.srt.step.step_sizes import PLAIN_WIDTH, StepWidth
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch


@dataclass(frozen=True, slots=True)
class MTPConfig:
    """The settings of the drafter."""

    mask_token_id: int  # fed by look-ahead rows; never emitted
    max_k: int  # tokens that a request may predict per step, at most
    # The length policy also shortens unverified requests, whose output depends on k.
    limits_unverified: bool = False
    # Look at how many tokens are pending and pad to the longest run of the batch, not to the
    # longest possible one: for devices where looking costs nothing.
    trims_rows: bool = False
    # Where the length policy grants a step fewer rows than requests may need, the device divides
    # them by what is pending then; for attention backends that learn lengths there. If not, each
    # request has the most rows that it may need.
    packs_rows: bool = False
    length_policy: str = "fixed"  # a name in `LENGTH_POLICIES` (registry.py)
    # Steps of several rows per request replay no captured graph, though steps of one row do; the
    # first such step logs a warning.
    bypasses_graphs: bool = False


@dataclass(slots=True, kw_only=True)
class _Request:
    """The request of a row."""

    k: int = 1  # tokens that it predicts per step, at most
    tau: float = 0.0  # threshold; 0 for static k
    confirms: bool = True  # see `StepCounts.emits_only_confirmed`
    is_adjustable: bool = True  # the length policy may choose a smaller k
    kind: Kind | None = None  # None where each step accepts as many tokens as it predicts
    bound: int = 1  # most that can be pending after all launched steps
    pending: int = 1  # tokens pending after the last step that was read


class MaskPlanner(Planner):
    """Plans by a policy of lengths, for one entry per row of the page table."""

    def __init__(self, config: MTPConfig, num_rows: int, policy: LengthPolicy) -> None:
        self._config = config
        self.policy = policy
        self._requests = [_Request() for _ in range(num_rows)]

    def step_width(self, params: SamplingParams) -> StepWidth:
        k = params.num_predicted
        return PLAIN_WIDTH if k == 1 else StepWidth(2 * k - 1, k - 1, k)

    def admit(self, new_rows: list[NewRow]) -> None:
        for new in new_rows:
            k, tau = new.params.num_predicted, new.params.mtp_threshold
            confirms = new.params.emits_only_confirmed
            self._requests[new.row] = _Request(
                k=k,
                tau=tau,
                confirms=confirms,
                is_adjustable=self._config.limits_unverified or confirms,
                kind=Kind(confirms, round(10 * tau)) if k > 1 and (confirms or tau) else None,
            )

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        """See `Planner`; lens are of pending tokens."""
        config, split = self._config, batch.num_prompts
        requests = [self._requests[row] for row in batch.rows]
        longest = config.max_k if lens is None else max([lens[row] for row in batch.rows])
        pending = [min(request.bound, longest) for request in requests]
        pending[:split] = [min(1, longest)] * split
        budget = self._budget(batch, requests, pending)
        limit = config.max_k if budget is None else budget.limit
        predicted = [0] * len(requests)
        for place in compress(range(len(requests)), batch.emits):
            request = requests[place]
            k = min(request.k, limit) if request.is_adjustable else request.k
            predicted[place] = request.bound = k
        if max(predicted) <= 1 and max(pending) <= 1:
            counts = StepCounts.plain(batch)
        else:
            counts = _counts(batch, requests, predicted, pending)
            if config.packs_rows and budget is not None and budget.num_rows is not None:
                size = _packed_size(batch, requests, counts, pending, budget.num_rows)
                counts = replace(counts, packed=size)
        flags = zip(predicted, pending, counts.emits_only_confirmed, strict=True)
        return StepPlan(
            counts=counts,
            max_pending=max(pending),
            max_accepted=max(1, *[bound if confirmed else k for k, bound, confirmed in flags]),
            lookahead_token=config.mask_token_id,
            wants_probs=not counts.is_plain and any(request.tau > 0 for request in requests),
            draft_length=0 if budget is None else limit,
        )

    def _budget(
        self, batch: ScheduleBatch, requests: list[_Request], pending: list[int]
    ) -> Budget | None:
        """Asks the policy, which hears of steps in which a request looks ahead whose length it may
        choose."""
        emitting, split = list(compress(requests, batch.emits)), batch.num_prompts
        if not any(request.k > 1 and request.is_adjustable for request in emitting):
            return None
        bounds = compress([0] * split + pending[split:], batch.emits)
        wishes = zip(emitting, bounds, strict=True)
        asked = Counter([(each.kind, each.k, each.is_adjustable, bound) for each, bound in wishes])
        kinds = {EmittingRequest(*each): count for each, count in asked.items()}
        upcoming = UpcomingStep.of(batch, kinds, is_packed=self._config.packs_rows)
        return self.policy.choose(upcoming)

    def observe(self, record: StepRecord, result: HostResult) -> None:
        """See `Planner`. A request that emits only what is confirmed has the drafts that the step
        before left it, of which a packed step may feed fewer. With a threshold those count that
        were predicted: that some were not sure enough is part of its kind. Nothing is learnt of one
        that emits nothing or sat the step out."""
        num_tried, num_drafts = list[int](), result.num_drafts
        requests = [self._requests[row] for row in record.rows]
        for i, (request, taken) in enumerate(zip(requests, result.accept_lens, strict=True)):
            tried = predicted = record.plan.counts.num_predicted[i]
            if predicted and request.confirms:
                tried = max(request.pending, taken)
                request.pending = predicted if taken == tried else 1
                if request.tau == 0:
                    tried = 1 + (num_drafts[i] if num_drafts else 0)
            num_tried.append(tried)
        outcome = StepOutcome(
            record=record,
            result=result,
            num_tried=num_tried,
            num_accepted=result.accept_lens,
            kinds=[request.kind for request in requests],
        )
        self.policy.observe(outcome)


def _counts(
    batch: ScheduleBatch, requests: list[_Request], predicted: list[int], pending: list[int]
) -> StepCounts:
    counts = StepCounts([], [], predicted, [request.confirms for request in requests])
    for k, bound, num_prompt, is_confirmed in zip(
        predicted, pending, batch.num_prompt_tokens, counts.emits_only_confirmed, strict=True
    ):
        q_len = (num_prompt or bound) + max(k - 1, 0)
        counts.q_lens.append(q_len)
        counts.num_read.append(q_len if is_confirmed and not num_prompt else k)
    return counts


def _packed_size(
    batch: ScheduleBatch,
    requests: list[_Request],
    counts: StepCounts,
    pending: list[int],
    num_rows: int,
) -> PackedSize:
    """Room of a step that the device divides; `num_rows` as in `Budget`."""
    decodes = range(batch.num_prompts, len(requests))
    cut = {i for i in decodes if requests[i].k > 1 and requests[i].confirms}
    most = sum(counts.q_lens[i] for i in cut)  # of which all are read
    num_others = counts.num_rows - most
    given = min(most, max(num_rows - num_others, len(cut)))
    # Unverified requests may have fewer pending tokens than the host expects.
    num_spare = sum(pending[i] - 1 for i in decodes if i not in cut)
    num_read = counts.num_reads - most + min(most, given + num_spare)
    return PackedSize(num_others + given, num_read)
