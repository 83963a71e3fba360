"""The bodies of control calls: every field with its type and range, and the rules of each body.
Here are those about weights; `pause_bodies.py` and `inspection_bodies.py` have the others.

`body_reading.make_body` makes a body of JSON or keywords, for routes and Engine alike.
`__post_init__` checks the rules that a type cannot express, and raises `RequestError` with the
field's name. `message` makes the message for the scheduler.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sglang.srt.control.pause_bodies import MAX_WAIT_S, check_printable
from sglang.srt.frontend.errors import RequestError, field_error
from sglang.srt.messages.control import (
    DEFAULT_GROUP,
    FromBytes,
    FromDirectory,
    FromFile,
    FromGroup,
    GroupAddress,
    UpdateWeightsReq,
    UpdateWeightVersionReq,
    WeightGroupReq,
    WeightSessionReq,
    WeightSource,
)
from sglang.srt.sent_tensors import (
    DTYPE_BYTES,
    MAX_NAME_CHARS,
    MAX_SIZE,
    MAX_TENSORS,
    SHARED_MEMORY,
    WeightSelector,
)

MAX_WEIGHT_BYTES = 2**32 - 1  # the most that one message can hold
BUCKET = "flattened_bucket"
SHARED_MEMORY_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

FolderName = Annotated[str, Meta(min_length=1, max_length=4_096)]
Label = Annotated[str, Meta(min_length=1, max_length=128)]
TensorName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Dtype = Literal[
    "float32",
    "bfloat16",
    "float16",
    "int64",
    "torch.float32",
    "torch.bfloat16",
    "torch.float16",
    "torch.int64",
]
Shape = Annotated[list[Annotated[int, Meta(ge=1)]], Meta(max_length=8)]
GroupBackend = Literal["gloo", "nccl"]


class TakeOverOptions(msgspec.Struct, kw_only=True):
    """The fields that all bodies of calls share that take new weights over.

    Attributes:
        weight_version: new label of the weights; null keeps the old one.
        flush_cache: empty the prefix cache too. Old entries never match, flushed or not.
        abort_all_requests: when the new weights are taken over, first end all requests with
            their partial output.
    """

    weight_version: Label | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False

    def __post_init__(self) -> None:
        check_printable(weight_version=self.weight_version)

    def _options(self) -> dict[str, Any]:
        return {
            "weight_version": self.weight_version,
            "flush_cache": self.flush_cache,
            "abort_all_requests": self.abort_all_requests,
        }


class WeightUpdateOptions(TakeOverOptions, kw_only=True):
    """The fields that all bodies of weight updates share.

    Attributes:
        selector: the models that the weights may be of: `target`, `draft` (a head or a draft
            model) or `all`, where names of the draft model's weights begin with `draft.`.
    """

    selector: WeightSelector = "all"

    def update(self, source: WeightSource) -> UpdateWeightsReq:
        """Makes the message of an update from `source`."""
        return UpdateWeightsReq(source=source, selector=self.selector, **self._options())


class UpdateWeightFromDiskReqInput(WeightUpdateOptions, kw_only=True):
    """Body of `/update_weights_from_disk`: a complete checkpoint of safetensors.

    Attributes:
        model_path: the target's, or with selector `draft` the draft model's.
        draft_model_path: with selector `all` a checkpoint of the draft model, taken over together
            with the target's; null: the draft model keeps its weights.
    """

    model_path: FolderName
    draft_model_path: FolderName | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_printable(model_path=self.model_path, draft_model_path=self.draft_model_path)
        if self.draft_model_path is not None and self.selector != "all":
            raise field_error(
                "draft_model_path",
                "goes with selector all; with selector draft the folder is model_path",
            )

    def message(self) -> UpdateWeightsReq:
        return self.update(FromDirectory(self.model_path, self.draft_model_path or ""))


class UpdateWeightsFromTensorReqInput(WeightUpdateOptions, kw_only=True):
    """Body of `/update_weights_from_tensor`: any subset of the weights, in one of three forms.

    Attributes:
        safetensors: the bytes of a safetensors file, in base64.
        shared_memory: name of a file in /dev/shm of this host that holds those bytes.
        serialized_named_tensors: one entry, for the server's one rank: tensors serialized by
            SGLang's `MultiprocessingSerializer`, in base64. Empty: not given.
        load_format: `flattened_bucket` if a pickle is such a bucket, otherwise it holds tensors
            with names. Data that are no pickle say it themselves.
    """

    safetensors: str | None = None
    shared_memory: str | None = None
    serialized_named_tensors: list[str] | None = None
    load_format: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (self.safetensors, self.shared_memory, self.serialized_named_tensors or None)
        if sum(source is not None for source in given) != 1:
            raise field_error(
                "safetensors", "give it, shared_memory or serialized_named_tensors, and one only"
            )
        formats = ("auto", "safetensors", *([BUCKET] if self.serialized_named_tensors else []))
        if (self.load_format or "auto") not in formats:
            raise field_error(
                "load_format",
                f"must be auto, safetensors, or {BUCKET} with serialized_named_tensors;"
                " nothing else is read, so send tensors one by one",
            )
        name = self.shared_memory
        if name is None:
            return
        if not SHARED_MEMORY_NAME.fullmatch(name) or name in (".", ".."):
            raise field_error(
                "shared_memory",
                f"must be the name of a file in {SHARED_MEMORY}: 1 to 128 of A-Z a-z 0-9 . _ -",
            )

    def source(self, max_bytes: int) -> WeightSource:
        """Returns the source of the weights, at most `max_bytes` once decoded."""
        if self.shared_memory is not None:
            return FromFile(str(SHARED_MEMORY / self.shared_memory))
        try:
            data = base64.b64decode(self.safetensors or "", validate=True)
        except (binascii.Error, ValueError):
            raise field_error("safetensors", "must be base64 of a safetensors file") from None
        if not data:
            text = "There are no bytes; send those of a safetensors file."
            raise RequestError("safetensors", text)
        most = min(max_bytes, MAX_WEIGHT_BYTES)
        if len(data) > most:
            text = f"The weights are larger than {most} bytes (--max-weight-bytes)."
            raise RequestError("safetensors", text, 413)
        return FromBytes(data)


class UpdateWeightsFromDistributedReqInput(WeightUpdateOptions, kw_only=True):
    """Body of `/update_weights_from_distributed`: the tensors that rank 0 of the group broadcasts,
    in order.

    Each of the lists has one entry for each tensor; shapes are of sizes from 1 on. Clients of older
    SGLang send one tensor as `name`, `dtype` and `shape`.

    Attributes:
        group_name: the default also names the only group, whatever its name.
    """

    names: Annotated[list[TensorName], Meta(min_length=1, max_length=MAX_TENSORS)]
    dtypes: list[Dtype]
    shapes: list[Shape]
    group_name: Label = DEFAULT_GROUP

    def __post_init__(self) -> None:
        super().__post_init__()
        check_printable(group_name=self.group_name)
        for field, num_entries in (("dtypes", len(self.dtypes)), ("shapes", len(self.shapes))):
            if num_entries != len(self.names):
                raise field_error(field, "must have one entry for each of names")
        if len(set(self.names)) < len(self.names):
            raise field_error("names", "must not name a tensor twice")
        for index, name in enumerate(self.names):
            check_printable(**{f"names[{index}]": name})
            value_bytes = DTYPE_BYTES[self.dtypes[index].removeprefix("torch.")]
            if math.prod(self.shapes[index]) * value_bytes > MAX_SIZE:
                raise field_error(f"shapes[{index}]", f"must be of up to {MAX_SIZE} bytes")

    def message(self) -> UpdateWeightsReq:
        return self.update(FromGroup(self.group_name, self.names, self.dtypes, self.shapes))


class InitWeightsUpdateGroupReqInput(msgspec.Struct, kw_only=True):
    """Body of `/init_weights_update_group`: joins the group that a trainer has opened.

    Attributes:
        rank_offset: this server's rank in the group; the trainer has rank 0.
        timeout_s: for joining, and later for each tensor.
    """

    master_address: Annotated[str, Meta(min_length=1, max_length=253)]
    master_port: Annotated[int, Meta(ge=1, le=65_535)]
    rank_offset: Annotated[int, Meta(ge=1)]
    world_size: Annotated[int, Meta(ge=2, le=4_096)]
    group_name: Label = DEFAULT_GROUP
    backend: GroupBackend = "gloo"
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_WAIT_S)] = 60.0

    def __post_init__(self) -> None:
        check_printable(group_name=self.group_name, master_address=self.master_address)
        if self.rank_offset >= self.world_size:
            raise field_error(
                "rank_offset", "must be at least 1 (0 is the trainer) and < world_size"
            )

    def message(self) -> WeightGroupReq:
        join = GroupAddress(
            master_address=self.master_address,
            master_port=self.master_port,
            rank=self.rank_offset,
            world_size=self.world_size,
            backend=self.backend,
            timeout_s=self.timeout_s,
        )
        return WeightGroupReq(group_name=self.group_name, join=join)


class DestroyWeightsUpdateGroupReqInput(msgspec.Struct, kw_only=True):
    """Body of `/destroy_weights_update_group`.

    Attributes:
        group_name: the default also names the only group, whatever its name.
    """

    group_name: Label = DEFAULT_GROUP

    def __post_init__(self) -> None:
        check_printable(group_name=self.group_name)

    def message(self) -> WeightGroupReq:
        return WeightGroupReq(group_name=self.group_name)


class BeginWeightUpdateReqInput(msgspec.Struct, kw_only=True):
    """Body of `/begin_weight_update`."""

    def message(self) -> WeightSessionReq:
        return WeightSessionReq(action="begin")


class CommitWeightUpdateReqInput(TakeOverOptions, kw_only=True):
    """Body of `/commit_weight_update` (and `/end_weight_update`)."""

    def message(self) -> WeightSessionReq:
        return WeightSessionReq(action="commit", **self._options())


class RollbackWeightUpdateReqInput(msgspec.Struct, kw_only=True):
    """Body of `/rollback_weight_update`."""

    def message(self) -> WeightSessionReq:
        return WeightSessionReq(action="rollback")


class UpdateWeightVersionReqInput(msgspec.Struct, kw_only=True):
    """Body of `/update_weight_version`: a new label for the present weights."""

    new_version: Label
    abort_all_requests: bool = True

    def __post_init__(self) -> None:
        check_printable(new_version=self.new_version)

    def message(self) -> UpdateWeightVersionReq:
        return UpdateWeightVersionReq(
            new_version=self.new_version, abort_all_requests=self.abort_all_requests
        )
