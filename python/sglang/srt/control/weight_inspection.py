"""Looks at the weights that serve: values by name, and whether an update brought all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sglang.srt.control.engine_state import BetweenStepsQueue, EngineState
from sglang.srt.control.memory_control import WEIGHTS_TAG
from sglang.srt.control.weight_control import ModelWeights
from sglang.srt.messages.control import (
    CheckWeightsReq,
    ControlReply,
    GetWeightsByNameReq,
)
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from sglang.srt.sent_tensors import WeightSelector
from sglang.srt.weight_sync.serving_weights import NO_DRAFT_MODEL
from sglang.srt.weight_sync.weight_reader import DRAFT

MAX_VALUES = 1 << 20  # of one answer: the scheduler makes a Python number of each
CHECKSUM_BYTES = 1 << 22  # summed up at a time, as 64-bit numbers
MULTIPLIER = 0x5851F42D4C957F2D  # odd, so that a change of one byte always shows
MAX_NAMED = 3


class WeightInspection:
    """Handles get_weights_by_name and weights_checker, between steps.

    Args:
        reply: sends a message to the front end.
    """

    def __init__(
        self,
        weights: ModelWeights,
        state: EngineState,
        lifecycle: RequestLifecycle,
        between_steps: BetweenStepsQueue,
        reply: Callable[[Any], None],
    ) -> None:
        self._weights = weights
        self._state = state
        self._lifecycle = lifecycle
        self._reply = reply
        self._snapshot: dict[str, int] | None = None
        self.handlers: dict[type, Callable[[Any], None]] = {
            GetWeightsByNameReq: lambda message: between_steps.add(lambda: self._read(message)),
            CheckWeightsReq: lambda message: between_steps.add(lambda: self._check(message)),
        }

    def _read(self, message: GetWeightsByNameReq) -> None:
        value = None if self._are_released else self._weights.value_of(message.name)
        if value is None:
            problem = (
                f"name: there is no weight {message.name!r}; give a name of the checkpoint, of a"
                " draft model's with 'draft.' before it."
            )
            self._answer(message.call_id, self._state.unusable or problem)
            return
        part = value[: message.truncate_size] if value.dim() else value
        if part.numel() > MAX_VALUES:
            problem = (
                f"truncate_size: that is {part.numel()} values, more than {MAX_VALUES}; ask for"
                f" fewer of its {len(value)} entries."
            )
            self._answer(message.call_id, problem)
            return
        self._answer(message.call_id, "", "", parameter=part.to("cpu", torch.float32).tolist())

    def _check(self, message: CheckWeightsReq) -> None:
        actions = {"snapshot": self._take_snapshot, "compare": self._compare, "reset": self._reset}
        default: WeightSelector = "all" if message.action == "compare" else "target"
        selector = message.selector or default
        names = [name for name in self._weights.names() if _is_of(name, selector)]
        if not names:
            self._answer(message.call_id, NO_DRAFT_MODEL)
            return
        actions[message.action](message.call_id, names)

    def _take_snapshot(self, call_id: int, names: Sequence[str]) -> None:
        if self._are_released:
            self._answer(call_id, self._state.unusable)
            return
        self._snapshot = self._checksums(names)
        self._answer(call_id, "", f"Noted {len(self._snapshot)} weights.")

    def _compare(self, call_id: int, names: Sequence[str]) -> None:
        noted = self._snapshot or {}
        now = {} if self._are_released else self._checksums(filter(noted.__contains__, names))
        if not now:
            problem = "There is no snapshot of these weights; call with action snapshot first."
            self._answer(call_id, self._state.unusable or problem)
            return
        other = [name for name, checksum in now.items() if noted[name] != checksum]
        if not other:
            self._answer(call_id, "", f"All {len(now)} weights are those of the snapshot.")
            return
        named = ", ".join(other[:MAX_NAMED])
        problem = f"{len(other)} of {len(now)} weights are not those of the snapshot: {named}"
        self._answer(call_id, problem + (", ..." if len(other) > MAX_NAMED else "."))

    def _reset(self, call_id: int, names: Sequence[str]) -> None:
        lifecycle = self._lifecycle
        num_requests = len(lifecycle.running) + len(lifecycle.waiting)
        if self._are_released or num_requests:
            problem = f"{num_requests} requests run or wait; wait for them, or abort them first."
            self._answer(call_id, self._state.unusable or problem)
            return
        weights = self._weights
        zeros = {
            name: torch.zeros((), dtype=value.dtype).expand(value.shape)
            for name in names
            if (value := weights.value_of(name)) is not None and value.is_floating_point()
        }
        weights.apply(zeros)
        lifecycle.ledger.begin_weight_epoch()
        lifecycle.ledger.flush()
        self._answer(call_id, "", f"{len(zeros)} weights are zero now; update them all.")

    @property
    def _are_released(self) -> bool:
        return WEIGHTS_TAG in self._state.released

    def _checksums(self, names: Iterable[str]) -> dict[str, int]:
        values = ((name, self._weights.value_of(name)) for name in names)
        return {name: checksum(value) for name, value in values if value is not None}

    def _answer(self, call_id: int, problem: str, text: str = "", **fields: Any) -> None:
        self._reply(
            ControlReply(
                call_id=call_id, success=not problem, message=problem or text, fields=fields
            )
        )


def _is_of(name: str, selector: WeightSelector) -> bool:
    """Tells whether a weight is of the selected models."""
    return selector == "all" or name.startswith(DRAFT) == (selector == "draft")


def checksum(value: torch.Tensor) -> int:
    """Returns a 64-bit checksum of a tensor's bytes, computed on its device. Any change of one byte
    changes it."""
    flat = value.detach().reshape(-1).view(torch.uint8)
    total = 0
    for start in range(0, flat.numel(), CHECKSUM_BYTES):
        part = flat[start : start + CHECKSUM_BYTES].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=part.device)
        total += int(((part + 1) * (2 * places * MULTIPLIER + 1)).sum())
    return total % 2**64
