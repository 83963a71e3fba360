"""The control calls that are one message for one JSON body: their routes, as a table.

`control_routes.py` serves and documents them, `access.py` keeps them for the admin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import msgspec

from sglang.srt.control.bodies import (
    BeginWeightUpdateReqInput,
    CommitWeightUpdateReqInput,
    DestroyWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqInput,
    RollbackWeightUpdateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.control.inspection_bodies import (
    CheckWeightsReqInput,
    GetWeightsByNameReqInput,
    StartProfileReqInput,
    StopProfileReqInput,
)
from sglang.srt.control.pause_bodies import (
    ContinueGenerationReqInput,
    MemoryOccupationReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.messages.control import ControlCall

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class CallRoute(Generic[S]):
    """A POST route of a control call.

    Attributes:
        body: what the JSON is made into; it may be missing where no field is required.
        message: what the scheduler gets for a body.
        description: for `/openapi.json`.
        reports_success: errors too have `success` and `message`, as SGLang's weight updates.
        alias: method and path of a second route that does the same and is not documented.
        answer: the field of the reply that is the whole answer; None: message and fields are.
    """

    path: str
    body: type[S]
    message: Callable[[S], ControlCall]
    description: str
    _: KW_ONLY
    reports_success: bool = True
    alias: tuple[str, str] | None = None
    answer: str | None = None


CALL_ROUTES: tuple[CallRoute[Any], ...] = (
    CallRoute(
        "/pause_generation",
        PauseGenerationReqInput,
        PauseGenerationReqInput.message,
        "Stops generation; answers when the engine has stopped.",
        reports_success=False,
    ),
    CallRoute(
        "/continue_generation",
        ContinueGenerationReqInput,
        ContinueGenerationReqInput.message,
        "Ends a pause.",
        reports_success=False,
    ),
    CallRoute(
        "/update_weights_from_disk",
        UpdateWeightFromDiskReqInput,
        UpdateWeightFromDiskReqInput.message,
        "Changes all weights to those of a checkpoint of safetensors.",
    ),
    CallRoute(
        "/update_weights_from_distributed",
        UpdateWeightsFromDistributedReqInput,
        UpdateWeightsFromDistributedReqInput.message,
        "Changes some weights to those that rank 0 of a group broadcasts.",
    ),
    CallRoute(
        "/init_weights_update_group",
        InitWeightsUpdateGroupReqInput,
        InitWeightsUpdateGroupReqInput.message,
        "Joins the group that a trainer has opened.",
    ),
    CallRoute(
        "/destroy_weights_update_group",
        DestroyWeightsUpdateGroupReqInput,
        DestroyWeightsUpdateGroupReqInput.message,
        "Leaves a group.",
    ),
    CallRoute(
        "/begin_weight_update",
        BeginWeightUpdateReqInput,
        BeginWeightUpdateReqInput.message,
        "Opens a weight session: updates are staged until a commit takes them all over.",
    ),
    CallRoute(
        "/commit_weight_update",
        CommitWeightUpdateReqInput,
        CommitWeightUpdateReqInput.message,
        "Takes over what was staged, all or nothing.",
        alias=("POST", "/end_weight_update"),
    ),
    CallRoute(
        "/rollback_weight_update",
        RollbackWeightUpdateReqInput,
        RollbackWeightUpdateReqInput.message,
        "Drops what was staged.",
    ),
    CallRoute(
        "/update_weight_version",
        UpdateWeightVersionReqInput,
        UpdateWeightVersionReqInput.message,
        "Gives the weights a new label; ends all requests first, unless told not to.",
    ),
    CallRoute(
        "/release_memory_occupation",
        MemoryOccupationReqInput,
        MemoryOccupationReqInput.release,
        "Gives memory back to the device.",
        alias=("GET", "/release_memory_occupation"),
    ),
    CallRoute(
        "/resume_memory_occupation",
        MemoryOccupationReqInput,
        MemoryOccupationReqInput.resume,
        "Takes released memory again.",
        alias=("GET", "/resume_memory_occupation"),
    ),
    CallRoute(
        "/get_weights_by_name",
        GetWeightsByNameReqInput,
        GetWeightsByNameReqInput.message,
        "The first values of a weight, as nested lists.",
        reports_success=False,
        alias=("GET", "/get_weights_by_name"),
        answer="parameter",
    ),
    CallRoute(
        "/weights_checker",
        CheckWeightsReqInput,
        CheckWeightsReqInput.message,
        "Notes what all weights are, compares them with that, or makes them zero.",
    ),
    CallRoute(
        "/start_profile",
        StartProfileReqInput,
        StartProfileReqInput.message,
        "Begins a profile of the steps, in a folder that the operator has allowed.",
        alias=("GET", "/start_profile"),
    ),
    CallRoute(
        "/stop_profile",
        StopProfileReqInput,
        StopProfileReqInput.message,
        "Ends the profile and writes it.",
        alias=("GET", "/stop_profile"),
    ),
)
CALL_PATHS = (
    *(route.path for route in CALL_ROUTES),
    *(route.alias[1] for route in CALL_ROUTES if route.alias is not None),
)
