"""Control messages between front end and scheduler, and the bodies of the control routes.

Every call carries a `call_id`; its reply carries the same one. `requests.py` has the other messages
and the unions that sockets take.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PauseMode = Literal["abort", "retract", "in_place", "drain"]
LeaseEnd = Literal["continue", "abort"]
SessionAction = Literal["begin", "commit", "rollback"]
DEFAULT_WEIGHT_VERSION = "default"


class Message(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Base of all messages between processes."""


# ---------------------------------------------------------------- bodies of HTTP routes


class PauseGenerationReqInput(msgspec.Struct, kw_only=True):
    """Body of `/pause_generation`.

    Attributes:
        mode: `abort` ends all requests with their partial output, `retract` makes running ones
            wait without KV, `in_place` freezes them, `drain` lets running ones finish first.
        lease_s: the pause ends by itself after so many seconds, unless it is asked for again.
        lease_end: whether requests go on then, or are aborted.
        drain_timeout_s: how long `drain` may take before it becomes `retract`; no limit if null.
    """

    mode: str = "abort"
    lease_s: float | None = None
    lease_end: LeaseEnd = "continue"
    drain_timeout_s: float | None = None


class ContinueGenerationReqInput(msgspec.Struct, kw_only=True):
    """Body of `/continue_generation`."""


class AbortReqInput(msgspec.Struct, kw_only=True):
    """Body of `/abort_request`: a client's rid, or all.

    Attributes:
        prefix: the rid names every request whose rid begins with it.
    """

    rid: str | None = None
    abort_all: bool = False
    prefix: bool = False


class WeightUpdateOptions(msgspec.Struct, kw_only=True):
    """What all bodies of weight updates share.

    Attributes:
        weight_version: new label of the weights; null keeps the old one.
        flush_cache: drop the prefix cache's memory too. Old entries never match, flushed or not.
        abort_all_requests: when the new weights are taken over, first end all requests with
            their partial output.
    """

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class UpdateWeightFromDiskReqInput(WeightUpdateOptions, kw_only=True):
    """Body of `/update_weights_from_disk`: a complete checkpoint of safetensors."""

    model_path: str


class UpdateWeightsFromTensorReqInput(WeightUpdateOptions, kw_only=True):
    """Body of `/update_weights_from_tensor`: one of the two; any subset of the weights.

    Attributes:
        safetensors: the bytes of a safetensors file, in base64.
        shared_memory: name of a file in /dev/shm of this host that holds them.
    """

    safetensors: str | None = None
    shared_memory: str | None = None


class UpdateWeightsFromDistributedReqInput(WeightUpdateOptions, kw_only=True):
    """Body of `/update_weights_from_distributed`: what rank 0 of the group broadcasts, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


class InitWeightsUpdateGroupReqInput(msgspec.Struct, kw_only=True):
    """Body of `/init_weights_update_group`: joins the group that a trainer has opened."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "gloo"
    timeout_s: float = 60.0


class DestroyWeightsUpdateGroupReqInput(msgspec.Struct, kw_only=True):
    """Body of `/destroy_weights_update_group`."""

    group_name: str = "weight_update_group"


class UpdateWeightVersionReqInput(msgspec.Struct, kw_only=True):
    """Body of `/update_weight_version`: a new label for the weights as they are."""

    new_version: str
    abort_all_requests: bool = True


class CommitWeightUpdateReqInput(WeightUpdateOptions, kw_only=True):
    """Body of `/commit_weight_update` (and `/end_weight_update`)."""


class MemoryOccupationReqInput(msgspec.Struct, kw_only=True):
    """Body of `/release_memory_occupation` and `/resume_memory_occupation`.

    Attributes:
        tags: of `kv_cache`, `weights` and, where graphs are held, `cuda_graph`; null: all there
            are.
    """

    tags: list[str] | None = None


# ---------------------------------------------------------------- front end -> scheduler


class PauseGenerationReq(Message):
    """Stops generation; answered when the engine has stopped. See `PauseGenerationReqInput`."""

    call_id: int
    mode: PauseMode
    lease_s: float | None = None
    lease_end: LeaseEnd = "continue"
    drain_timeout_s: float | None = None


class ContinueGenerationReq(Message):
    """Ends a pause; nothing happens if there is none."""

    call_id: int


class AbortReq(Message):
    """Ends requests, partial output included. One of req_ids, rid (exact) or abort_all."""

    req_ids: list[int] = []
    rid: str | None = None
    abort_all: bool = False
    finished_reason: dict[str, Any] | None = None
    aborted_message: str | None = None


class FlushCacheReqInput(Message):
    """Empties the prefix cache; refused, after `timeout_s`, while requests hold KV or run."""

    call_id: int
    timeout_s: float = 0.0


class GetInternalStateReq(Message):
    """Asks for `internal_states` of `/server_info`."""

    call_id: int


class HealthPing(Message):
    """Goes round scheduler, detokenizer and front end: each must be alive and looping."""

    call_id: int


class FromDirectory(msgspec.Struct, tag=True, frozen=True):
    """A complete checkpoint on disk."""

    path: str


class FromFile(msgspec.Struct, tag=True, frozen=True):
    """A safetensors file (in shared memory) with some of the weights.

    Attributes:
        delete: whether the file is this call's own, to be deleted once it is read.
    """

    path: str
    delete: bool = False


class FromBytes(msgspec.Struct, tag=True, frozen=True):
    """The bytes of a safetensors file with some of the weights."""

    data: bytes


class FromGroup(msgspec.Struct, tag=True, frozen=True):
    """A broadcast by rank 0 of a group that the scheduler has joined."""

    group_name: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


WeightSource = FromDirectory | FromFile | FromBytes | FromGroup


class UpdateWeightsReq(Message):
    """Reads weights and checks them; takes them over at once, or stages them in a session."""

    call_id: int
    source: WeightSource
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class WeightSessionReq(Message):
    """Begins, commits or rolls back a weight update of several parts."""

    call_id: int
    action: SessionAction
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class UpdateWeightVersionReq(Message):
    """A new label for the weights as they are."""

    call_id: int
    new_version: str
    abort_all_requests: bool = False


class WeightGroupReq(Message):
    """Joins a group of a trainer (`join`), or leaves it (null)."""

    call_id: int
    group_name: str
    join: InitWeightsUpdateGroupReqInput | None = None


class MemoryOccupationReq(Message):
    """Gives memory back, or takes it again. `tags`: null for all there are."""

    call_id: int
    action: Literal["release", "resume"]
    tags: list[str] | None = None


# ---------------------------------------------------------------- scheduler -> front end


class ControlReply(Message):
    """Outcome of a control call.

    Attributes:
        message: for the client; the reason, where `success` is false.
        status_code: of HTTP, where `success` is false.
        fields: what the reply has beside the message.
    """

    call_id: int
    success: bool
    message: str
    status_code: int = 400
    fields: dict[str, Any] = {}


class FlushCacheReqOutput(Message):
    """Outcome of a flush; `flushed_items` is the number of tokens that the tree dropped."""

    call_id: int
    success: bool
    flushed_items: int = 0
    error_msg: str = ""


class GetInternalStateReqOutput(Message):
    """Fields of DESIGN's `internal_states[0]`."""

    call_id: int
    internal_state: dict[str, Any]


class EngineStatus(Message):
    """Pushed whenever it changes, ahead of the reply to the call that changed it.

    Attributes:
        stopped: why new requests do not run now; empty while they do.
        is_frozen: none runs, so none will end by itself.
        weight_version: label of the weights.
        in_weight_session: whether a weight update has begun and not ended.
    """

    stopped: str = ""
    is_frozen: bool = False
    weight_version: str = DEFAULT_WEIGHT_VERSION
    in_weight_session: bool = False


ControlRequest = (
    PauseGenerationReq
    | ContinueGenerationReq
    | AbortReq
    | FlushCacheReqInput
    | GetInternalStateReq
    | UpdateWeightsReq
    | WeightSessionReq
    | UpdateWeightVersionReq
    | WeightGroupReq
    | MemoryOccupationReq
)
ControlOutput = ControlReply | FlushCacheReqOutput | GetInternalStateReqOutput | EngineStatus
