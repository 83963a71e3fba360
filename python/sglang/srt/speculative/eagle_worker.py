"""EAGLE and EAGLE-3: a head over the target's hidden states drafts chains.

The head has a KV pool of its own behind the target's page table. Its slot at position p holds KV of
the token at p + 1 and the target's hidden state of p: the token is known once the target has chosen
it, so the head runs behind the target, over the same rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from sglang.srt.head_config import EAGLE3, tap_layers
from sglang.srt.layers.forward_batch import NO_CAPTURE, ForwardBatch, HiddenCapture
from sglang.srt.layers.sampling_ops import sampling_ops
from sglang.srt.model_config import ModelConfig
from sglang.srt.model_executor.draft_price_measurement import measure_draft_prices
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.models.draft_head import DraftHead
from sglang.srt.registry import ATTENTION_BACKENDS, TIER_POLICIES
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.adaptive_config import AdaptiveConfig
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState, runtime_states
from sglang.srt.speculative.draft_steps import DraftSteps, plan_draft_steps, who_drafts
from sglang.srt.speculative.drafter import (
    ComputedStep,
    DrafterNeeds,
    DrafterParts,
    RowPlan,
    plan_of_drafts,
)
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.round_prices import MeasuredRounds, RoundPrices, UpcomingRound
from sglang.srt.speculative.spec_utils import select_top_k_tokens
from sglang.srt.speculative.tier_policy import (
    RoundOutcome,
    TierOptions,
    TierParts,
    TierPolicy,
    same_size,
)
from sglang.srt.speculative.tile_spec.budget import CutRounds, RoundTables, TileSpec
from sglang.srt.speculative.tile_spec.profiler import TileSpecProfiler
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import Q_LEN, Q_START
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch, StepWidth

TOPK = 1  # drafts that follow each one: chains alone


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What the drafter needs to know.

    Attributes:
        head: of `load_head_config`, for this target.
        num_layers: of the target.
        num_steps: drafts of a chain at most, at least 1.
        suppressed_token_ids: ids that the target never emits.
        tier_policy: a name in `TIER_POLICIES` (registry.py).
        initial_steps: drafts of a chain before a policy knows anything; None: all.
        adaptive: which numbers of drafts batches of each size may have; None: any.
        tile_spec_cache: steps are cut to the rows that pay (`TileSpec`); the folder where prices
            are kept. None: all drafts are verified.
    """

    head: ModelConfig
    num_layers: int
    num_steps: int
    suppressed_token_ids: tuple[int, ...] = ()
    tier_policy: str = "fixed"
    initial_steps: int | None = None
    adaptive: AdaptiveConfig | None = None
    tile_spec_cache: Path | None = None

    @property
    def tier_options(self) -> TierOptions:
        initial = self.num_steps if self.initial_steps is None else self.initial_steps
        return TierOptions(self.num_steps, initial, self.adaptive)

    @property
    def policy(self) -> type[TierPolicy]:
        """Chooses how long chains are."""
        kind: type[TierPolicy] = TIER_POLICIES.load(self.tier_policy)
        return kind

    @property
    def needs_prices(self) -> bool:
        """Whether anything goes by prices of rounds."""
        return self.policy.needs_prices or self.tile_spec_cache is not None

    @property
    def states(self) -> dict[int, SpecRuntimeState]:
        """Of all tiers."""
        return runtime_states(self.policy.tiers(self.tier_options), self.adaptive)

    @property
    def draft_steps(self) -> dict[int, tuple[range, ...]]:
        """How many draft steps may follow a step of the target, and for batches of which sizes."""
        states = self.states.values()
        return {each.num_draft_steps: each.batch_sizes for each in states if each.num_draft_steps}

    @property
    def capture(self) -> HiddenCapture:
        """What the head reads of the target: its last hidden states, or those of some layers."""
        if self.head.architecture == EAGLE3:
            return HiddenCapture(tap_layers(self.head, self.num_layers))
        return HiddenCapture(all_rows=True)


class EagleDrafter:
    """Every request proposes a chain, whatever its parameters are. All that are proposed in a step
    have the same length, from 0 on: its tier."""

    def __init__(self, parts: DrafterParts) -> None:
        options: EagleConfig = parts.options
        self._num_steps = options.num_steps
        self._reads_taps = bool(options.capture.layers)
        self._runner = parts.runners.runners[1]
        head = self._runner.model
        assert isinstance(head, DraftHead)
        self._head = head
        self._table = parts.runners.memory.table
        self._state = parts.state
        self._ops = sampling_ops(self._runner.device)
        num_rows = self._table.num_rows
        self._num_pending_drafts = [0] * num_rows  # of each row of the page table
        rounds = None
        if options.needs_prices and parts.prices is not None:
            rounds = _measured_rounds(parts, parts.prices)
        self._tile_spec: TileSpec | None = None
        prices: RoundPrices | None = rounds
        if options.tile_spec_cache is not None:
            assert rounds is not None, "Rows go by prices, and nobody has measured any."
            self._tile_spec = _tile_spec(parts, rounds)
            prices = CutRounds(rounds, self._tile_spec)
        keys = parts.runners.runners[0].graph_keys
        graph_size = same_size if keys is None else keys.decode_size
        self._policy = options.policy(TierParts(options.tier_options, prices, graph_size))
        self._states = options.states
        self._next_round = _Round(self._policy.settled, 0)
        self._launched = deque[_Round | None]()  # of steps not read; None: nobody decodes in it

    @staticmethod
    def needs(options: EagleConfig) -> DrafterNeeds:
        count = options.num_steps
        return DrafterNeeds(
            max_drafts=count,
            max_rows=1 + count,
            num_steps=options.tier_options.initial,
            tiers=tuple(options.states),
            extra_slots=count - 1,
            capture=options.capture,
            suppressed_token_ids=options.suppressed_token_ids,
            max_masks=None if options.tile_spec_cache is None else 0,
            needs_prices=options.needs_prices,
            price_cache=options.tile_spec_cache,
            token_shift=1,
            rounds={tier: each.batch_sizes for tier, each in options.states.items()},
        )

    @staticmethod
    def models(options: EagleConfig, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        steps = options.draft_steps
        return (replace(target, model=options.head, capture=NO_CAPTURE, draft_steps=steps),)

    @classmethod
    def make(cls, parts: DrafterParts) -> EagleDrafter:
        return cls(parts)

    def step_width(self, params: SamplingParams) -> StepWidth:
        count = self._num_steps
        return StepWidth(decode_rows=2 * count, lookahead_rows=count - 1, max_kept=1 + count)

    def admit(self, new_rows: list[NewRow]) -> None:
        for new in new_rows:
            self._num_pending_drafts[new.row] = 0

    def observe(self, result: HostResult) -> None:
        """Tells the policy of each request that verified drafts how many were confirmed."""
        launched = self._launched.popleft()
        if self._tile_spec is not None:
            verified = self._tile_spec.observe(result)
        else:
            verified = [
                (count, taken - 1)
                for count, taken in zip(result.num_drafts, result.accept_lens, strict=False)
                if count
            ]
        if launched is not None:
            self._policy.observe(RoundOutcome(*launched, verified))

    def plan(self, batch: ScheduleBatch) -> RowPlan:
        num_drafts = [
            0 if num_prompt else self._num_pending_drafts[row]
            for row, num_prompt in zip(batch.rows, batch.num_prompt_tokens, strict=True)
        ]
        has_decodes = 0 in batch.num_prompt_tokens
        self._launched.append(self._next_round if has_decodes else None)
        plan = replace(plan_of_drafts(batch, num_drafts), tier=self._next_round.tier)
        if self._tile_spec is not None:
            plan = self._tile_spec.cut(batch, num_drafts, plan)
        next_drafts = self._next_drafts(batch, plan.max_accepted)
        for row, count in zip(batch.rows, next_drafts, strict=True):
            self._num_pending_drafts[row] = count
        return replace(plan, next_drafts=next_drafts)

    def _next_drafts(self, batch: ScheduleBatch, max_accepted: int) -> list[int]:
        """Drafts that each request of a step is given for its next one."""
        counts, tier = [0] * len(batch.rows), self._next_tier(batch)
        if tier:
            num_steps = self._states[tier].num_draft_steps
            for i in who_drafts(batch, max_accepted, num_steps):
                counts[i] = tier
        return counts

    def propose(self, step: ComputedStep) -> None:
        hidden = self.forward_draft_extend(step)
        tier = max(step.plan.next_drafts)
        if tier == 0:
            return
        steps = plan_draft_steps(step, self._table, self._states[tier].num_draft_steps)
        assert steps is not None, "Drafts are planned, and nobody drafts."
        self.draft(steps, steps.of_requests(hidden)).write(self._state, steps.rows)

    def _next_tier(self, batch: ScheduleBatch) -> int:
        """Drafts that requests get for their next step, which is taken to have the requests that
        emit in this one, and no prompts; 0 if nobody emits, whatever tiers there are."""
        bounds, slots = batch.kv_len_upper_bounds, batch.max_q_lens
        lens = zip(bounds, slots, batch.num_prompt_tokens, batch.emits, strict=True)
        emitting = [bound - most + num_prompt for bound, most, num_prompt, emits in lens if emits]
        if not emitting:
            return 0
        tier = self._policy.choose(UpcomingRound(len(emitting), sum(emitting)))
        self._next_round = _Round(self._policy.settled, len(emitting))
        return tier

    def forward_draft_extend(self, step: ComputedStep) -> torch.Tensor:
        """The head over the rows that the target was fed: of prompts, and of the certain token and
        its drafts. What it writes for drafts that were rejected lies behind the watermark.

        Returns:
            [R, hidden_size]; its output at the last row kept of each request.
        """
        hidden = step.forward.taps if self._reads_taps else step.forward.hidden
        assert hidden is not None, "The target gives what `DrafterNeeds.capture` names."
        per_request, state = step.chosen.layout.per_request, step.state
        starts, inputs = per_request[Q_START], step.inputs
        rows = rows_of_requests(starts + per_request[Q_LEN], inputs)
        batch = replace(
            inputs,
            input_ids=next_tokens(state, rows, inputs.positions),
            read_index=starts + step.accepted.kept_lens - 1,
            hidden=hidden,
        )
        return self._runner.forward(batch).hidden

    def draft(self, steps: DraftSteps, hidden: torch.Tensor) -> EagleVerifyInput:
        """Chains behind the certain tokens of the D requests that draft; hidden [D, hidden_size] is
        the head's output at the row before each."""
        token_ids, scores = select_top_k_tokens(
            self._runner.compute_logits(hidden), None, TOPK, self._ops
        )
        drafts = EagleDraftInput(self._head.to_target_ids(token_ids), hidden, scores)
        if steps.num_steps == 0:
            return organize_draft_results([drafts])
        first = steps.batch(0, drafts.token_ids, hidden)
        more = self._runner.draft(first, steps.num_steps)
        probs = torch.cat((scores[:, None], more.logprobs.exp()), dim=1)
        return EagleVerifyInput(
            draft_token=torch.cat((drafts.token_ids[:, None], more.token_ids), dim=1),
            scores=probs.cumprod(dim=1),
        )


def _measured_rounds(parts: DrafterParts, target_prices: PriceTable) -> MeasuredRounds:
    """Prices of rounds, of which those of the head are measured here or taken from the cache."""
    options: EagleConfig = parts.options
    head, num_rows = parts.runners.runners[1], parts.runners.memory.table.num_rows
    width, steps = 1 + options.num_steps, tuple(options.draft_steps)
    measure = partial(measure_draft_prices, head, num_rows, width, steps)
    if options.tile_spec_cache is None:
        return MeasuredRounds(target_prices, measure())
    profiler = TileSpecProfiler(options.tile_spec_cache, parts.runners.target)
    return MeasuredRounds(target_prices, profiler.head(head, target_prices, measure))


def _tile_spec(parts: DrafterParts, rounds: MeasuredRounds) -> TileSpec:
    confidence = parts.state.confidence
    assert confidence is not None, "Rows are divided by confidences (DrafterNeeds.max_masks)."
    backend = ATTENTION_BACKENDS.load(parts.runners.target.config.attention_backend)
    packs_in_graphs = backend.capabilities().reads_q_starts
    return TileSpec(RoundTables(rounds, packs_in_graphs), confidence.drafts)


class _Round(NamedTuple):
    """What was drafted for.

    Attributes:
        tier: see `TierPolicy.settled`.
        num_reqs: requests that were to be drafted for.
    """

    tier: int
    num_reqs: int


def rows_of_requests(ends: torch.Tensor, inputs: ForwardBatch) -> torch.Tensor:
    """[T] int64; the row of the token table that each row fed belongs to, of padding any.

    Args:
        ends: [R] int64; place behind the last row of each request.
    """
    places = torch.arange(inputs.input_ids.shape[0], device=ends.device)
    requests = torch.searchsorted(ends, places, right=True)
    return inputs.rows[requests.clamp(max=len(ends) - 1)]


def next_tokens(state: RequestRows, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T] int64; the token at the position behind each of positions [T] of rows [T]: of a prompt's
    row the prompt's next one, also at a chunk's end; of the last row kept the certain one; behind
    rows that were not kept, any."""
    last = state.tokens.shape[1] - 1
    return state.tokens[rows, (positions + 1).clamp(max=last)].to(torch.int64)
