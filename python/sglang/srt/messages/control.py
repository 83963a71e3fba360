"""Control messages between front end and scheduler.

The bodies of the control routes, with their rules, are in `control/bodies.py`. `requests.py` has
the other messages and the unions that sockets take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from sglang.srt.sent_tensors import SentTensors, WeightSelector

PauseMode = Literal["abort", "retract", "in_place", "drain"]
LeaseEnd = Literal["continue", "abort"]
SessionAction = Literal["begin", "commit", "rollback"]
TARGET_MODEL, DRAFT_MODEL = "target", "draft"  # whose weights have labels
DEFAULT_WEIGHT_VERSION = "default"
CONTROL_TIMEOUT_S = 60.0
ABORT_MESSAGE = "The request was aborted."  # where the client gave no reason
WEIGHTS_TIMEOUT_S = 600.0  # after the reading of a checkpoint, or a broadcast


def version_field(model: str) -> str:
    """Names the field of answers that has the label of a model's weights."""
    return "weight_version" if model == TARGET_MODEL else f"{model}_weight_version"


class Message(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Base of all messages between processes."""


# ---------------------------------------------------------------- front end -> scheduler


class CallMessage(Message, kw_only=True):
    """Base of the calls that are answered by a `ControlReply` with the same `call_id`.

    Attributes:
        call_id: given by the `ControlClient` that sends the call.
        verdict: what a client's answer has beside the reply's message and fields.
    """

    verdict: ClassVar[dict[str, Any]] = {"success": True}
    call_id: int = 0

    @property
    def reply_timeout_s(self) -> float | None:
        """Returns how long the front end waits for the reply; None for any time."""
        return CONTROL_TIMEOUT_S


class PauseGenerationReq(CallMessage):
    """Stops generation; answered when the engine has stopped. See `PauseGenerationReqInput`."""

    verdict = {"status": "ok"}
    mode: PauseMode
    lease_s: float | None = None
    lease_end: LeaseEnd = "continue"
    drain_timeout_s: float | None = None

    @property
    def reply_timeout_s(self) -> float | None:
        """A drain without a limit takes as long as the requests do."""
        if self.mode != "drain":
            return CONTROL_TIMEOUT_S
        return None if self.drain_timeout_s is None else self.drain_timeout_s + CONTROL_TIMEOUT_S


class ContinueGenerationReq(CallMessage):
    """Ends a pause; nothing happens if there is none."""

    verdict = {"status": "ok"}


class AbortReq(Message):
    """Ends requests, partial output included. One of req_ids, rid (exact) or abort_all.

    Attributes:
        aborted_message: why, for the clients; null for `ABORT_MESSAGE`.
    """

    req_ids: list[int] = []
    rid: str | None = None
    abort_all: bool = False
    finished_reason: dict[str, Any] | None = None
    aborted_message: str | None = None


class FlushCacheReqInput(Message):
    """Empties the prefix cache; refused, after `timeout_s`, while requests hold KV or run.

    The name is SGLang's. In `control/bodies.py` such names are bodies; this is a message.
    """

    call_id: int
    timeout_s: float = 0.0


class GetInternalStateReq(Message):
    """Asks for `internal_states` of `/server_info`."""

    call_id: int


class HealthPing(Message):
    """Goes round scheduler, detokenizer and front end: each must be alive and looping."""

    call_id: int


class FromDirectory(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """A complete checkpoint on disk.

    Attributes:
        draft_path: one of the draft model, to be taken with it; empty: none.
    """

    path: str
    draft_path: str = ""


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


DEFAULT_GROUP = "weight_update_group"  # also means the only group that there is


class FromGroup(msgspec.Struct, tag=True, frozen=True):
    """A broadcast by rank 0 of a group that the scheduler has joined."""

    group_name: str
    names: list[str]
    dtypes: Sequence[str]
    shapes: list[list[int]]


WeightSource = FromDirectory | FromFile | FromBytes | FromGroup | SentTensors


class WeightUpdateCall(CallMessage, kw_only=True):
    """Base of the calls that take new weights over. See `WeightUpdateOptions`."""

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False

    @property
    def reply_timeout_s(self) -> float | None:
        """Running requests may have to finish first, which takes as long as it takes."""
        return None


class UpdateWeightsReq(WeightUpdateCall):
    """Reads weights and checks them; takes them over at once, or stages them in a session.

    Attributes:
        selector: the models that they may be of. See `WeightUpdateOptions`.
    """

    source: WeightSource
    selector: WeightSelector = "all"


class WeightSessionReq(WeightUpdateCall):
    """Begins, commits or rolls back a weight update of several parts."""

    action: SessionAction


class UpdateWeightVersionReq(CallMessage):
    """A new label for the weights as they are."""

    new_version: str
    abort_all_requests: bool = False

    @property
    def reply_timeout_s(self) -> float | None:
        return WEIGHTS_TIMEOUT_S


class GroupAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a group that a trainer has opened. See `InitWeightsUpdateGroupReqInput`."""

    master_address: str
    master_port: int
    rank: int
    world_size: int
    backend: str
    timeout_s: float


class WeightGroupReq(CallMessage):
    """Joins a group of a trainer (`join`), or leaves it (null)."""

    group_name: str
    join: GroupAddress | None = None

    @property
    def reply_timeout_s(self) -> float | None:
        return CONTROL_TIMEOUT_S + (0.0 if self.join is None else self.join.timeout_s)


class MemoryOccupationReq(CallMessage):
    """Gives memory back, or takes it again. `tags`: null for all there are."""

    action: Literal["release", "resume"]
    tags: Sequence[str] | None = None

    @property
    def reply_timeout_s(self) -> float | None:
        return WEIGHTS_TIMEOUT_S


class GetWeightsByNameReq(CallMessage):
    """Asks for the values of one weight. See `GetWeightsByNameReqInput`."""

    verdict = {}
    name: str
    truncate_size: int


class CheckWeightsReq(CallMessage):
    """Notes, compares or resets weights. See `CheckWeightsReqInput`."""

    action: Literal["snapshot", "compare", "reset"]
    selector: WeightSelector | None = None

    @property
    def reply_timeout_s(self) -> float | None:
        return WEIGHTS_TIMEOUT_S


class StartProfileReq(CallMessage):
    """Begins a profile of the steps. See `StartProfileReqInput`; an empty `output_dir` is null."""

    output_dir: str
    num_steps: int
    activities: list[str]
    with_stack: bool
    record_shapes: bool


class StopProfileReq(CallMessage):
    """Ends the profile and writes it."""

    @property
    def reply_timeout_s(self) -> float | None:
        return WEIGHTS_TIMEOUT_S


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
    """`internal_state` is `internal_states[0]` of `/server_info`."""

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


ControlCall = (
    PauseGenerationReq
    | ContinueGenerationReq
    | UpdateWeightsReq
    | WeightSessionReq
    | UpdateWeightVersionReq
    | WeightGroupReq
    | MemoryOccupationReq
    | GetWeightsByNameReq
    | CheckWeightsReq
    | StartProfileReq
    | StopProfileReq
)
ControlRequest = ControlCall | AbortReq | FlushCacheReqInput | GetInternalStateReq
ControlOutput = ControlReply | FlushCacheReqOutput | GetInternalStateReqOutput | EngineStatus
