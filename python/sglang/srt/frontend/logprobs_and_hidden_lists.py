"""The lists of a sample's `meta_info`: its log-probabilities and hidden states."""

from __future__ import annotations

import base64
import itertools
from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.messages.requests import (
    PositionLogprobs,
    ReqTextOutput,
    TokenizedGenerateReqInput,
)

ID_BYTES = 4  # of an int32


class LogprobsAndHiddenLists:
    """Log-probabilities and hidden states of one sample so far, in SGLang's shapes.

    Args:
        request: says which of them are wanted, and has the prompt.
        text_of_token: text of one token id; None to leave texts out.
    """

    def __init__(
        self, request: TokenizedGenerateReqInput, text_of_token: Callable[[int], str] | None
    ) -> None:
        self._logprobs = request.logprobs
        self._hidden_states = "none" if request.hidden_file else request.hidden_states
        self._num_prompt_tokens = len(request.input_ids)
        token_ids = [] if request.logprobs is None else request.logprobs.token_ids
        self._input = LogprobLists(text_of_token, token_ids)
        self._output = LogprobLists(text_of_token, token_ids)
        self._hidden: list[list[float]] = []
        self._hidden_news: list[bytes] = []
        if request.logprobs is not None:
            first_id = request.input_ids[request.logprobs.start_len]
            self._input.news.append(PositionLogprobs(token_id=first_id, logprob=None))

    @property
    def are_wanted(self) -> bool:
        """Tells whether any are wanted."""
        return self._logprobs is not None or self._hidden_states != "none"

    @property
    def take_long(self) -> bool:
        """Tells whether there may be so many that `meta_info` takes long."""
        return self._logprobs is not None or self._hidden_states == "all"

    def add(self, output: ReqTextOutput) -> None:
        self._input.news += output.input_logprobs
        self._output.news += output.output_logprobs
        self._hidden_news += output.hidden_states

    def meta_info(self, is_last: bool) -> dict[str, Any]:
        """Returns the fields of `meta_info` that were asked for. Long lists take long.

        Args:
            is_last: the sample has ended; only then the tokens that filters kept are returned.
        """
        wanted, fields = self._logprobs, dict[str, Any]()
        if wanted is not None:
            for name, lists in (("input", self._input), ("output", self._output)):
                lists.take_news()
                fields[f"{name}_token_logprobs"] = list(lists.tokens)
                if wanted.top_num:
                    fields[f"{name}_top_logprobs"] = list(lists.top)
                if wanted.token_ids:
                    fields[f"{name}_token_ids_logprobs"] = list(lists.chosen)
            if wanted.kept and is_last:
                fields |= kept_tokens_fields(self._output.kept)
        news, self._hidden_news = self._hidden_news, []
        self._hidden += (array("f", row).tolist() for row in news)
        if self._hidden_states == "last":
            fields["hidden_states"] = list(self._hidden)
        elif self._hidden_states == "all":
            # The rows of the prompt are one entry together; the row of each generated token is one
            # more.
            split = self._num_prompt_tokens
            fields["hidden_states"] = [self._hidden[:split], *self._hidden[split:]]
        return fields


def kept_tokens_fields(kept: list[bytes]) -> dict[str, str]:
    """Returns the tokens that filters kept at each position in slime's form, base64 of int32: all
    ids one after the other, and the offsets where each position begins and the last one ends."""
    ends = itertools.accumulate((len(ids) // ID_BYTES for ids in kept), initial=0)
    fields = {"top_p_token_ids": b"".join(kept), "top_p_token_offsets": array("i", ends).tobytes()}
    return {name: base64.b64encode(data).decode() for name, data in fields.items()}


class LogprobLists:
    """Logprobs of the prompt, or of the output: one entry per position in each list.

    Attributes:
        news: positions that are not in the lists of the answer yet; building the answer adds them.
    """

    def __init__(self, text_of_token: Callable[[int], str] | None, token_ids: list[int]) -> None:
        self._text_of_token = text_of_token
        self._token_ids = token_ids
        self.news: list[PositionLogprobs] = []
        self.tokens: list[list[Any]] = []
        self.top: list[list[list[Any]] | None] = []
        self.chosen: list[list[list[Any]] | None] = []
        self.kept: list[bytes] = []

    def take_news(self) -> None:
        news, self.news = self.news, []
        for position in news:
            self._add(position)

    def _add(self, position: PositionLogprobs) -> None:
        text_of_token = self._text_of_token

        def entry(logprob: float | None, token_id: int) -> list[Any]:
            text = None if text_of_token is None else text_of_token(token_id)
            return [logprob, token_id, text]

        has_logprob = position.logprob is not None
        self.tokens.append(entry(position.logprob, position.token_id))
        top = zip(position.top_logprobs, position.top_ids, strict=True)
        self.top.append([entry(*item) for item in top] if has_logprob else None)
        self.kept.append(position.kept or b"")
        chosen = zip(position.chosen, self._token_ids, strict=True) if has_logprob else ()
        self.chosen.append([entry(*item) for item in chosen] if has_logprob else None)
