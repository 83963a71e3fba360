"""Bodies of control calls, from JSON or keywords: our fields, and those that SGLang's clients add.

Trainers send whole structs of SGLang. Fields of these that this server does without are accepted in
each body and then ignored, if their values ask for no other behaviour. `SGLANG_FIELDS` is the only
list of them; any other unknown field is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from sglang.srt.control.bodies import (
    BeginWeightUpdateReqInput,
    RollbackWeightUpdateReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from sglang.srt.control.inspection_bodies import StartProfileReqInput
from sglang.srt.control.pause_bodies import (
    MemoryOccupationReqInput,
)
from sglang.srt.frontend.body_parsing import convert_fields
from sglang.srt.frontend.errors import RequestError, field_error, shorten
from sglang.srt.sglang_surface import is_neutral

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field without an effect here.

    Attributes:
        neutral: values that are accepted, beside null, false and empty; None: all are.
        reason: the error for any other value.
    """

    neutral: tuple[Any, ...] | None = None
    reason: str = ""

    def accepts(self, value: Any) -> bool:
        return self.neutral is None or is_neutral(value, self.neutral)


# In the order in which they are checked, before everything else.
SGLANG_FIELDS: dict[str, Ignored] = {
    "serialized_named_tensors": Ignored(
        (), "goes with the JSON body of /update_weights_from_tensor alone"
    ),
    "load_format": Ignored(
        ("auto", "safetensors"),
        "must be auto or safetensors; nothing else is read, so send tensors one by one",
    ),
    "selector": Ignored(
        ("target", "all"), "must be target or all here; updates of weights take draft too"
    ),
    "is_async": Ignored((False,), "must be false: an update is answered when it is done"),
    "disable_draft_model": Ignored(),
    "torch_empty_cache": Ignored(),
    "keep_pause": Ignored(),
    "token_step": Ignored(),
    "recapture_cuda_graph": Ignored(),
    "crash_on_error": Ignored(),
    "post_load_weights": Ignored(),
    "rid": Ignored((), "names a request to generate; leave it out"),
    "http_worker_ipc": Ignored((), "belongs to SGLang's own processes; leave it out"),
    "manifest": Ignored((), "is not read: the checkpoint's own names and shapes are checked"),
    "abort_all_request": Ignored(
        (False,), "must be true or false, and true only where abort_all_requests is a field"
    ),
}
MISSPELT_ABORT, ABORT = "abort_all_request", "abort_all_requests"  # the first is some clients'
# Fields of single bodies beside these.
MORE_FIELDS: dict[type, dict[str, Ignored]] = {
    StartProfileReqInput: dict.fromkeys(
        (
            "start_step",
            "profile_by_stage",
            "profile_stages",
            "merge_profiles",
            "profile_prefix",
            "profile_id",
        ),
        Ignored((), "is not supported here; leave it out"),
    ),
    # Each update of the session says which models it is of.
    BeginWeightUpdateReqInput: {
        "selector": Ignored(("target", "draft", "all"), "must be target, draft or all")
    },
    # verl's: whether to reset a store of KV outside of the server, and there is none.
    MemoryOccupationReqInput: {"reset_connector": Ignored()},
}
OWN_CALLS = (RollbackWeightUpdateReqInput,)  # SGLang has no such call
ONE_TENSOR = {"name": "names", "dtype": "dtypes", "shape": "shapes"}  # of SGLang before 0.4.9
DECIMALS = ("master_port",)  # numbers that some trainers send as strings
MAX_DECIMAL_DIGITS = 9


def make_body(struct: type[S], fields: Mapping[str, Any]) -> S:
    """Makes a body from parsed JSON, or from keywords; null stands for a field's default.

    Raises:
        RequestError: naming the field that is unknown, not supported, of a wrong type, out of
            range or at odds with another.
    """
    known = struct.__struct_fields__
    given = _with_right_name(fields) if ABORT in known else dict(fields)
    if struct is UpdateWeightsFromDistributedReqInput:
        given = _with_lists(given)
    ignored_fields = {} if struct in OWN_CALLS else SGLANG_FIELDS | MORE_FIELDS.get(struct, {})
    for name, ignored in ignored_fields.items():
        if name in given and name not in known and not ignored.accepts(given[name]):
            raise field_error(name, ignored.reason)
    for name in given:
        if name not in known and name not in ignored_fields:
            raise field_error(shorten(name), "is not a known field")
    values = {
        name: _number(value) if name in DECIMALS else value
        for name, value in given.items()
        if name in known and value is not None
    }
    try:
        return convert_fields(values, struct)
    except RequestError as error:
        raise _name_choices(error, struct) from None


def _name_choices(error: RequestError, struct: type[msgspec.Struct]) -> RequestError:
    """Returns the error with the list of allowed values in place of the wrong one."""
    field = error.field or ""
    if "invalid enum value" not in error.message:
        return error
    choices = _literals(get_type_hints(struct)[field.partition("[")[0]])
    return field_error(field, f"must be one of {', '.join(map(str, choices))}")


def _literals(hint: Any) -> list[Any]:
    """The values of every `Literal` in a type."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [value for part in get_args(hint) for value in _literals(part)]


def query_fields(query: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of a URL's query: `true`, `false`, 1 and 0 are booleans, except in a
    label."""
    words = {"true": True, "1": True, "false": False, "0": False}
    return {
        name: value if name == "weight_version" else words.get(value.lower(), value)
        for name, value in query.items()
    }


def _with_right_name(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with a client's other spelling of `abort_all_requests` put right; true
    wins."""
    if fields.get(MISSPELT_ABORT) is not True:
        return dict(fields)
    given = {name: value for name, value in fields.items() if name != MISSPELT_ABORT}
    return {**given, ABORT: True}


def _with_lists(fields: dict[str, Any]) -> dict[str, Any]:
    """Turns the fields of one tensor into lists with one entry, unless there are lists."""
    if not ONE_TENSOR.keys() <= fields.keys() or fields.keys() & set(ONE_TENSOR.values()):
        return fields
    return {
        ONE_TENSOR.get(name, name): [value] if name in ONE_TENSOR else value
        for name, value in fields.items()
    }


def _number(value: Any) -> Any:
    """Returns a decimal string as a number, and any other value unchanged."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_DECIMAL_DIGITS:
        return value
    return int(value) if value.isascii() and value.isdecimal() else value
