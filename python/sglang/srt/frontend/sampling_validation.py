"""Makes checked `SamplingParams` of a `sampling_params` object."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sglang.srt.frontend.body_parsing import check_known_fields, convert_fields
from sglang.srt.frontend.errors import RequestError, field_error, shorten
from sglang.srt.frontend.request_limits import (
    RequestLimits,
    check_encodable,
    check_text_allowed,
    check_token_ids,
)
from sglang.srt.frontend.speculative_field import SPECULATIVE, check_speculative, read_speculative
from sglang.srt.frontend.unknown_fields import UnknownFields
from sglang.srt.sampling.grammar import GRAMMAR_FIELDS, Grammar
from sglang.srt.sampling.sampling_params import (
    INT64_MAX,
    INT64_MIN,
    MTP_STRATEGY_RULE,
    SamplingParams,
)
from sglang.srt.sglang_surface import is_neutral, neutral_fields
from sglang.srt.stop_expressions import check_size

MAX_ID_DIGITS = 9
MTP_PREFIX = "mtp_"
STRATEGY_FIELDS = ("mtp_strategy", "mtp_conf_threshold")
DEFAULT_MTP_K = SamplingParams().mtp_k
MAY_BE_EMPTY = frozenset(("stop", "stop_regex", "stop_token_ids", "logit_bias"))
# A request's grammar replaces the server's, and decides by itself where the output ends.
ENDED_BY_GRAMMAR = frozenset((*GRAMMAR_FIELDS, "min_new_tokens"))
# Defaults of a route that unverified multi-token prediction refuses.
NOT_UNVERIFIED = frozenset(("temperature", "repetition_penalty"))
SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)
CUSTOM_PARAMS = "custom_params"
RETURN_KEPT = "return_top_p_token_ids"  # trainers send it in `custom_params`
READ_WHOLE = (SPECULATIVE, RETURN_KEPT, "deterministic")
CUSTOM_FIELDS = frozenset(name for name in SAMPLING_FIELDS if name.startswith(MTP_PREFIX)).union(
    READ_WHOLE
)
READ_IN_CUSTOM = ", ".join((f"{MTP_PREFIX}*", *READ_WHOLE))


def check_sampling_params(
    value: Any, limits: RequestLimits, name: str, defaults: Mapping[str, Any] = {}
) -> SamplingParams:
    """Checks one `sampling_params` object; null, for a field or the whole, means the defaults.

    Args:
        name: the field as the client knows it, such as `sampling_params[3]`.
        defaults: the route's values of fields that neither the object nor the server's preferred
            parameters give.

    Raises:
        RequestError: naming the field that breaks a rule.
    """
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise field_error(name, "must be an object")
    unknown, unsupported = limits.unknown_fields, neutral_fields("sampling_params")
    value, custom = take_custom_params(value, f"{name}.", unknown)
    check_known_fields(value, SAMPLING_FIELDS, unsupported, f"{name}.", unknown)
    try:
        read_speculative(value, f"{name}.", unknown)
        return _checked(value, limits, name, defaults)
    except RequestError as error:
        raise _as_written(error, f"{name}.", custom) from None


def _checked(
    value: dict[str, Any], limits: RequestLimits, name: str, defaults: Mapping[str, Any]
) -> SamplingParams:
    given = with_preferred(value, limits.preferred_sampling_params)
    given = {k: v for k, v in given.items() if k in SAMPLING_FIELDS and v is not None}
    given = {k: v for k, v in given.items() if k not in MAY_BE_EMPTY or v not in ("", [], {})}
    given = {k: v for k, v in given.items() if k not in GRAMMAR_FIELDS or v != ""}
    for key, number in given.items():
        if isinstance(number, int) and not INT64_MIN <= number <= INT64_MAX:
            raise field_error(f"{name}.{key}", "must fit in 64 bits")
    _complete_mtp(given, limits, name)
    given = {**_that_apply(defaults, given), **given}
    params = convert_fields(given, SamplingParams, f"{name}.")
    problem = params.problem()
    if problem is not None:
        field, _, reason = problem.partition(": ")
        raise field_error(f"{name}.{field}", reason)
    _check_sampling_limits(params, limits, name)
    # Rows are as wide as the vocabulary: a larger top_k keeps all.
    keeps_all = params.top_k >= limits.vocab_size
    return msgspec.structs.replace(params, top_k=-1) if keeps_all else params


def take_custom_params(
    value: dict[str, Any], prefix: str, unknown: UnknownFields
) -> tuple[dict[str, Any], set[str]]:
    """Adds those of CUSTOM_FIELDS in `custom_params` to the sampling parameters: routers pass that
    object on, but drop sampling parameters that they do not know.

    Args:
        prefix: beginning of the client's names of the fields.

    Returns:
        The parameters without that object, and the names of those that were in it.

    Raises:
        RequestError: if it is no object, or has a parameter that is given beside it too.
    """
    custom = value.get(CUSTOM_PARAMS)
    others = {name: item for name, item in value.items() if name != CUSTOM_PARAMS}
    if not isinstance(custom, dict):
        if not is_neutral(custom, ()):
            raise field_error(prefix + CUSTOM_PARAMS, "must be an object")
        return others, set()
    taken = dict[str, Any]()
    for name, item in custom.items():
        field = f"{prefix}{CUSTOM_PARAMS}.{shorten(name)}"
        if name not in CUSTOM_FIELDS:
            if not is_neutral(item, ()):
                unknown.meet(field, f"is none of those that are read there: {READ_IN_CUSTOM}")
        elif item is not None:
            if others.get(name) not in (None, item):
                raise field_error(field, f"is another value than {prefix}{name}; give one of them")
            taken[name] = item
    return {**others, **taken}, set(taken)


def _as_written(error: RequestError, prefix: str, custom: set[str]) -> RequestError:
    """Returns the error with the name of a field that the client has put into `custom_params`."""
    field = error.field or ""
    if re.split(r"[\[.]", field.removeprefix(prefix), maxsplit=1)[0] not in custom:
        return error
    written = field.replace(prefix, f"{prefix}{CUSTOM_PARAMS}.", 1)
    return error.in_terms(written, error.message.replace(field, written, 1))


def _check_sampling_limits(params: SamplingParams, limits: RequestLimits, name: str) -> None:
    stops, stop_ids = params.stop_strings, params.stop_token_ids or []
    if params.n > limits.max_n:
        raise field_error(f"{name}.n", f"must be at most {limits.max_n} (--max-n)")
    regexes = params.stop_regexes
    for field, texts in (("stop", stops), ("stop_regex", regexes)):
        if texts:
            check_text_allowed(f"{name}.{field}", limits, "give stop_token_ids")
    for field, entries in (("stop", stops), ("stop_token_ids", stop_ids), ("stop_regex", regexes)):
        if len(entries) > limits.max_stop_strings:
            raise field_error(
                f"{name}.{field}",
                f"has {len(entries)} entries, more than {limits.max_stop_strings}"
                " (--max-stop-strings)",
            )
    for stop in stops:
        check_encodable(f"{name}.stop", stop)
        if len(stop) > limits.max_stop_string_chars:
            raise field_error(
                f"{name}.stop",
                f"has an entry of {len(stop)} characters, more than"
                f" {limits.max_stop_string_chars} (--max-stop-string-chars)",
            )
    check_token_ids(f"{name}.stop_token_ids", stop_ids, limits.vocab_size)
    for expression in params.stop_regexes:
        check_encodable(f"{name}.stop_regex", expression)
        if len(expression.encode()) > limits.max_stop_regex_bytes:
            raise field_error(
                f"{name}.stop_regex",
                f"has more than {limits.max_stop_regex_bytes} bytes (--max-stop-regex-bytes)",
            )
    params.speculative = check_speculative(params.speculative, limits, f"{name}.")
    if params.deterministic and limits.deterministic_refusal is not None:
        raise field_error(f"{name}.deterministic", limits.deterministic_refusal)
    params.deterministic |= limits.all_are_deterministic
    _check_grammar(params.grammar, limits, name)
    _check_logit_bias(f"{name}.logit_bias", params.logit_bias or {}, limits)


def check_stop_sizes(params: Sequence[SamplingParams], name: str) -> None:
    """Checks the total compiled size of the stop expressions of a request's prompts.

    Raises:
        RequestError: naming the field.
    """
    try:
        check_size(text for item in params for text in item.stop_regexes)
    except ValueError as error:
        raise field_error(f"{name}.stop_regex", str(error)) from None


def _check_logit_bias(name: str, bias: dict[str, float], limits: RequestLimits) -> None:
    if len(bias) > limits.max_logit_bias:
        raise field_error(
            name, f"has {len(bias)} entries, more than {limits.max_logit_bias} (--max-logit-bias)"
        )
    for key in bias:
        is_id = key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS
        if not is_id or int(key) >= limits.vocab_size:
            raise field_error(name, f"keys must be token ids from 0 to {limits.vocab_size - 1}")


def _check_grammar(grammar: Grammar | None, limits: RequestLimits, name: str) -> None:
    """Checks a grammar as far as possible without compiling it; `GrammarCheck` does the rest."""
    if grammar is None:
        return
    field = f"{name}.{grammar.kind}"
    if limits.grammar_refusal is not None:
        raise field_error(field, limits.grammar_refusal)
    check_encodable(field, grammar.text)
    num_bytes = len(grammar.text.encode())
    if num_bytes > limits.max_grammar_bytes:
        raise field_error(
            field,
            f"has {num_bytes} bytes, more than {limits.max_grammar_bytes} (--max-grammar-bytes)",
        )


def with_preferred(value: dict[str, Any], preferred: dict[str, Any]) -> dict[str, Any]:
    """Merges a request's parameters over the server's. A request that switches multi-token
    prediction or all drafts off gets none of the server's settings of it, one that switches it on
    no `speculative`; one that brings a strategy keeps its own threshold."""
    if not preferred:
        return value
    given = {name for name, item in value.items() if item is not None}
    defaults = dict(preferred)
    if given & set(STRATEGY_FIELDS):
        defaults = {k: v for k, v in defaults.items() if k not in STRATEGY_FIELDS}
    if given & set(GRAMMAR_FIELDS):
        defaults = {k: v for k, v in defaults.items() if k not in ENDED_BY_GRAMMAR}
    choice = value.get(SPECULATIVE)
    wants_none = value.get("mtp_enabled") is None and choice is not None and choice.is_off
    if value.get("mtp_enabled") is False or wants_none:
        defaults = {k: v for k, v in defaults.items() if not k.startswith(MTP_PREFIX)}
    if value.get("mtp_enabled") is True:
        defaults.pop(SPECULATIVE, None)
    return {**defaults, **{name: value[name] for name in value if name in given}}


def _that_apply(defaults: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the defaults that are allowed beside the given parameters: a default never causes a
    refusal."""
    if given.get("mtp_enabled") is not True or given.get("mtp_verify") is True:
        return dict(defaults)
    return {name: value for name, value in defaults.items() if name not in NOT_UNVERIFIED}


def _complete_mtp(given: dict[str, Any], limits: RequestLimits, name: str) -> None:
    """Checks rules that need the raw fields, and fills in the defaults of multi-token
    prediction."""
    fields = [key for key in given if key.startswith(MTP_PREFIX)]
    if not fields:
        return
    if given.get("mtp_enabled") is not True:
        others = [key for key in fields if key != "mtp_enabled"]
        if others and given.get("mtp_enabled") in (None, False):
            raise field_error(f"{name}.{others[0]}", "needs mtp_enabled: true")
        return
    if limits.mtp_max_k == 0:
        raise field_error(f"{name}.mtp_enabled", limits.mtp_refusal)
    strategy = given.get("mtp_strategy")
    if isinstance(strategy, str):
        strategy = given["mtp_strategy"] = _read_strategy(strategy)
    if strategy is not None and (not isinstance(strategy, list) or not strategy):
        raise field_error(f"{name}.mtp_strategy", MTP_STRATEGY_RULE)
    given.setdefault("mtp_k", min(DEFAULT_MTP_K, limits.mtp_max_k))
    if type(given["mtp_k"]) is int and given["mtp_k"] > limits.mtp_max_k:
        raise field_error(f"{name}.mtp_k", f"must be at most {limits.mtp_max_k} (--mtp-max-k)")
    if given.get("mtp_verify") is not True:
        given.setdefault("temperature", 0.0)


def _read_strategy(text: str) -> list[Any]:
    """Reads a strategy from a text: a name, `conf_adapt:0.9` or JSON. Returns an empty list for any
    other text."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        value = text
    if not isinstance(value, str):
        return value if isinstance(value, list) else []
    name, separator, threshold = value.partition(":")
    if not separator:
        return [name.strip()]
    try:
        return [name.strip(), float(threshold)]
    except ValueError:
        return []


def expand_samples(params: SamplingParams) -> list[SamplingParams]:
    """Returns one set of parameters per sample; the j-th of a seeded request uses seed + j
    (int64)."""
    seed = params.sampling_seed
    if seed is None:
        return [params] * params.n
    seeds = [(seed + j - INT64_MIN) % 2**64 + INT64_MIN for j in range(params.n)]
    return [msgspec.structs.replace(params, sampling_seed=value) for value in seeds]
