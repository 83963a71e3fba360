"""The worker: a target model, and a drafter or none. `one_round.py` has a step of one request in
plain Python: read it first.

Without a drafter, or in a step in which no request looks ahead, each request feeds its pending
token (or a chunk of its prompt) and is given one token. With one, a step follows the order that
`speculative/drafter.py` describes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from sgl_kernel import ConfirmedDrafts, SamplingRows
from sglang.srt.device_copies import HostCopy
from sglang.srt.layers.forward_batch import ForwardBatch, ModelOutput
from sglang.srt.layers.logit_adjustments import ExtraTokens
from sglang.srt.layers.logprobs import LogprobTensors
from sglang.srt.layers.sampler import Sampler, ScoredTokens
from sglang.srt.layers.sampling_ops import sampling_ops
from sglang.srt.lookahead.contract import StepPlan, StepRecord
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.confirm import Confirm, ConfirmEqual, TargetRows
from sglang.srt.speculative.drafter import ChosenTokens, ComputedStep, ExtendedStep, PlannedDrafter
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.speculative.left_out import LeftOutTokens
from sglang.srt.step.constrained_step import ConstraintQuestion, ShortenedRows
from sglang.srt.step.forward_inputs import forward_batch_of
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import (
    EMITS,
    EMITS_ONLY_CONFIRMED,
    Q_LEN,
    ROW,
    AcceptedTokens,
    RowLayout,
)
from sglang.srt.step.step_outputs import (
    RunRows,
    emitted_queries,
    hidden_of_reads,
    hidden_states,
    logits_to_read,
    prompt_logprobs,
    taps_of_drafter,
)
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import DraftMakers, GenerationBatchResult, HostResult, ScheduleBatch
from sglang.srt.workers.round_graphs import RoundGraphs


class _Drawing(NamedTuple):
    """Holds how the tokens of S rows were chosen, and what of them is given.

    Attributes:
        output: what the target gave, all of `HiddenCapture.taps` too.
        given: what requests get; less than was accepted where `shortened` says so.
        logits: [S, V]; after penalties and biases.
        sampling: None where all rows are greedy.
        drawn: None where log-probabilities are not wanted.
    """

    output: ModelOutput
    given: AcceptedTokens
    shortened: ShortenedRows | None
    logits: torch.Tensor
    sampling: SamplingRows | None
    drawn: ScoredTokens | None


class TpModelWorker:
    """Runs steps of a target model and, if there is one, of its drafter.

    The name is SGLang's ("Tp" is tensor parallelism). Where several ranks hold the model, each has
    such a worker: that of the first one begins and runs steps (`BroadcastWorker`), the others
    follow.

    Args:
        suppressed_token_ids: ids that are never emitted (a model's mask token).
        planned: a drafter, made over the same device rows, and its planner.
        confirm: which drafts are confirmed; None: those that equal the target's own tokens.
        on_step: is told of every step with the drafter's proposals in place, for debugging. What it
            gives is noted in the step's record.
    """

    def __init__(
        self,
        runner: ModelRunner,
        state: RequestRows,
        suppressed_token_ids: tuple[int, ...] = (),
        planned: PlannedDrafter | None = None,
        on_step: Callable[[ComputedStep], object] | None = None,
        confirm: Confirm | None = None,
    ) -> None:
        self._runner = runner
        self._capture = runner.config.capture
        self._table = runner.req_to_token_pool
        self._state = state
        self._planner, self._drafter = planned or PlannedDrafter()
        self._left_out = LeftOutTokens(runner.memory, state)
        self._on_step = on_step
        self._sampler = Sampler(state.committed.device, suppressed_token_ids)
        self._confirm = confirm or ConfirmEqual(state.committed.device)
        self._rounds: RoundGraphs | None = None
        self._last_lens: HostCopy | None = None
        self._kernels = sampling_ops(state.committed.device)
        self._kv = runner.memory.addresses() if state.trees else None
        runner.step_ops.warm_up(state, self._table)

    def step_width(self, params: SamplingParams) -> StepWidth:
        return self._planner.step_width(params)

    def observe(self, result: HostResult) -> None:
        assert isinstance(result.record, StepRecord), "The worker gave it."
        self._planner.observe(result.record, result)

    def capture_rounds(self, runners: RunnerGroup, needs: DrafterNeeds) -> None:
        """Captures graphs of the steps of `DrafterNeeds.rounds` and of their proposals, if the
        drafter supports them; not with `on_step`, which cannot see inside a graph."""
        if needs.rounds and self._confirm.can_be_captured and self._on_step is None:
            run, propose = self._run_step, self._drafter.propose
            self._rounds = RoundGraphs(runners, needs, self._state, run, propose)
            runners.capture_with(self._rounds)

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        return self.run(batch, self.begin(batch))

    @torch.inference_mode()
    def begin(self, batch: ScheduleBatch) -> StepRecord:
        """Decides what a step does. The copies of its record begin here."""
        self._admit(batch)
        lens = self._drafter.lens()
        copied = None if lens is None else HostCopy([lens.clone()])
        self._planner.admit(batch.new_rows)
        plan = self._planner.plan(batch, self._known_lens(copied))
        scores = None
        if plan.wants_scores:
            assert self._state.confidence is not None, "See `DrafterNeeds.max_masks`."
            scores = HostCopy([self._state.confidence.drafts.clone()])
        return StepRecord(rows=batch.rows, plan=plan, lens=copied, scores=scores)

    @torch.inference_mode()
    def follow(self, batch: ScheduleBatch, plan: StepPlan) -> None:
        """Runs a step that another process has decided (`begin`), without a result."""
        self._admit(batch)
        self.run(batch, StepRecord(rows=batch.rows, plan=plan))

    def _admit(self, batch: ScheduleBatch) -> None:
        self._state.end(batch.ended_texts)
        self._state.initialize(batch.new_rows)

    def _known_lens(self, copied: HostCopy | None) -> list[int] | None:
        """Returns lengths by row, from before this step on a CPU. A GPU still computes the step
        before, so there they are from before that one, whether or not it has ended: plans do not
        depend on how fast the host is."""
        last, self._last_lens = self._last_lens, copied
        known = copied if copied is None or copied.is_complete else last
        return None if known is None else known.read()[0].tolist()

    @torch.inference_mode()
    def run(self, batch: ScheduleBatch, record: StepRecord) -> GenerationBatchResult:
        """Executes a step that has begun."""
        plan = record.plan
        self._left_out.prepare(batch, plan)
        self._drafter.prepare(batch, plan)
        verified = None if self._rounds is None else self._rounds.verify(batch, plan)
        if verified is None:
            return self._run_pieces(batch, record)
        hidden = hidden_states(batch, verified.run, self._capture)
        makers = self._makers(verified.extended.rows, verified.run.accepted)
        result = _result(batch, record, verified.run.accepted, makers, hidden=hidden)
        self._propose(verified.extended)
        return result

    def _run_pieces(self, batch: ScheduleBatch, record: StepRecord) -> GenerationBatchResult:
        """A step whose models replay graphs of their own, if there are any for it."""
        runner, plan = self._runner, record.plan
        layout = runner.step_ops.lay_out(
            batch, plan.counts, self._state, self._table, plan.lookahead_token
        )
        # Who may keep several tokens has more slots reserved than a plain step feeds rows, and the
        # step in flight may have kept fewer than the bounds say.
        is_exact = plan.counts.is_plain and plan.counts.q_lens == batch.max_q_lens
        inputs = forward_batch_of(batch, plan.counts, layout, bounds_are_exact=is_exact)
        step, drawing = self._accept(batch, plan, inputs, layout)
        run = RunRows(inputs, layout, step.accepted, drawing.output)
        scored = step.forward.hidden, inputs.q_lens, runner.compute_logits, self._sampler.banned
        result = _result(
            batch,
            record,
            drawing.given,
            self._makers(inputs.rows, drawing.given),
            emitted_logprobs=self._emitted_logprobs(step, drawing),
            prompt_logprobs=prompt_logprobs(batch, *scored),
            hidden=hidden_states(batch, run, self._capture),
        )
        if (fed := self._left_out.fed(step)) is not None:
            output = self._drafter.extend(fed)
            self._propose(ExtendedStep(fed.batch, fed.plan, self._state, fed.inputs.rows, output))
        if self._on_step is not None:
            record.notes.append(self._on_step(step))
        if drawing.shortened is not None:
            # The drafter comes first: it knows of no request that is fed and given nothing.
            drawing.shortened.take_back(step.accepted, drawing.given, self._state)
        return result

    def _makers(self, rows: torch.Tensor, accepted: AcceptedTokens) -> DraftMakers | None:
        """See `Drafter.makers`; None where no drafts were verified."""
        return None if accepted.num_drafts is None else self._drafter.makers(rows)

    def _propose(self, step: ExtendedStep) -> None:
        if self._rounds is None or not self._rounds.propose(step):
            self._drafter.propose(step)

    def _run_step(
        self, batch: ScheduleBatch, plan: StepPlan, per_request: torch.Tensor
    ) -> tuple[RunRows, torch.Tensor | None]:
        """A step of `RoundGraphs` up to the proposal; per_request: see `RowLayout`."""
        layout = self._runner.step_ops.lay_out_rows(
            per_request, plan.counts, self._state, self._table, plan.lookahead_token
        )
        inputs = forward_batch_of(batch, plan.counts, layout)
        step, drawing = self._accept(batch, plan, inputs, layout)
        run, fed = RunRows(inputs, layout, step.accepted, drawing.output), self._left_out.fed(step)
        assert fed is not None, "Such a step leaves no request out."
        return run, self._drafter.extend(fed)

    def _accept(
        self, batch: ScheduleBatch, plan: StepPlan, inputs: ForwardBatch, layout: RowLayout
    ) -> tuple[ComputedStep, _Drawing]:
        """Runs the target, and accepts what follows from its tokens."""
        question = None
        if batch.constraint is not None:
            question = ConstraintQuestion(batch.constraint, layout)
        forward = self._runner.forward(inputs)
        output = ModelOutput(forward.hidden, forward.taps)
        forward = replace(forward, taps=taps_of_drafter(forward.taps, self._capture))
        reads, shortened = layout.reads, None
        logits = self._logits(batch, inputs, layout, forward.hidden)
        if question is not None:
            allowed = question.answer(logits)
            logits = allowed.apply(logits)
            shortened = ShortenedRows.of(allowed.most, layout.per_request)
        sampling = None if batch.all_greedy else self._state.sampling(reads.rows, reads.positions)
        chosen, drawn = self._choose(batch, plan, layout, logits, sampling)
        if plan.counts.is_plain:
            accepted = self._accept_one(chosen)
        else:
            confirmed, chosen, drawn = self._confirm_drafts(plan, chosen, logits, sampling, drawn)
            accepted = self._accept_run(plan, chosen, confirmed)
        given = accepted if shortened is None else shortened.shorten(accepted)
        if batch.adjusts_logits:
            self._record(inputs.rows, layout, chosen.targets, given)
        step = ComputedStep(
            batch=batch,
            plan=plan,
            state=self._state,
            inputs=inputs,
            forward=forward,
            chosen=chosen,
            accepted=accepted,
        )
        return step, _Drawing(output, given, shortened, logits, sampling, drawn)

    def _logits(
        self, batch: ScheduleBatch, inputs: ForwardBatch, layout: RowLayout, hidden: torch.Tensor
    ) -> torch.Tensor:
        """[S, V], after penalties and biases."""
        reads = layout.reads
        logits = self._runner.compute_logits(hidden_of_reads(hidden, inputs, reads))
        if batch.adjusts_logits:
            drafts = None if layout.lookahead is None else self._drafts_before(layout)
            adjust = self._state.adjustments.apply
            logits = adjust(logits, reads.rows, reads.positions, drafts)
        return logits_to_read(batch, logits)

    def _drafts_before(self, layout: RowLayout) -> ExtraTokens:
        """Drafts fed before each row read: a row counts only if they are confirmed, and then they
        are part of the output that penalties look at."""
        reads, lookahead = layout.reads, layout.lookahead
        assert lookahead is not None
        drafts = self._state.pending(reads.rows, start=1)
        nodes = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
        confirms = layout.per_request[EMITS_ONLY_CONFIRMED][reads.request] > 0
        last = torch.minimum(reads.offset, lookahead.num_pending[reads.request] - 1)
        is_before = (nodes <= last[:, None]) & confirms[:, None]
        if lookahead.ancestors is not None:
            is_before &= (lookahead.ancestors[reads.index][:, None] >> nodes) & 1 == 1
        return ExtraTokens(drafts, is_before.int())

    def _choose(
        self,
        batch: ScheduleBatch,
        plan: StepPlan,
        layout: RowLayout,
        logits: torch.Tensor,
        sampling: SamplingRows | None,
    ) -> tuple[ChosenTokens, ScoredTokens | None]:
        """The target's own token after each row, and where anyone wants them log-probabilities."""
        best = drawn = None
        if plan.wants_probs:
            best = self._sampler.sample_scored(logits, None)
        if sampling is None:
            drawn = best
        if drawn is None and batch.scores_emitted:
            drawn = self._sampler.sample_scored(logits, sampling, batch.fixed_orders)
        tokens = self._sampler.sample(logits, sampling) if drawn is None else drawn.tokens
        return ChosenTokens(layout, tokens, None if best is None else best.logprobs.exp()), drawn

    def _accept_one(self, chosen: ChosenTokens) -> AcceptedTokens:
        """The token after the last row of each request that emits."""
        tokens = self._runner.step_ops.commit(chosen.layout, chosen.targets, self._state)
        per_request = chosen.layout.per_request
        return AcceptedTokens(per_request[EMITS], per_request[Q_LEN], tokens)

    def _confirm_drafts(
        self,
        plan: StepPlan,
        chosen: ChosenTokens,
        logits: torch.Tensor,
        sampling: SamplingRows | None,
        drawn: ScoredTokens | None,
    ) -> tuple[ConfirmedDrafts, ChosenTokens, ScoredTokens | None]:
        """The drafts confirmed, and what is then emitted after the rows, as `_choose` says it."""
        target = TargetRows(chosen.layout, chosen.targets, logits, sampling)
        confirmed, emitted = self._confirm(target, max(plan.max_pending, plan.max_accepted))
        if emitted is None:
            return confirmed, chosen, drawn
        if drawn is not None:
            drawn = self._sampler.score(logits, sampling, drawn, emitted)
        return confirmed, replace(chosen, targets=emitted), drawn

    def _accept_run(
        self, plan: StepPlan, chosen: ChosenTokens, confirmed: ConfirmedDrafts
    ) -> AcceptedTokens:
        """Confirmed drafts and the token after them, of a chain or of a path of a tree."""
        layout, targets, state = chosen.layout, chosen.targets, self._state
        num_unconfirmed = None
        if not all(plan.counts.emits_only_confirmed):
            num_unconfirmed = self._drafter.num_unconfirmed(chosen)
        if self._kv is not None:
            rows = layout.per_request[ROW]
            self._kernels.move_kept_kv(
                self._kv,
                self._table.req_to_token,
                rows,
                state.committed[rows],
                confirmed.path,
                confirmed.num_confirmed,
            )
        return self._runner.step_ops.commit_run(
            layout, targets, confirmed, num_unconfirmed, plan.max_accepted, state
        )

    def _record(
        self,
        rows: torch.Tensor,
        layout: RowLayout,
        targets: torch.Tensor,
        accepted: AcceptedTokens,
    ) -> None:
        """Accepted tokens count for penalties; rows [R] int64."""
        adjustments = self._state.adjustments
        if accepted.path is None:  # one of each row read
            counts = accepted.accept_lens[layout.reads.request].int()
            adjustments.record(layout.reads.rows, targets, counts)
            return
        tokens = accepted.next_token_ids
        columns = torch.arange(tokens.shape[1], device=rows.device)
        counts = (columns < accepted.accept_lens[:, None]).int()
        repeated = rows[:, None].expand_as(tokens)
        adjustments.record(repeated.flatten(), tokens.flatten(), counts.flatten())

    def _emitted_logprobs(self, step: ComputedStep, drawing: _Drawing) -> LogprobTensors | None:
        batch, drawn = step.batch, drawing.drawn
        if batch.logprobs is None or drawn is None or not batch.scores_emitted:
            return None
        layout, accepted = step.chosen.layout, step.accepted
        queries, wanted = emitted_queries(batch.logprobs, layout, accepted)
        return self._sampler.query(drawing.logits, drawing.sampling, drawn, queries, wanted)


def _result(
    batch: ScheduleBatch,
    record: StepRecord,
    accepted: AcceptedTokens,
    makers: DraftMakers | None,
    emitted_logprobs: LogprobTensors | None = None,
    prompt_logprobs: LogprobTensors | None = None,
    hidden: torch.Tensor | None = None,
) -> GenerationBatchResult:
    """Returns what the scheduler is told of a step. Its copy to the host begins here."""
    plan = record.plan
    accept_lens, kept_lens = accepted.accept_lens, accepted.kept_lens
    if plan.counts.is_plain and batch.constraint is None:
        # The host knows these: nothing more is copied from the device.
        accept_lens = torch.tensor(batch.emits, dtype=torch.int64)
        kept_lens = torch.tensor(plan.counts.q_lens)
    return GenerationBatchResult(
        next_token_ids=accepted.next_token_ids,
        accept_lens=accept_lens,
        kept_lens=kept_lens,
        emitted_logprobs=emitted_logprobs,
        prompt_logprobs=prompt_logprobs,
        hidden_states=hidden,
        num_drafts=accepted.num_drafts,
        makers=makers,
        draft_length=plan.draft_length,
        paths=accepted.path if plan.wants_paths else None,
        record=record,
    )
