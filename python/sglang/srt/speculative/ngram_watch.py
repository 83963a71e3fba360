"""Tells the host how long the matches of requests are, without waiting for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import torch

from sglang.srt.device_copies import HostCopy
from sglang.srt.speculative.ngram_tier import MatchedTier
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import HostResult, ScheduleBatch


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that has not been read.

    Attributes:
        number: of the step.
        rows: R rows of the token table.
        match_lens: on their way to the host, as the step before left them: those that the drafts of
            this one follow.
    """

    number: int
    rows: list[int]
    match_lens: HostCopy

    def read(self) -> list[int]:
        """Returns the values of all rows of the table; waits for the copy."""
        [copied] = self.match_lens.read()
        lens: list[int] = copied.tolist()
        return lens


def right_places(result: HostResult, index: int) -> Collection[int]:
    """Returns which drafts of a request were right: of a tree its nodes but the root, counted from
    0."""
    num_right = result.accept_lens[index] - 1
    if not result.paths:
        return range(num_right)
    return [node - 1 for node in result.paths[index][1 : 1 + num_right]]


class MatchWatch:
    """Copies the match lengths of each step to the host, for the policy."""

    def __init__(self, policy: MatchedTier, state: RequestRows) -> None:
        self._policy = policy
        num_rows = len(state.tokens)
        self._match_lens = torch.zeros(num_rows, dtype=torch.int64, device=state.tokens.device)
        self._known = [0] * num_rows  # by row, as of the copy of step `_known_number`
        self._known_number = self._num_steps = 0
        self._launched = deque[_Launched]()

    def note(self, rows: torch.Tensor, match_lens: torch.Tensor) -> None:
        """On the device: the matches of rows [R] are so long, [R] int64."""
        self._match_lens[rows] = match_lens

    def plan(self, batch: ScheduleBatch) -> None:
        """Tells the policy of the requests that emit in a step, before it is planned. Of a prompt
        nothing is known yet."""
        self._num_steps += 1
        copy = HostCopy([self._match_lens.clone()])
        self._launched.append(_Launched(self._num_steps, batch.rows, copy))
        arrived = [each for each in self._launched if each.match_lens.is_ready]
        if arrived:
            self._take(arrived[-1])
        lens = zip(batch.rows, batch.num_prompt_tokens, batch.emits, strict=True)
        self._policy.tell(
            [0 if num_prompt else self._known[row] for row, num_prompt, emits in lens if emits]
        )

    def observe(self, result: HostResult) -> None:
        """Hears what became of the drafts of the oldest step not heard of. The copy was made before
        that step ran, so nothing is waited for.

        Args:
            result: of trees with `paths`.
        """
        launched = self._launched.popleft()
        lens = self._take(launched)
        fed = enumerate(zip(launched.rows, result.num_drafts, strict=False))
        self._policy.learn(
            (lens[row], count, right_places(result, index)) for index, (row, count) in fed if count
        )

    def _take(self, launched: _Launched) -> list[int]:
        """Returns what the step's copy holds, or the last known values if no later copy has been
        read."""
        lens = launched.read()
        if launched.number > self._known_number:
            self._known, self._known_number = lens, launched.number
        return lens
