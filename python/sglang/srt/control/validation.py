"""The rules of control calls, in one place for routes and Engine.

Every check raises `RequestError` naming the field that breaks a rule; nothing is sent then.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
from collections.abc import Mapping

from sglang.srt.control.bodies import make_body, query_fields
from sglang.srt.frontend.body_parsing import RequestError, field_error, shorten
from sglang.srt.frontend.request_limits import check_encodable, check_short_text
from sglang.srt.messages.control import (
    AbortReqInput,
    FromBytes,
    FromDirectory,
    FromFile,
    FromGroup,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    PauseMode,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightSource,
    WeightUpdateOptions,
)

MODES: dict[str, PauseMode] = {
    "abort": "abort",
    "retract": "retract",
    "in_place": "in_place",
    "in-place": "in_place",
    "drain": "drain",
}
BACKENDS = ("gloo", "nccl")
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
MAX_PAUSE_S = 86_400.0
MAX_WAIT_S = 3_600.0
MAX_LABEL_CHARS = 128
MAX_MESSAGE_CHARS = 512
MAX_HOST_CHARS = 253
MAX_PATH_CHARS = 4_096
MAX_WORLD_SIZE = 4_096
MAX_TENSORS = 65_536
MAX_NAME_CHARS = 512
MAX_DTYPE_CHARS = 32
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**40
MAX_WEIGHT_BYTES = 2**32 - 1  # what one message can hold
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class AbortBody(AbortReqInput, kw_only=True):
    """Body of `/abort_request`.

    Attributes:
        abort_message: what the finish reason of the ended requests says.
    """

    abort_message: str | None = None


# ---------------------------------------------------------------- pause, abort, flush


def check_pause(body: PauseGenerationReqInput) -> PauseMode:
    """Checks a pause; returns its mode in the spelling of messages."""
    mode = MODES.get(body.mode)
    if mode is None:
        raise field_error("mode", f"must be one of {', '.join(MODES)}")
    _check_seconds("lease_s", body.lease_s, MAX_PAUSE_S)
    _check_seconds("drain_timeout_s", body.drain_timeout_s, MAX_PAUSE_S)
    if body.drain_timeout_s is not None and mode != "drain":
        raise field_error("drain_timeout_s", "goes with mode drain only")
    if body.lease_end != "continue" and body.lease_s is None:
        raise field_error("lease_end", "goes with lease_s only")
    return mode


def check_abort(body: AbortBody, max_label_chars: int) -> None:
    """Checks which requests are to be ended. As in SGLang no rid, or an empty one, names none."""
    if body.abort_message is not None:
        if len(body.abort_message) > MAX_MESSAGE_CHARS:
            raise field_error("abort_message", f"must have at most {MAX_MESSAGE_CHARS} characters")
        check_encodable("abort_message", body.abort_message)
    if body.abort_all or not (body.rid or body.prefix):
        return
    if not body.rid:
        raise field_error("rid", "give the beginning of a rid, or abort_all: true")
    check_short_text("rid", body.rid, max_label_chars)


def check_flush_timeout(value: str | float, field: str = "timeout") -> float:
    """Seconds that a flush may wait for requests to end: 0 to `MAX_WAIT_S`."""
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= MAX_WAIT_S:
        raise field_error(field, f"must be a number of seconds from 0 to {MAX_WAIT_S:g}")
    return seconds


def _check_seconds(field: str, value: float | None, most: float) -> None:
    if value is not None and not 0 < value <= most:  # NaN is neither
        raise field_error(field, f"must be more than 0 and at most {most:g} seconds")


# ---------------------------------------------------------------- weights


def check_update_options(options: WeightUpdateOptions) -> None:
    """Checks what all weight updates share."""
    if options.weight_version is not None:
        check_label("weight_version", options.weight_version)


def options_of_query(query: Mapping[str, str]) -> WeightUpdateOptions:
    """The options of a body of raw bytes, from the URL; `true` and `false`, or 1 and 0."""
    options = make_body(WeightUpdateOptions, query_fields(query))
    check_update_options(options)
    return options


def disk_source(body: UpdateWeightFromDiskReqInput) -> WeightSource:
    """Where `/update_weights_from_disk` reads."""
    check_update_options(body)
    _check_text("model_path", body.model_path, MAX_PATH_CHARS)
    return FromDirectory(body.model_path)


def tensor_source(body: UpdateWeightsFromTensorReqInput, max_bytes: int) -> WeightSource:
    """Where `/update_weights_from_tensor` reads.

    Args:
        max_bytes: size of the decoded weights at most.
    """
    check_update_options(body)
    if (body.safetensors is None) == (body.shared_memory is None):
        raise field_error("safetensors", "give it or shared_memory, and not both")
    if body.shared_memory is not None:
        name = body.shared_memory
        if not SHARED_MEMORY_NAME.fullmatch(name) or name in (".", ".."):
            raise field_error(
                "shared_memory",
                f"must be the name of a file in {SHARED_MEMORY}: 1 to 128 of A-Z a-z 0-9 . _ -",
            )
        return FromFile(os.path.join(SHARED_MEMORY, name))
    try:
        data = base64.b64decode(body.safetensors or "", validate=True)
    except (binascii.Error, ValueError):
        raise field_error("safetensors", "must be base64 of a safetensors file") from None
    return bytes_source(data, max_bytes, "safetensors")


def bytes_source(data: bytes, max_bytes: int, field: str | None = None) -> WeightSource:
    """Weights that came with the request itself."""
    if not data:
        raise RequestError(field, "There are no bytes; send those of a safetensors file.")
    most = min(max_bytes, MAX_WEIGHT_BYTES)
    if len(data) > most:
        message = f"The weights are larger than {most} bytes (--max-weight-bytes)."
        raise RequestError(field, message, 413)
    return FromBytes(data)


def distributed_source(body: UpdateWeightsFromDistributedReqInput) -> WeightSource:
    """What `/update_weights_from_distributed` receives."""
    check_update_options(body)
    check_label("group_name", body.group_name)
    if not 0 < len(body.names) <= MAX_TENSORS:
        raise field_error("names", f"must have 1 to {MAX_TENSORS} entries")
    for name, values in (("dtypes", body.dtypes), ("shapes", body.shapes)):
        if len(values) != len(body.names):
            raise field_error(name, "must have one entry for each of names")
    if len(set(body.names)) < len(body.names):
        raise field_error("names", "must not name a tensor twice")
    for index, name in enumerate(body.names):
        _check_text(f"names[{index}]", name, MAX_NAME_CHARS)
        _check_text(f"dtypes[{index}]", body.dtypes[index], MAX_DTYPE_CHARS)
        _check_shape(f"shapes[{index}]", body.shapes[index])
    return FromGroup(body.group_name, body.names, body.dtypes, body.shapes)


def _check_shape(field: str, shape: list[int]) -> None:
    if len(shape) > MAX_DIMENSIONS:
        raise field_error(field, f"must have at most {MAX_DIMENSIONS} dimensions")
    if any(size < 1 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise field_error(field, f"must be positive sizes of at most {MAX_ELEMENTS} elements")


def check_group(body: InitWeightsUpdateGroupReqInput) -> None:
    """Checks a group that is to be joined."""
    check_label("group_name", body.group_name)
    _check_text("master_address", body.master_address, MAX_HOST_CHARS)
    if not 1 <= body.master_port <= 65_535:
        raise field_error("master_port", "must be from 1 to 65535")
    if not 2 <= body.world_size <= MAX_WORLD_SIZE:
        raise field_error("world_size", f"must be from 2 to {MAX_WORLD_SIZE}")
    if not 1 <= body.rank_offset < body.world_size:
        raise field_error("rank_offset", "must be at least 1 (0 is the trainer) and < world_size")
    if body.backend not in BACKENDS:
        raise field_error("backend", f"must be one of {', '.join(BACKENDS)}")
    _check_seconds("timeout_s", body.timeout_s, MAX_WAIT_S)


def check_label(field: str, value: str) -> None:
    """Checks the name of a group or of a version of the weights."""
    _check_text(field, value, MAX_LABEL_CHARS)


def check_tags(tags: list[str] | None) -> None:
    """Checks which kinds of memory are meant."""
    if tags is None:
        return
    if not tags or len(tags) > len(MEMORY_TAGS):
        raise field_error("tags", "must name some kinds of memory once each, or be null for all")
    for tag in tags:
        if tag not in MEMORY_TAGS:
            raise field_error("tags", f"{shorten(tag)} is not one of {', '.join(MEMORY_TAGS)}")
    if len(set(tags)) < len(tags):
        raise field_error("tags", "must name each kind of memory once")


def _check_text(field: str, value: str, max_chars: int) -> None:
    if not 0 < len(value) <= max_chars:
        raise field_error(field, f"must have 1 to {max_chars} characters")
    check_encodable(field, value)
    if not value.isprintable():
        raise field_error(field, "must have printable characters only")
