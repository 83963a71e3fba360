"""Reads `--speculative-adaptive-config`: the steps that batches of each size may have. No torch.

    {
      "update_interval": 5,
      "1": {"candidate_steps": [1, 3, 7]},
      "8": {"candidate_steps": [0, 1], "up_hysteresis": 0.25}
    }

A key that is an integer is a slot: the least batch size that it serves, up to the next slot. The
first slot serves smaller batches too. Steps are tokens drafted one after the other; 0 drafts none.
What a slot leaves out it has from the entry of that name beside the slots, else its default.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from sglang.srt.plain_files import UnreadableFileError, read_bytes

MAX_NUM_STEPS = 63  # tokens drafted one after the other
CONFIG_FLAG = "--speculative-adaptive-config"
PRESETS = ("conservative", "aggressive")
DEFAULT_PRESET = "conservative"
PRESETS_DIR = Path(__file__).with_name("adaptive_presets")

MAX_CONFIG_BYTES = 1 << 16
MAX_BATCH_SIZE = MAX_ROUNDS = 1_000_000
MAX_COEFF = 1000  # allows MAX_NUM_STEPS from 0.063 correct drafts on
MAX_DIGITS = 18  # of a slot
MAX_SHOWN_CHARS = 200  # of a reason

SLOT_KEY = re.compile(r"-?[0-9]+")
Steps = Annotated[int, Meta(ge=0, le=MAX_NUM_STEPS)]
Hysteresis = Annotated[float, Meta(ge=-MAX_NUM_STEPS, le=MAX_NUM_STEPS)]  # in drafts
T = TypeVar("T")


class AdaptiveConfigError(ValueError):
    """A configuration that cannot be used; the text is one line that names file, slot and key."""


class SlotNumbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that may be beside slots and in each."""

    up_hysteresis: Hysteresis = 0.0  # correct drafts beyond the threshold that more steps need
    down_hysteresis: Hysteresis = -0.25  # by which the threshold for fewer steps is raised
    # Steps per correct draft that are not exceeded; 0 for no such limit.
    ceiling_coeff: Annotated[float, Meta(ge=0, le=MAX_COEFF)] = 0.0
    ema_alpha: Annotated[float, Meta(gt=0, le=1)] = 0.2  # weight of the last round in the average
    warmup_batches: Annotated[int, Meta(ge=0, le=MAX_ROUNDS)] = 10  # before the first interval
    # Rounds of an interval, at whose end the slot decides.
    update_interval: Annotated[int, Meta(ge=1, le=MAX_ROUNDS)] = 5


class SlotEntries(SlotNumbers, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A slot of the file, with `candidate_steps` in any order."""

    candidate_steps: Annotated[tuple[Steps, ...], Meta(min_length=1)]


class AdaptiveSlot(SlotEntries, frozen=True, kw_only=True):
    """Says how batches of some sizes choose their steps (`next_steps`), candidates ascending."""

    min_batch_size: int  # as the file has it


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveConfig:
    """Slots of batch sizes."""

    slots: tuple[AdaptiveSlot, ...]  # by ascending batch size, at least one

    def slot(self, batch_size: int) -> AdaptiveSlot:
        """Returns the one that serves batches of this size."""
        above = bisect_right(self.slots, batch_size, key=lambda slot: slot.min_batch_size)
        return self.slots[max(0, above - 1)]

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """Those of all slots, ascending, each once."""
        return tuple(sorted({steps for slot in self.slots for steps in slot.candidate_steps}))

    def batch_sizes(self, steps: int) -> tuple[range, ...]:
        """Returns the ranges of batch sizes that may have `steps` steps."""
        ends = [1, *(slot.min_batch_size for slot in self.slots[1:]), MAX_BATCH_SIZE]
        ranges = zip(self.slots, pairwise(ends), strict=True)
        return tuple(range(*ends) for slot, ends in ranges if steps in slot.candidate_steps)

    def warnings(self) -> list[str]:
        """Returns a line for each setting that is allowed and hardly meant; it names the slot."""
        return [
            f'slot "{slot.min_batch_size}": down_hysteresis {slot.down_hysteresis:g} is above'
            f" up_hysteresis {slot.up_hysteresis:g}, so while correct drafts lie between the two"
            " thresholds, every decision undoes the last one."
            for slot in self.slots
            if slot.down_hysteresis > slot.up_hysteresis
            and sum(steps > 0 for steps in slot.candidate_steps) > 1
        ]


def read_adaptive_config(name_or_path: str | None) -> AdaptiveConfig:
    """Reads one of PRESETS, else a path; None: DEFAULT_PRESET. A file that has a preset's name is
    reached as ./NAME. Raises `AdaptiveConfigError` if it cannot be read or used."""
    name = DEFAULT_PRESET if name_or_path is None else name_or_path
    place = f"{CONFIG_FLAG} {name if name.isprintable() else repr(name)}"
    path = PRESETS_DIR / f"{name}.json" if name in PRESETS else Path(name)
    try:
        data = read_bytes(path, MAX_CONFIG_BYTES)
    except UnreadableFileError as error:
        presets = " and ".join(PRESETS)
        raise AdaptiveConfigError(f"{place} {error.reason}; presets are {presets}.") from None
    return parse_adaptive_config(data, place)


def parse_adaptive_config(data: bytes, place: str) -> AdaptiveConfig:
    """Reads a file's content, which messages call `place`."""
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise AdaptiveConfigError(f"{place} is not valid JSON: {error}.") from None
    entries = _converted(value, dict[str, Any], place)
    slot_keys = [key for key in entries if SLOT_KEY.fullmatch(key)]
    numbers = {key: value for key, value in entries.items() if key not in slot_keys}
    _converted(numbers, SlotNumbers, place)
    slots = [_slot(key, entries[key], numbers, place) for key in slot_keys]
    slots.sort(key=lambda slot: slot.min_batch_size)
    if not slots:
        raise AdaptiveConfigError(
            f'{place} has no slot; give at least one, such as "1": {{"candidate_steps": [1, 3]}}.'
        )
    if len({slot.min_batch_size for slot in slots}) < len(slots):
        raise AdaptiveConfigError(f"{place}: two slots are for the same batch size; keep one.")
    return AdaptiveConfig(slots=tuple(slots))


def _slot(key: str, value: Any, numbers: dict[str, Any], place: str) -> AdaptiveSlot:
    size = int(key) if len(key) <= MAX_DIGITS else -1
    place = f'{place}, slot "{key[:MAX_DIGITS]}"'
    if not 1 <= size <= MAX_BATCH_SIZE:
        raise AdaptiveConfigError(
            f"{place}: a slot is the least batch size that it serves, an integer from 1 to"
            f" {MAX_BATCH_SIZE}."
        )
    entries = _converted(value, dict[str, Any], place)
    slot = msgspec.structs.asdict(_converted({**numbers, **entries}, SlotEntries, place))
    steps = sorted(slot.pop("candidate_steps"))
    if len(steps) > len({*steps}):
        raise AdaptiveConfigError(f"{place}: candidate_steps has a number twice; keep one.")
    return AdaptiveSlot(min_batch_size=size, candidate_steps=tuple(steps), **slot)


def _converted(value: Any, kind: type[T], place: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        reason = str(error).replace(" - at `$.", ", in `")
        reason = reason if reason.isprintable() else ascii(reason)[1:-1]
        raise AdaptiveConfigError(f"{place}: {reason[:MAX_SHOWN_CHARS]}.") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of JSON, in which Python's parser lets a key stand twice."""
    found = dict[str, Any]()
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!a} is there twice")
        found[key] = value
    return found
