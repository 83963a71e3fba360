"""What a client wants back beside text: log-probabilities and hidden states, checked and answered;
and the other options that a prompt has of its own (priority, cache key)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sglang.srt.frontend.body_parsing import field_error
from sglang.srt.messages.requests import LogprobOptions, PositionLogprobs, ReqTextOutput
from sglang.srt.sglang_surface import is_neutral

RETURN_FIELDS = frozenset(
    (
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "return_text_in_logprobs",
        "return_hidden_states",
        "priority",
        "cache_salt",
        "extra_key",
    )
)
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ReturnLimits:
    """What one prompt may ask for."""

    vocab_size: int
    max_top_logprobs: int
    max_token_ids_logprob: int
    max_key_chars: int
    allow_hidden_states: bool
    allow_priority: bool = True


@dataclass(frozen=True, slots=True)
class ReturnOptions:
    """Options of one prompt.

    Attributes:
        logprob_start_len: first prompt position wanted, -1 for outputs only; None for no logprobs.
        hidden_states: `none`, `all` rows fed, or the `last` row of each step.
    """

    logprob_start_len: int | None = None
    top_num: int = 0
    token_ids: tuple[int, ...] = ()
    with_text: bool = False
    hidden_states: Literal["none", "all", "last"] = "none"
    priority: int = 0
    cache_key: tuple[str, str] = ("", "")

    def logprobs_for(self, num_prompt_tokens: int) -> LogprobOptions | None:
        """What the scheduler is asked for, once the prompt's length is known.

        Raises:
            RequestError: if logprob_start_len is outside the prompt.
        """
        start = self.logprob_start_len
        if start is None:
            return None
        if start >= num_prompt_tokens:
            raise field_error(
                "logprob_start_len", f"must be less than the prompt's {num_prompt_tokens} tokens"
            )
        last = num_prompt_tokens - 1
        return LogprobOptions(
            start_len=last if start == -1 else start,
            top_num=self.top_num,
            token_ids=list(self.token_ids),
        )


def check_return_options(
    fields: dict[str, Any], num_prompts: int, is_batch: bool, limits: ReturnLimits
) -> list[ReturnOptions]:
    """One entry per prompt; a value that is no list holds for all of them.

    Raises:
        RequestError: naming the field that breaks a rule.
    """
    wants = _per_prompt(fields, "return_logprob", num_prompts, is_batch, False)
    starts = _per_prompt(fields, "logprob_start_len", num_prompts, is_batch, -1)
    tops = _per_prompt(fields, "top_logprobs_num", num_prompts, is_batch, 0)
    ids = _token_ids(fields.get("token_ids_logprob"), num_prompts, is_batch)
    with_text = _flag(fields, "return_text_in_logprobs")
    hidden = _hidden_states(fields.get("return_hidden_states"), limits)
    priority = _integer(fields.get("priority") or 0, "priority", -MAX_PRIORITY, MAX_PRIORITY)
    if priority and not limits.allow_priority:
        raise field_error("priority", "start the server with --enable-priority-scheduling")
    keys = (_key(fields, "extra_key", limits), _key(fields, "cache_salt", limits))
    options = []
    token_ids: tuple[int, ...] = ()
    for index in range(num_prompts):
        start = _integer(starts[index], "logprob_start_len", -1, MAX_PRIORITY)
        top_num = _integer(tops[index], "top_logprobs_num", 0, limits.max_top_logprobs)
        if not isinstance(wants[index], bool):
            raise field_error("return_logprob", "must be true or false, or a list of them")
        if index == 0 or ids[index] is not ids[index - 1]:
            token_ids = _checked_ids(ids[index], limits)
        options.append(
            ReturnOptions(
                start if wants[index] else None,
                min(top_num, limits.vocab_size),
                token_ids,
                with_text,
                hidden,
                priority,
                keys,
            )
        )
    return options


def _per_prompt(
    fields: dict[str, Any], name: str, num_prompts: int, is_batch: bool, default: Any
) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        return [default if value in (None, []) else value] * num_prompts
    if not is_batch:
        raise field_error(name, "must be one value for one prompt")
    if len(value) != num_prompts:
        raise field_error(name, f"has {len(value)} entries for {num_prompts} prompts")
    return value


def _token_ids(value: Any, num_prompts: int, is_batch: bool) -> list[Any]:
    """One list of ids per prompt; a plain list of ids holds for all of them."""
    if value is None:
        return [[]] * num_prompts
    if not isinstance(value, list):
        raise field_error("token_ids_logprob", "must be a list of token ids, or of such lists")
    if not any(isinstance(item, list) for item in value):
        return [value] * num_prompts
    if not is_batch or len(value) != num_prompts:
        raise field_error(
            "token_ids_logprob", f"has {len(value)} lists of ids for {num_prompts} prompts"
        )
    return value


def _checked_ids(ids: Any, limits: ReturnLimits) -> tuple[int, ...]:
    name = "token_ids_logprob"
    if not isinstance(ids, list):
        raise field_error(name, "must be a list of token ids, or of such lists")
    if len(ids) > limits.max_token_ids_logprob:
        most = limits.max_token_ids_logprob
        raise field_error(name, f"has {len(ids)} ids, more than {most} (--max-token-ids-logprob)")
    return tuple(_integer(item, name, 0, limits.vocab_size - 1) for item in ids)


def _integer(value: Any, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise field_error(name, f"must be an integer from {low} to {high}")
    return value


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise field_error(name, "must be true or false")
    return value


def _hidden_states(value: Any, limits: ReturnLimits) -> Literal["none", "all", "last"]:
    if is_neutral(value, ()):
        return "none"
    if value is not True and value != "last":
        raise field_error("return_hidden_states", 'must be true, false or "last"')
    if not limits.allow_hidden_states:
        raise field_error(
            "return_hidden_states", "start the server with --enable-return-hidden-states"
        )
    return "all" if value is True else "last"


def _key(fields: dict[str, Any], name: str, limits: ReturnLimits) -> str:
    value = fields.get(name)
    if is_neutral(value, ()):
        return ""
    if not isinstance(value, str) or len(value) > limits.max_key_chars:
        raise field_error(name, f"must be a string of at most {limits.max_key_chars} characters")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise field_error(name, "holds half a surrogate pair, which is not text")
    return value


class Returns:
    """Log-probabilities and hidden states of one sample so far, in SGLang's shapes.

    Args:
        input_ids: the prompt.
        decode: text of one token id.
    """

    def __init__(
        self, options: ReturnOptions, input_ids: list[int], decode: Callable[[int], str]
    ) -> None:
        self._options = options
        self._num_prompt_tokens = len(input_ids)
        text_of = decode if options.with_text else None
        self._input = _Side(text_of, options.token_ids)
        self._output = _Side(text_of, options.token_ids)
        self._hidden: list[list[float]] = []
        logprobs = options.logprobs_for(len(input_ids))
        if logprobs is not None:
            first = PositionLogprobs(token_id=input_ids[logprobs.start_len], logprob=None)
            self._input.news.append(first)

    @property
    def has_logprobs(self) -> bool:
        return self._options.logprob_start_len is not None

    def add(self, output: ReqTextOutput) -> None:
        self._input.news += output.input_logprobs
        self._output.news += output.output_logprobs
        self._hidden += output.hidden_states

    def meta_info(self) -> dict[str, Any]:
        """The fields of `meta_info` that were asked for. Many log-probabilities take long."""
        options, fields = self._options, dict[str, Any]()
        if options.logprob_start_len is not None:
            for name, side in (("input", self._input), ("output", self._output)):
                side.take_news()
                fields[f"{name}_token_logprobs"] = list(side.tokens)
                if options.top_num:
                    fields[f"{name}_top_logprobs"] = list(side.top)
                if options.token_ids:
                    fields[f"{name}_token_ids_logprobs"] = list(side.chosen)
        if options.hidden_states == "last":
            fields["hidden_states"] = list(self._hidden)
        elif options.hidden_states == "all":
            # The prompt's rows are one entry, each generated token's row another.
            split = self._num_prompt_tokens
            fields["hidden_states"] = [self._hidden[:split], *self._hidden[split:]]
        return fields


class _Side:
    """Logprobs of the prompt, or of the output.

    Attributes:
        news: positions that are not in the lists of the answer yet; that is done when it is built.
    """

    def __init__(self, decode: Callable[[int], str] | None, token_ids: tuple[int, ...]) -> None:
        self._decode = decode
        self._token_ids = token_ids
        self.news: list[PositionLogprobs] = []
        self.tokens: list[list[Any]] = []
        self.top: list[list[list[Any]] | None] = []
        self.chosen: list[list[list[Any]] | None] = []

    def take_news(self) -> None:
        news, self.news = self.news, []
        for position in news:
            self._add(position)

    def _add(self, position: PositionLogprobs) -> None:
        decode = self._decode

        def entry(logprob: float | None, token_id: int) -> list[Any]:
            return [logprob, token_id, decode(token_id) if decode is not None else None]

        has_logprob = position.logprob is not None
        self.tokens.append(entry(position.logprob, position.token_id))
        self.top.append([entry(*item) for item in position.top] if has_logprob else None)
        chosen = zip(position.chosen, self._token_ids, strict=True) if has_logprob else ()
        self.chosen.append([entry(*item) for item in chosen] if has_logprob else None)
