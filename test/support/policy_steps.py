"""Steps as policies hear of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.contract import Budget, StepPlan, StepRecord
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.load_aware_masks import LoadAwareMasks
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.step.price_table import PriceTable, PromptChunk
from sglang.srt.step.step_ops import StepCounts
from sglang.srt.step.worker import HostResult

MASK_K = 8  # tokens that requests of `mask_step` predict


def mask_parts(max_k: int = 1, prices: PriceTable | None = None) -> PolicyParts:
    return PolicyParts(options=RoundOptions(max_k - 1), steps=prices)


def mask_policy(prices: PriceTable, max_k: int) -> LoadAwareMasks:
    return LoadAwareMasks(mask_parts(max_k, prices))


def drafting_step(num_reqs: int, max_drafts: int = 1, kv_tokens: int = 0) -> UpcomingStep:
    """Requests that all decode, and may be given drafts."""
    return UpcomingStep(Counter({EmittingRequest(Kind(), 1 + max_drafts): num_reqs}), kv_tokens)


def plan_of(tier: int = 0, num_drafted_for: int | None = None) -> StepPlan:
    counts = StepCounts([1], [1], [1], [True])
    return StepPlan(counts=counts, draft_length=tier, num_drafted_for=num_drafted_for)


def drafted(
    tier: int,
    num_reqs: int | None,
    drafts: Sequence[int],
    right: Sequence[int],
    fed: Sequence[int] = (),
) -> StepOutcome:
    """A step of requests that had drafts, of which some were right. It was chosen for `num_reqs`
    requests, when `tier` was settled on."""
    taken = [1 + count for count in right]
    return StepOutcome(
        record=StepRecord(rows=range(len(drafts)), plan=plan_of(tier, num_reqs)),
        result=HostResult([[]] * len(taken), taken, taken, num_drafts=[*fed]),
        num_tried=[1 + count for count in drafts],
        num_accepted=taken,
    )


def predicted(budget: Budget, kind: Kind | None, pairs: Sequence[tuple[int, int]]) -> StepOutcome:
    """A step of requests that could accept so many tokens, and did accept so many."""
    count, given = len(pairs), [taken for _, taken in pairs]
    return StepOutcome(
        record=StepRecord(rows=range(count), plan=plan_of(budget.limit)),
        result=HostResult([[]] * count, given, given),
        num_tried=[tried for tried, _ in pairs],
        num_accepted=given,
        kinds=[kind] * count,
    )


def mask_step(
    num_reqs: int, kind: Kind, limit: int, prompts: int = 0, kv_tokens: int = 0, num_plain: int = 0
) -> UpcomingStep:
    """Requests that wish for MASK_K tokens, as many of them pending as `limit` left."""
    wishes = EmittingRequest(kind, MASK_K, True, limit)
    emitting = Counter({wishes: num_reqs, EmittingRequest(None, 1, False): num_plain})
    chunks = (PromptChunk(0, prompts),) if prompts else ()
    return UpcomingStep(emitting, kv_tokens, len(chunks), chunks)
