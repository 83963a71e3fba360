"""Checks what one request of the storm was given against what it must get."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from sglang.srt.messages.requests import PositionLogprobs, TokenizedGenerateReqInput
from sglang.srt.tokenizer import NUM_CONTEXT_IDS
from storm_oracle import MASK, NEAR_TIE, Expectation, Rows, Stretch, expected_end, stop_matches
from utils import Collected

LOGPROB_TOLERANCE = 1e-3
HIDDEN_TOLERANCE = 1e-3


class StormFailure(AssertionError):
    """Something that the storm found."""


@dataclass(frozen=True)
class Job:
    """A request of a round, and what has happened to the weights while it lived.

    Attributes:
        stretches: where its weights or KV changed.
        labels: labels of the weights, each with the number of outputs that the request had then.
    """

    request: TokenizedGenerateReqInput
    stretches: list[Stretch]
    labels: list[tuple[str, int]]


def require(holds: bool, text: str) -> None:
    if not holds:
        raise StormFailure(text)


def check_request(job: Job, outcome: Collected, eos_ids: frozenset[int]) -> Counter[str]:
    """Checks one request; returns what there was to see.

    Raises:
        StormFailure: if anything is not as it must be.
    """
    request, params = job.request, job.request.sampling_params
    require(outcome.num_ends == 1, f"{outcome.num_ends} final answers")
    require(len(outcome.options) == 1, "options were sent more than once")
    context_ids = request.input_ids[-NUM_CONTEXT_IDS:]
    require(outcome.options[0].context_ids == context_ids, f"{outcome.options[0].context_ids}")
    reason, tokens = outcome.finish_reason, outcome.token_ids
    assert reason is not None
    own = frozenset(params.stop_token_ids or ())
    stop_ids = own | eos_ids if params.ends_at_eos else own
    prompt = request.input_ids
    end = expected_end(params, prompt, tokens, stop_ids)
    if reason.type == "abort":
        require(reason.status_code in (None, 503), f"aborted: {reason}")
        require(end == "" or not tokens, f"aborted, but its end was {end!r}: {tokens}")
    else:
        require(end == reason.type, f"ended by {reason}, not {end!r}: {tokens}")
        is_true = reason.type != "stop" or stop_matches(reason, params, prompt, tokens)
        require(is_true, f"{reason}")
    if params.mtp_enabled:
        require(sum(outcome.step_lens) == len(tokens), f"steps {outcome.step_lens} of {tokens}")
        require(max(outcome.step_lens, default=1) <= params.mtp_k, f"steps {outcome.step_lens}")
    if params.speculative.is_off:
        require(not outcome.accept_histogram, f"drafts {outcome.accept_histogram} of none")
    _check_labels(job, outcome)
    expectation = Expectation(request, stop_ids, job.stretches, tokens, outcome.step_lens)
    rows = expectation.rows()
    seen = _check_tokens(expectation, rows, outcome)
    _check_logprobs(expectation, rows, outcome)
    _check_hidden(expectation, rows, outcome)
    seen[reason.type] += 1
    seen["refused"] += reason.status_code == 503
    seen["tokens"] += len(tokens)
    seen["retractions"] += outcome.num_retractions
    seen["cached tokens"] += outcome.cached_tokens
    if params.mtp_enabled and any(length > 1 for length in outcome.step_lens):
        seen["verified leaps" if params.mtp_verify else "unverified leaps"] += 1
    seen["without drafts"] += params.speculative.is_off and len(tokens) > 1
    seen["mixed KV"] += any(stretch.num_kept for stretch in job.stretches)
    return seen


def _check_tokens(expectation: Expectation, rows: Rows, outcome: Collected) -> Counter[str]:
    seen: Counter[str] = Counter()
    tokens = outcome.token_ids
    right = expectation.chosen(rows.logits)
    require(len(right) == len(tokens), f"{len(tokens)} tokens, rows for {len(right)}")
    for place, (token, wanted) in enumerate(zip(tokens, right, strict=True)):
        if token == wanted:
            continue
        require(
            expectation.is_near_tie(rows.logits[place], place, token, wanted),
            f"token {place} is {token}, alone it is {wanted}; {tokens}, alone {right}",
        )
        seen["near-ties"] += 1
    for index, (length, margin) in enumerate(zip(rows.step_lens, rows.margins, strict=True)):
        given = outcome.step_lens[index]
        is_clipped = index == len(rows.step_lens) - 1 and given < length
        if given == length or (is_clipped and expected_clip(outcome)):
            continue
        require(margin <= NEAR_TIE, f"step {index} gave {given} tokens, alone {length}")
        seen["near-ties"] += 1
    return seen


def expected_clip(outcome: Collected) -> bool:
    """Tells whether the last step's tokens may have been cut: the request ended by itself."""
    return outcome.finish_reason is not None and outcome.finish_reason.type != "abort"


def _check_labels(job: Job, outcome: Collected) -> None:
    """The label of each token is that of the weights that served when it was made."""
    spans = outcome.weight_spans.get("target", [])
    starts = [start for _, start in spans]
    require(starts[:1] == [0] and starts == sorted(set(starts)), f"weight spans {spans}")
    for place in range(len(outcome.token_ids)):
        label = [name for name, start in spans if start <= place][-1]
        wanted = [name for name, start in job.labels if start <= place][-1]
        require(label == wanted, f"token {place} is labelled {label}: {spans}, not {job.labels}")


def _check_logprobs(expectation: Expectation, rows: Rows, outcome: Collected) -> None:
    options, prompt = expectation.request.logprobs, expectation.request.input_ids
    if options is None:
        require(not outcome.output_logprobs and not outcome.input_logprobs, "logprobs unasked for")
        return
    tokens = outcome.token_ids
    given = [position.token_id for position in outcome.output_logprobs]
    require(given == tokens, f"logprobs of {given}, tokens {tokens}")
    logprobs = expectation.logprobs(rows.logits)
    for row, position in zip(logprobs, outcome.output_logprobs, strict=True):
        _check_position(expectation, row, position)
    scored = [position.token_id for position in outcome.input_logprobs]
    wanted = prompt[options.start_len + 1 :]
    is_whole = bool(tokens) or expected_clip(outcome)
    require(scored == wanted[: len(scored)], f"logprobs of prompt tokens {scored}, not {wanted}")
    require(not is_whole or scored == wanted, f"logprobs of prompt tokens {scored}, not {wanted}")
    if rows.prompt_logits is not None:
        for row, position in zip(rows.prompt_logits[options.start_len :], outcome.input_logprobs):
            allowed = row.clone()
            allowed[MASK] = -torch.inf
            _check_position(expectation, allowed.log_softmax(-1), position)


def _check_position(
    expectation: Expectation, row: torch.Tensor, position: PositionLogprobs
) -> None:
    """Compares a position with log-probabilities [V]."""
    options = expectation.request.logprobs
    assert options is not None
    best = row.topk(options.top_num).values.tolist()
    wanted = [float(row[position.token_id]), *best, *(float(row[i]) for i in options.token_ids)]
    assert position.logprob is not None
    given = [position.logprob, *position.top_logprobs, *position.chosen]
    require(len(given) == len(wanted), f"{position} has not what was asked for")
    pairs = zip(given, wanted, strict=True)
    is_close = all(a == b or abs(a - b) <= LOGPROB_TOLERANCE for a, b in pairs)
    require(is_close, f"logprobs {given}, alone {wanted}")


def _was_cut_short(outcome: Collected) -> bool:
    """Tells whether a request may have ended while it was read again after a retraction."""
    reason = outcome.finish_reason
    return outcome.num_retractions > 0 and reason is not None and reason.type == "abort"


def _check_hidden(expectation: Expectation, rows: Rows, outcome: Collected) -> None:
    kind, states = expectation.request.hidden_states, outcome.hidden_states
    num_prompt, num_tokens = len(expectation.request.input_ids), len(outcome.token_ids)
    if kind == "none":
        require(not states, "hidden states unasked for")
        return
    wanted = rows.hidden
    if kind == "last":
        if expectation.is_unverified:
            return  # one per step; which token it is of depends on what the step kept
        wanted = None if wanted is None else wanted[num_prompt - 1 :]
        count = num_tokens or len(states)
    elif expectation.is_unverified:  # what the last step gave has no KV, and so no state
        count = num_prompt + sum(outcome.step_lens[:-1]) if num_tokens else len(states)
        if _was_cut_short(outcome):  # it may have been fed again up to any token before the last
            count = min(max(count, len(states)), num_prompt + num_tokens - 1)
        wanted = None if wanted is None else wanted[:count]
    else:
        count = num_prompt + num_tokens - 1 if num_tokens else len(states)
    require(len(states) == count, f"{len(states)} hidden states of {kind}, not {count}")
    if wanted is None or not num_tokens or not states:
        return
    difference = float((torch.tensor(states) - wanted).abs().max())
    require(difference <= HIDDEN_TOLERANCE, f"hidden states differ by {difference}")
