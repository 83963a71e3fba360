"""The bodies of control calls that change nothing: they look at weights, and at times of steps.

As in `bodies.py`, `body_reading.make_body` makes them, and `message` makes the message for the
scheduler.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sglang.srt.control.bodies import (
    TensorName,
)
from sglang.srt.control.pause_bodies import (
    check_printable,
)
from sglang.srt.messages.control import (
    CheckWeightsReq,
    GetWeightsByNameReq,
    StartProfileReq,
    StopProfileReq,
)
from sglang.srt.sent_tensors import WeightSelector

MAX_PROFILED_STEPS = 10_000  # a trace of more fills memory and is never read


class GetWeightsByNameReqInput(msgspec.Struct, kw_only=True):
    """Body of `/get_weights_by_name`.

    Attributes:
        name: name of a weight in the checkpoint, of the draft model's with `draft.` before it.
        truncate_size: entries of its first dimension at most.
    """

    name: TensorName
    truncate_size: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 100

    def __post_init__(self) -> None:
        check_printable(name=self.name)

    def message(self) -> GetWeightsByNameReq:
        return GetWeightsByNameReq(name=self.name, truncate_size=self.truncate_size)


class CheckWeightsReqInput(msgspec.Struct, kw_only=True):
    """Body of `/weights_checker`.

    Attributes:
        action: `snapshot` notes checksums of all weights, `compare` compares the weights with them,
            `reset` (or `reset_tensors`) sets all weights to zero, so that an update must bring
            them.
        selector: the models whose weights are noted, compared or reset. By default the target alone
            is noted and reset, since trainers reset what they send, and all that was noted is
            compared.
    """

    action: Literal["snapshot", "compare", "reset", "reset_tensors"]
    selector: WeightSelector | None = None

    def message(self) -> CheckWeightsReq:
        action = "reset" if self.action == "reset_tensors" else self.action
        return CheckWeightsReq(action=action, selector=self.selector)


class PostProcessWeightsReqInput(msgspec.Struct, kw_only=True):
    """Body of `/post_process_weights`, which trainers call around updates of quantized weights.

    Attributes:
        restore_weights_before_load: undo the quantization of the weights, before an update.
        post_process_quantization: quantize them again, after an update.
    """

    restore_weights_before_load: bool = False
    post_process_quantization: bool = False


class StartProfileReqInput(msgspec.Struct, kw_only=True):
    """Body of `/start_profile`.

    Attributes:
        output_dir: folder of the trace, inside SGLANG_TORCH_PROFILER_DIR of the server; null: that
            folder.
        num_steps: the profile ends by itself after that many steps.
        activities: kinds of activity to record; null, or none: all.
    """

    output_dir: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    num_steps: Annotated[int, Meta(ge=1, le=MAX_PROFILED_STEPS)] | None = None
    activities: list[Literal["CPU", "GPU"]] | None = None
    with_stack: bool = False
    record_shapes: bool = False

    def __post_init__(self) -> None:
        check_printable(output_dir=self.output_dir)

    def message(self) -> StartProfileReq:
        return StartProfileReq(
            output_dir=self.output_dir or "",
            num_steps=self.num_steps or MAX_PROFILED_STEPS,
            activities=sorted(set(self.activities or ("CPU", "GPU"))),
            with_stack=self.with_stack,
            record_shapes=self.record_shapes,
        )


class StopProfileReqInput(msgspec.Struct, kw_only=True):
    """Body of `/stop_profile`."""

    def message(self) -> StopProfileReq:
        return StopProfileReq()
