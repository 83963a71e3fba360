"""The grammars of a step's requests, for its worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from sglang.srt.constrained.grammar_sessions import GrammarSession, MaskQuestion
from sglang.srt.scheduling.request import LaunchedStep, Req
from sglang.srt.scheduling.step_builder import PlannedStep
from sglang.srt.step.token_constraint import AllowedTokens, DraftedTokens


def with_constraint(planned: PlannedStep, unread: LaunchedStep | None) -> PlannedStep:
    """Returns the step with a constraint: requests with a grammar get only tokens that it allows.

    Args:
        unread: the step in flight; its tokens are read before the masks are made.
    """
    restricted = [
        (index, row.req)
        for index, row in enumerate(planned.rows)
        if row.emits and row.req.grammar is not None
    ]
    if not restricted:
        return planned
    constraint = GrammarConstraint(restricted, unread)
    return replace(planned, batch=replace(planned.batch, constraint=constraint))


class GrammarConstraint:
    """The grammars of a step (`TokenConstraint`).

    Args:
        restricted: requests with a grammar, and their places in the batch.
        unread: see `with_constraint`.

    Attributes:
        requests: the places of `restricted` in the batch.
    """

    def __init__(self, restricted: list[tuple[int, Req]], unread: LaunchedStep | None) -> None:
        self.requests: Sequence[int] = [index for index, _ in restricted]
        self._reqs = [req for _, req in restricted]
        self._unread = unread
        self._questions: list[MaskQuestion] = []
        self._first_rows: list[int] = []

    def ask(self, drafted: list[DraftedTokens]) -> None:
        unread = self._unread_tokens()
        for req, drafts in zip(self._reqs, drafted, strict=True):
            session = _session_of(req)
            output = [*req.output_ids, *unread.get(req.req_id, ())]
            news = output[len(session.tokens) :]
            self._questions.append(MaskQuestion(session, news, drafts.tokens, drafts.parents))
            self._first_rows.append(drafts.first_row)
        self._questions[0].session.sessions.ask(self._questions)

    def allowed(self, is_computed: Callable[[], bool]) -> AllowedTokens:
        """Returns the masks. A request that must end because its grammar has a problem gets none,
        and its tokens are dropped."""
        sessions = self._questions[0].session.sessions
        answers = sessions.answers(self._questions, is_computed)
        rows, masks, most = list[int](), list[np.ndarray](), dict[int, int]()
        places = zip(self.requests, self._first_rows, self._questions, answers, strict=True)
        for index, first_row, question, answer in places:
            session, count = question.session, 1 + len(question.drafts)
            session.sat_out = answer is None and session.problem is None
            if answer is not None:
                found = np.frombuffer(answer, np.int32).reshape(-1, sessions.num_entries)
                rows += range(first_row, first_row + len(found))
                masks.append(found)
                if len(found) < count:
                    most[index] = 1
            elif session.sat_out:
                most[index] = 0
        if not masks:
            return AllowedTokens([], torch.zeros(0, 0, dtype=torch.int32), most)
        return AllowedTokens(rows, torch.from_numpy(np.concatenate(masks)), most)

    def _unread_tokens(self) -> dict[int, list[int]]:
        """Returns, by request, the tokens that the step in flight gives it. Waits for that step."""
        restricted = {req.req_id for req in self._reqs}
        step = self._unread
        if step is None or restricted.isdisjoint(row.req.req_id for row in step.rows):
            return {}
        result = step.result.read()
        return {
            row.req.req_id: result.next_token_ids[index][: result.accept_lens[index]]
            for index, row in enumerate(step.rows)
            if row.req.req_id in restricted
        }


def _session_of(req: Req) -> GrammarSession:
    assert req.grammar is not None
    return req.grammar
