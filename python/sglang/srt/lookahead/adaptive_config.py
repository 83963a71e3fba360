"""Reads `--speculative-adaptive-config`: the steps that batches of each size may have. No torch.

    {
      "update_interval": 5,
      "1": {"candidate_steps": [1, 3, 7]},
      "8": {"candidate_steps": [0, 1], "up_hysteresis": 0.25}
    }

A key from 1 to 999999 is a slot: the least batch size that it serves, up to the next slot. The
first slot serves smaller batches too. Steps are tokens drafted one after the other; 0 drafts none.
What a slot leaves out it has from the entry of that name beside the slots, else its default.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import chain, pairwise
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
MAX_BATCH_SIZE = MAX_ROUNDS = 1_000_000  # slots are smaller, by SLOT_KEY
MAX_COEFF = 1000  # allows MAX_NUM_STEPS from 0.063 correct drafts on
MAX_SHOWN_CHARS = 200  # of a key or a reason

SLOT_KEY = re.compile("[1-9][0-9]{0,5}")
Steps = Annotated[int, Meta(ge=0, le=MAX_NUM_STEPS)]
Hysteresis = Annotated[float, Meta(ge=-MAX_NUM_STEPS, le=MAX_NUM_STEPS)]  # in drafts
T = TypeVar("T")


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


class AdaptiveSlot(SlotNumbers, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says how batches of some sizes choose their steps (`next_steps`)."""

    candidate_steps: Annotated[tuple[Steps, ...], Meta(min_length=1)]  # made ascending

    def __post_init__(self) -> None:
        steps = tuple(sorted({*self.candidate_steps}))
        if len(steps) < len(self.candidate_steps):
            raise ValueError("candidate_steps has a number twice; keep one")
        msgspec.structs.force_setattr(self, "candidate_steps", steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveConfig:
    """Slots of batch sizes."""

    slots: dict[int, AdaptiveSlot]  # by their keys in the file, ascending; at least one

    def key(self, batch_size: int) -> int:
        """Returns the key of the slot that serves batches of this size."""
        return max((key for key in self.slots if key <= batch_size), default=min(self.slots))

    def slot(self, batch_size: int) -> AdaptiveSlot:
        return self.slots[self.key(batch_size)]

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """Those of all slots, ascending, each once."""
        return tuple(sorted({*chain(*(slot.candidate_steps for slot in self.slots.values()))}))

    def batch_sizes(self, steps: int) -> tuple[range, ...]:
        """Returns the ranges of batch sizes that may have `steps` steps."""
        ends = [1, *[*self.slots][1:], MAX_BATCH_SIZE]
        ranges = zip(self.slots.values(), pairwise(ends), strict=True)
        return tuple(range(*ends) for slot, ends in ranges if steps in slot.candidate_steps)

    def warnings(self) -> list[str]:
        """Returns a line for each setting that is allowed and hardly meant; it names the slot."""
        return [
            f'slot "{key}": down_hysteresis {slot.down_hysteresis:g} is above'
            f" up_hysteresis {slot.up_hysteresis:g}, so while correct drafts lie between the two"
            " thresholds, every decision undoes the last one."
            for key, slot in self.slots.items()
            if slot.down_hysteresis > slot.up_hysteresis
            and sum(steps > 0 for steps in slot.candidate_steps) > 1
        ]


def read_adaptive_config(name_or_path: str | None) -> AdaptiveConfig:
    """Reads one of PRESETS, else a path; None: DEFAULT_PRESET. A file that has a preset's name is
    reached as ./NAME.

    Raises:
        ValueError: if it cannot be read or used: one line that names file, slot and key.
    """
    name = DEFAULT_PRESET if name_or_path is None else name_or_path
    place = f"{CONFIG_FLAG} {name if name.isprintable() else repr(name)}"
    path = PRESETS_DIR / f"{name}.json" if name in PRESETS else Path(name)
    try:
        return parse_adaptive_config(read_bytes(path, MAX_CONFIG_BYTES), place)
    except UnreadableFileError as error:
        raise ValueError(f"{place} {error.reason}; presets are {' and '.join(PRESETS)}.") from None


def parse_adaptive_config(data: bytes, place: str) -> AdaptiveConfig:
    """Reads a file's content, which messages call `place`."""
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not valid JSON: {error}.") from None
    entries, slots = _converted(value, dict[str, Any], place), dict[int, AdaptiveSlot]()
    names = SlotNumbers.__struct_fields__
    numbers = {key: entries.pop(key) for key in names if key in entries}
    _converted(numbers, SlotNumbers, place)
    for key, value in entries.items():
        if not SLOT_KEY.fullmatch(key):
            raise ValueError(
                f"{place}: {json.dumps(key)[:MAX_SHOWN_CHARS]} is neither {', '.join(names)} nor a"
                f" slot, the least batch size that it serves, from 1 to {MAX_BATCH_SIZE - 1}."
            )
        of_slot = f'{place}, slot "{key}"'
        own = _converted(value, dict[str, Any], of_slot)
        slots[int(key)] = _converted({**numbers, **own}, AdaptiveSlot, of_slot)
    if not slots:
        raise ValueError(f'{place} has no slot; give one, as "1": {{"candidate_steps": [1, 3]}}.')
    return AdaptiveConfig(slots=dict(sorted(slots.items())))


def _converted(value: Any, kind: type[T], place: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        reason = str(error).replace(" - at `$.", ", in `")
        reason = reason if reason.isprintable() else ascii(reason)[1:-1]
        raise ValueError(f"{place}: {reason[:MAX_SHOWN_CHARS]}.") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of JSON, in which Python's parser lets a key stand twice."""
    found = dict[str, Any]()
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!a} is there twice")
        found[key] = value
    return found
