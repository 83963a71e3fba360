"""`serialized_named_tensors` of trainers: data of this package's `MultiprocessingSerializer`, or
pickles.

The first come from everyone who may change the weights. Pickles are read, if they are allowed and
come from this machine, by a process of their own (`control/pickle_process.py`).
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
from typing import Any, NamedTuple, TypeAlias

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
from sglang.srt.plain_tensors import MAGIC, TEXT_MAGIC, decode_tensors
from sglang.srt.sent_tensors import SentTensors, TensorsRefused
from sglang.srt.server_args import ServerArgs

SerializedTensors: TypeAlias = UpdateWeightsFromTensorReqInput | Sequence[str | bytes]
MODULE = "sglang.srt.control.pickle_process"
FIELD = "serialized_named_tensors"
TIMEOUT_S = 120.0
FORWARDING_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
NOT_ALLOWED = (
    "pickles are not read unless the server is started with --allow-pickled-weights and"
    " --admin-api-key; or make them by MultiprocessingSerializer of this package, which the"
    " trainer finds at sglang.srt.utils, or send safetensors: base64 in `safetensors`, a file of"
    " /dev/shm in `shared_memory`, or raw as application/octet-stream"
)
NOT_LOCAL = (
    "pickles are taken from this machine alone, by 127.0.0.1 or ::1 and no proxy; send what"
    " MultiprocessingSerializer of this package makes, or safetensors"
)


def serialized_request(
    named_tensors: Any, load_format: str | None, options: Mapping[str, Any]
) -> UpdateWeightsFromTensorReqInput | None:
    """Makes a request for a caller in Python, if it gives no tensors but what a trainer has made
    of them: a request, or a list of what a serializer has made, which may be in base64.

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


class Sender(NamedTuple):
    """The origin of an HTTP request.

    Attributes:
        address: of the other end of the connection.
        headers: names in any case.
    """

    address: str | None
    headers: Mapping[str, str]


async def update_from_serialized(
    control: ControlClient,
    body: UpdateWeightsFromTensorReqInput,
    server_args: ServerArgs,
    directory: Path,
    sender: Sender | None = None,
) -> dict[str, Any]:
    """Has the scheduler take serialized weights.

    Args:
        directory: for their file, where shared memory is missing or too small.
        sender: of an HTTP request, whose key has been checked; None: a caller in this process.

    Raises:
        RequestError: if they are refused; with status 403 if the sender may not send pickles.
        ServiceError: as `ControlClient.call`, and with status 503 if they cannot be stored.
    """
    entries = body.serialized_named_tensors or ()
    if len(entries) != 1:
        raise field_error(FIELD, "must have one entry for each rank, and this server has one rank")
    [entry] = entries
    max_bytes, num_bytes = server_args.max_weight_bytes, len(entry)
    if not entry.startswith(TEXT_MAGIC):
        _check_pickle(entry, server_args, sender)
        num_bytes = max_bytes  # it names memory that is copied
    try:
        with private_file(num_bytes, directory) as path:
            sent = await asyncio.to_thread(_read_entry, entry, body, path, max_bytes)
            return await control.call(body.update(sent))
    except OSError as error:
        raise ServiceError(f"The weights cannot be stored: {error.strerror}.", 503) from error


def _check_pickle(entry: str, server_args: ServerArgs, sender: Sender | None) -> None:
    if not server_args.allow_pickled_weights:
        raise field_error(FIELD, NOT_ALLOWED)
    if sender is not None:
        is_forwarded = any(name in sender.headers for name in FORWARDING_HEADERS)
        if is_forwarded or not _is_loopback(sender.address):
            raise RequestError(FIELD, f"{FIELD}: {NOT_LOCAL}.", 403)
    if len(entry) > MAX_PICKLE_BYTES * 4 // 3 + 4:
        raise RequestError(FIELD, f"{FIELD}: its entry is larger than a pickle may be.", 413)


def _read_entry(
    entry: str, body: UpdateWeightsFromTensorReqInput, path: Path, max_bytes: int
) -> SentTensors:
    """Reads the tensors of an entry; their host memory goes to a file that is there. Blocks."""
    try:
        data = base64.b64decode(entry, validate=True)
    except (binascii.Error, ValueError):
        raise field_error(FIELD, "must be base64 of what MultiprocessingSerializer makes") from None
    if data.startswith(MAGIC):
        return _read_plain(data, path, max_bytes)
    request = ReadPickle(
        pickled=data,
        is_bucket=body.load_format == BUCKET,
        path=str(path),
        max_bytes=max_bytes,
        key=bytes(multiprocessing.current_process().authkey),
    )
    return _read(request)


def _read_plain(data: bytes, path: Path, max_bytes: int) -> SentTensors:
    try:
        plain = decode_tensors(data)
    except TensorsRefused as error:
        raise field_error(FIELD, f"its entry is refused: {error}") from None
    if plain.form == "tensor":
        raise field_error(FIELD, "its entry is one tensor without a name; send pairs, or a bucket")
    if len(plain.host) > max_bytes:
        text = f"The weights are larger than {max_bytes} bytes (--max-weight-bytes)."
        raise RequestError(FIELD, text, 413)
    with path.open("r+b") as file:
        file.write(plain.host)
    return SentTensors(str(path) if plain.host else "", plain.memories, plain.tensors)


def _read(request: ReadPickle) -> SentTensors:
    """Has a process of its own read a pickle. Blocks."""
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
        raise field_error(FIELD, f"its entry is refused: {found.reason}")
    return found


def _is_loopback(client: str | None) -> bool:
    try:
        address = ipaddress.ip_address(client or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
