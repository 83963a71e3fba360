"""Pickled weights of trainers on this machine: who may send them, and the process that reads them.

See `control/pickle_process.py`, which is that process.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from sglang.srt.control.bodies import (
    BUCKET,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.control.body_reading import make_body
from sglang.srt.control.client import ControlClient
from sglang.srt.control.pickle_process import ReadPickle, Refused
from sglang.srt.control.pickle_records import MAX_PICKLE_BYTES
from sglang.srt.entrypoints.tensor_file import private_file
from sglang.srt.framed_process import FramedProcess
from sglang.srt.frontend.errors import RequestError, ServiceError, field_error
from sglang.srt.sent_tensors import SentTensors
from sglang.srt.server_args import ServerArgs

PickledTensors: TypeAlias = UpdateWeightsFromTensorReqInput | Sequence[str | bytes]
MODULE = "sglang.srt.control.pickle_process"
FIELD = "serialized_named_tensors"
TIMEOUT_S = 120.0
FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "via")
NOT_ALLOWED = (
    "pickles are not read unless the server is started with --allow-pickled-weights and"
    " --admin-api-key; or send the weights as safetensors: base64 in `safetensors`, a file of"
    " /dev/shm in `shared_memory`, or raw as application/octet-stream"
)
NOT_LOCAL = (
    "are taken from this machine alone, by 127.0.0.1 or ::1 and no proxy; send the weights as"
    " safetensors"
)


def pickled_request(
    named_tensors: Any, load_format: str | None, options: Mapping[str, Any]
) -> UpdateWeightsFromTensorReqInput | None:
    """The request of a caller in Python, if it gives no tensors but what a trainer has pickled: a
    request, or a list of pickles, which may be in base64.

    Raises:
        RequestError: if a field is wrong.
    """
    if isinstance(named_tensors, UpdateWeightsFromTensorReqInput):
        options, load_format = msgspec.structs.asdict(named_tensors), named_tensors.load_format
        named_tensors = named_tensors.serialized_named_tensors
    if not isinstance(named_tensors, list | tuple) or not named_tensors:
        return None
    if not all(isinstance(entry, str | bytes) for entry in named_tensors):
        return None
    texts = [
        entry if isinstance(entry, str) else base64.b64encode(entry).decode()
        for entry in named_tensors
    ]
    fields = {**options, FIELD: texts, "load_format": load_format}
    return make_body(UpdateWeightsFromTensorReqInput, fields)


def check_sender(server_args: ServerArgs, client: str | None, headers: Mapping[str, str]) -> None:
    """Looks at where an HTTP request with pickled weights comes from; that it has the admin's key
    is known before.

    Args:
        client: the address of the other end of the connection.
        headers: names in any case.

    Raises:
        RequestError: with status 403 if it may not send any.
    """
    check_allowed(server_args)
    is_forwarded = any(name in headers for name in FORWARDING_HEADERS)
    if is_forwarded or not _is_loopback(client):
        raise RequestError(FIELD, f"{FIELD}: {NOT_LOCAL}.", 403)


def check_allowed(server_args: ServerArgs) -> None:
    """
    Raises:
        RequestError: unless the operator has allowed pickled weights.
    """
    if not server_args.allow_pickled_weights:
        raise field_error(FIELD, NOT_ALLOWED)


async def update_from_pickles(
    control: ControlClient,
    body: UpdateWeightsFromTensorReqInput,
    max_bytes: int,
    directory: Path,
) -> dict[str, Any]:
    """Reads pickled weights in a process of their own and has the scheduler take them.

    Args:
        max_bytes: of weights in host memory.
        directory: for their file, where shared memory is missing or too small.

    Raises:
        RequestError: if they are refused.
        ServiceError: as `ControlClient.call`, and with status 503 if they cannot be stored.
    """
    pickled = _only_pickle(body.serialized_named_tensors or ())
    try:
        with private_file(max_bytes, directory) as path:
            request = ReadPickle(
                pickled=pickled,
                is_bucket=body.load_format == BUCKET,
                path=str(path),
                max_bytes=max_bytes,
                key=bytes(multiprocessing.current_process().authkey),
            )
            return await control.call(body.update(await asyncio.to_thread(_read, request)))
    except OSError as error:
        raise ServiceError(f"The weights cannot be stored: {error.strerror}.", 503) from error


def _only_pickle(entries: Sequence[str]) -> bytes:
    """The pickle of this server's one rank."""
    if len(entries) != 1:
        raise field_error(FIELD, "must have one entry for each rank, and this server has one rank")
    [entry] = entries
    if len(entry) > MAX_PICKLE_BYTES * 4 // 3 + 4:
        raise RequestError(FIELD, f"{FIELD}: its entry is larger than a pickle may be.", 413)
    try:
        return base64.b64decode(entry, validate=True)
    except (binascii.Error, ValueError):
        raise field_error(FIELD, "must be base64 of what MultiprocessingSerializer makes") from None


def _read(request: ReadPickle) -> SentTensors:
    """In a thread: what a process of its own finds."""
    process = FramedProcess(MODULE)
    try:
        process.send(msgspec.msgpack.encode(request))
        answer = process.receive(time.monotonic() + TIMEOUT_S)
    except EOFError:
        raise field_error(FIELD, "the process that reads them has ended over these") from None
    finally:
        process.close()
    if answer is None:
        reason = f"they cannot be read in {TIMEOUT_S:g} s; keep the tensors until the answer"
        raise field_error(FIELD, reason)
    found = msgspec.msgpack.decode(answer, type=SentTensors | Refused)
    if isinstance(found, Refused):
        raise field_error(FIELD, f"a pickle is refused: {found.reason}")
    return found


def _is_loopback(client: str | None) -> bool:
    try:
        address = ipaddress.ip_address(client or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
