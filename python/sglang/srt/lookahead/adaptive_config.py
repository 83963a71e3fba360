"""Reads `--speculative-adaptive-config`: the steps that batches of each size may have. No torch.

    {
      "update_interval": 5,
      "1": {"candidate_steps": [1, 3, 7]},
      "8": {"candidate_steps": [0, 1], "up_hysteresis": 0.25}
    }

A key that is an integer is a slot: the least batch size that it serves, up to the next slot. The
first slot serves smaller batches too. Steps are tokens drafted one after the other; 0 drafts none.
What a slot leaves out it has from the entry of that name beside the slots, else from `NUMBERS`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang.srt.plain_files import UnreadableFileError, read_bytes

MAX_NUM_STEPS = 63  # tokens drafted one after the other
CONFIG_FLAG = "--speculative-adaptive-config"
PRESETS = ("conservative", "aggressive")
DEFAULT_PRESET = "conservative"
PRESETS_DIR = Path(__file__).with_name("adaptive_presets")

MAX_CONFIG_BYTES = 1 << 16
MAX_BATCH_SIZE = MAX_ROUNDS = 1_000_000
MAX_COEFF = 1000  # allows MAX_NUM_STEPS from 0.063 correct drafts on
MAX_DIGITS = 18  # of an integer
MAX_SHOWN_CHARS = 40  # of a key or a value, in a message

SLOT_KEY = re.compile(r"-?[0-9]+")


class AdaptiveConfigError(ValueError):
    """A configuration that cannot be used; the text is one line that names file, slot and key."""


@dataclass(frozen=True, slots=True)
class NumberRule:
    """A number of the file: what it is if not given, and what it may be."""

    default: float
    allowed: str  # for people
    allows: Callable[[float], bool]  # false of NaN
    is_integer: bool = False


_HYSTERESIS = f"a number from -{MAX_NUM_STEPS} to {MAX_NUM_STEPS}, in drafts"
NUMBERS = {
    "ema_alpha": NumberRule(0.2, "a number above 0 and up to 1", lambda value: 0 < value <= 1),
    "warmup_batches": NumberRule(
        10, f"an integer from 0 to {MAX_ROUNDS}", lambda value: 0 <= value <= MAX_ROUNDS, True
    ),
    "update_interval": NumberRule(
        5, f"an integer from 1 to {MAX_ROUNDS}", lambda value: 1 <= value <= MAX_ROUNDS, True
    ),
    "up_hysteresis": NumberRule(0.0, _HYSTERESIS, lambda value: abs(value) <= MAX_NUM_STEPS),
    "down_hysteresis": NumberRule(-0.25, _HYSTERESIS, lambda value: abs(value) <= MAX_NUM_STEPS),
    "ceiling_coeff": NumberRule(
        0.0, f"a number from 0, which is off, to {MAX_COEFF}", lambda value: 0 <= value <= MAX_COEFF
    ),
}
CANDIDATES = "candidate_steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveSlot:
    """Says how batches of some sizes choose their steps; `next_steps` has the rule.

    Attributes:
        min_batch_size: requests of the smallest batch, as the file has it.
        candidate_steps: ascending, each once, from 0 to MAX_NUM_STEPS.
        up_hysteresis: correct drafts beyond the threshold that more steps need.
        down_hysteresis: correct drafts by which the threshold for fewer steps is raised.
        ceiling_coeff: steps per correct draft that are not exceeded; 0 for no such limit.
        ema_alpha: weight of the last round in the moving average.
        warmup_batches: rounds before the first interval begins.
        update_interval: rounds of an interval, at whose end the slot decides.
    """

    min_batch_size: int
    candidate_steps: tuple[int, ...]
    up_hysteresis: float
    down_hysteresis: float
    ceiling_coeff: float
    ema_alpha: float
    warmup_batches: int
    update_interval: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveConfig:
    """
    Attributes:
        slots: by ascending batch size, at least one.
    """

    slots: tuple[AdaptiveSlot, ...]

    def slot_index(self, batch_size: int) -> int:
        """The slot in `slots` that serves batches of this size: the last one that begins at or
        below it, or the first one."""
        above = bisect_right(self.slots, batch_size, key=lambda slot: slot.min_batch_size)
        return max(0, above - 1)

    def candidates(self, batch_size: int) -> tuple[int, ...]:
        """All steps that batches of this size may ever have, ascending."""
        return self.slots[self.slot_index(batch_size)].candidate_steps

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """Those of all slots, ascending, each once."""
        return tuple(sorted({steps for slot in self.slots for steps in slot.candidate_steps}))

    def batch_sizes(self, steps: int) -> tuple[range, ...]:
        """Returns the ranges of batch sizes that may have `steps` steps."""
        first = 1
        found = []
        for slot, end in zip(self.slots, [*self._starts[1:], MAX_BATCH_SIZE], strict=True):
            if steps in slot.candidate_steps:
                found.append(range(first, end))
            first = end
        return tuple(found)

    @property
    def _starts(self) -> list[int]:
        return [slot.min_batch_size for slot in self.slots]

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
    """
    Args:
        name_or_path: one of PRESETS, else a path; None for DEFAULT_PRESET. A file that has a
            preset's name is reached as ./NAME.

    Raises:
        AdaptiveConfigError: for a file that cannot be read or says what cannot be met.
    """
    name = DEFAULT_PRESET if name_or_path is None else name_or_path
    place = f"{CONFIG_FLAG} {name if name.isprintable() else repr(name)}"
    path = PRESETS_DIR / f"{name}.json" if name in PRESETS else Path(name)
    try:
        if not path.is_file():
            raise AdaptiveConfigError(
                f"{place} is no file, and none of the presets {' and '.join(PRESETS)}."
            )
    except OSError as error:
        raise AdaptiveConfigError(f"{place} cannot be read: {error.strerror}.") from None
    try:
        data = read_bytes(path, MAX_CONFIG_BYTES)
    except UnreadableFileError as error:
        raise AdaptiveConfigError(f"{place} {error.reason}.") from None
    return parse_adaptive_config(data, place)


def parse_adaptive_config(data: bytes, place: str) -> AdaptiveConfig:
    """
    Args:
        data: a file's content.
        place: what messages call it.

    Raises:
        AdaptiveConfigError: for what is not valid.
    """
    entries = _entries(_json_value(data, place), place)
    slot_keys = {key: _min_batch_size(key, place) for key in entries if SLOT_KEY.fullmatch(key)}
    _check_keys(entries, {*NUMBERS, *slot_keys}, place, ' and slots such as "8"')
    if not slot_keys:
        raise AdaptiveConfigError(
            f'{place} has no slot; give at least one, such as "1": {{"{CANDIDATES}": [1, 3]}}.'
        )
    by_size = sorted(slot_keys, key=slot_keys.__getitem__)
    for first, second in pairwise(by_size):
        if slot_keys[first] == slot_keys[second]:
            raise AdaptiveConfigError(
                f"{place}, slots {_shown(first)} and {_shown(second)} are for the same batch size;"
                " keep one of them."
            )
    defaults = {key: _number(entries, key, rule.default, place) for key, rule in NUMBERS.items()}
    return AdaptiveConfig(
        slots=tuple(
            _slot(slot_keys[key], entries[key], defaults, f"{place}, slot {_shown(key)}")
            for key in by_size
        )
    )


@dataclass(frozen=True, slots=True)
class _Object:
    """An object of JSON as it is written, in which a key may stand twice."""

    pairs: list[tuple[str, Any]]


def _json_value(data: bytes, place: str) -> Any:
    """The value with `_Object` for objects. NaN and infinities, which Python's parser takes though
    JSON has none, are left to the checks of entries, which can name them."""
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_Object, parse_int=_integer)
    except UnicodeDecodeError:
        raise AdaptiveConfigError(f"{place} is not text in UTF-8.") from None
    except json.JSONDecodeError as error:
        raise AdaptiveConfigError(
            f"{place} is not valid JSON: {error.msg}, line {error.lineno}, column {error.colno}."
        ) from None
    except RecursionError:
        raise AdaptiveConfigError(
            f"{place} is nested too deeply: an object of slots, and lists in them, is all there is."
        ) from None


def _integer(digits: str) -> float:
    """An int, or a float if no entry allows as many digits. Python refuses to make an int of
    thousands of digits, and its error could not name the entry."""
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _entries(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, _Object):
        raise AdaptiveConfigError(f"{place} must be an object, not {_shown(value)}.")
    for key, count in Counter(key for key, _ in value.pairs).items():
        if count > 1:
            raise AdaptiveConfigError(f"{place}: {_shown(key)} is there {count} times; keep one.")
    return dict(value.pairs)


def _check_keys(entries: dict[str, Any], known: set[str], place: str, others: str = "") -> None:
    unknown = [key for key in entries if key not in known]
    if unknown:
        names = ", ".join(sorted(key for key in known if not SLOT_KEY.fullmatch(key)))
        raise AdaptiveConfigError(
            f"{place}: {_shown(unknown[0])} is not a known key; there are {names}{others}."
        )


def _min_batch_size(key: str, place: str) -> int:
    size = int(key) if len(key) <= MAX_DIGITS else -1
    if not 1 <= size <= MAX_BATCH_SIZE:
        raise AdaptiveConfigError(
            f"{place}, slot {_shown(key)}: a slot is the least batch size that it serves, an"
            f" integer from 1 to {MAX_BATCH_SIZE}."
        )
    return size


def _slot(min_batch_size: int, value: Any, defaults: dict[str, Any], place: str) -> AdaptiveSlot:
    entries = _entries(value, place)
    _check_keys(entries, {CANDIDATES, *NUMBERS}, place)
    return AdaptiveSlot(
        min_batch_size=min_batch_size,
        candidate_steps=_candidates(entries, place),
        **{key: _number(entries, key, default, place) for key, default in defaults.items()},
    )


def _candidates(entries: dict[str, Any], place: str) -> tuple[int, ...]:
    allowed = f"a list of different integers from 0 to {MAX_NUM_STEPS}, at least one"
    if CANDIDATES not in entries:
        raise AdaptiveConfigError(f"{place}: {CANDIDATES} is missing; give {allowed}.")
    steps = entries[CANDIDATES]
    if not isinstance(steps, list):
        raise AdaptiveConfigError(f"{place}: {CANDIDATES} must be {allowed}, not {_shown(steps)}.")
    if not steps:
        raise AdaptiveConfigError(f"{place}: {CANDIDATES} is empty; it must be {allowed}.")
    for index, each in enumerate(steps):
        if type(each) is not int or not 0 <= each <= MAX_NUM_STEPS:
            raise AdaptiveConfigError(
                f"{place}: {CANDIDATES}[{index}] must be an integer from 0 to {MAX_NUM_STEPS}, not"
                f" {_shown(each)}."
            )
        if each in steps[:index]:
            raise AdaptiveConfigError(
                f"{place}: {CANDIDATES} has {each} twice; it must be {allowed}."
            )
    return tuple(sorted(steps))


def _number(entries: dict[str, Any], key: str, default: float, place: str) -> Any:
    value, rule = entries.get(key, default), NUMBERS[key]
    types = (int,) if rule.is_integer else (int, float)
    if type(value) not in types or not rule.allows(value):
        raise AdaptiveConfigError(f"{place}: {key} must be {rule.allowed}, not {_shown(value)}.")
    return value if rule.is_integer else float(value)


def _shown(value: Any) -> str:
    """Shows a value of the file on one line; of objects and lists only their kind."""
    if isinstance(value, _Object):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value).replace("\x7f", "\\u007f")
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
