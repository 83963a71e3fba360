"""Reads pickles without running anything of them: the only place where their opcodes are read.

A pickle is a program for a stack machine. The usual reader runs it: it imports what the program
names and calls that. Here a name stays a name, if it is one of `ALLOWED`, and a call becomes a
record of the call. Nothing is imported, called or set, whatever the bytes are. `pickled_tensors.py`
decides what the records mean, and checks every argument.

Only opcodes that picklers of protocols 3 to 5 write for such objects are read; any other is
refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.sent_tensors import DTYPE_BYTES, TensorsRefused

MAX_PICKLE_BYTES = 1 << 25  # it names memory; the weights are not in it
REDUCTIONS = "torch.multiprocessing.reductions"
BUCKETS = "sglang.srt.weight_sync.tensor_bucket"

# Module and name of each object that a pickle of weights names, and why.
ALLOWED: frozenset[tuple[str, str]] = frozenset(
    {
        (REDUCTIONS, "rebuild_tensor"),  # a tensor on the CPU
        (REDUCTIONS, "rebuild_typed_storage"),  # its storage, with a type
        (REDUCTIONS, "rebuild_storage_filename"),  # the storage's memory: a named shared file,
        (REDUCTIONS, "rebuild_storage_fd"),  # or a file that its owner hands over
        ("multiprocessing.resource_sharer", "DupFd"),  # by this
        (REDUCTIONS, "rebuild_cuda_tensor"),  # a tensor on a GPU; the others name it by its UUID
        ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
        ("sglang.srt.patch_torch", "_rebuild_cuda_tensor_modified"),
        ("torch", "Tensor"),  # kinds of tensors and storages, and shapes
        ("torch.nn.parameter", "Parameter"),
        ("torch.storage", "TypedStorage"),
        ("torch.storage", "UntypedStorage"),
        ("torch", "Size"),
        *(("torch", dtype) for dtype in DTYPE_BYTES),
        (BUCKETS, "FlattenedTensorMetadata"),  # where a tensor is in a bucket
        (BUCKETS, "LocalSerializedTensor"),  # a pickle of a tensor for each rank, in a pickle
        ("sglang.srt.model_executor.model_runner", "LocalSerializedTensor"),
        (
            "sglang.srt.model_executor.model_runner_components.weight_updater",
            "LocalSerializedTensor",
        ),
    }
)


@dataclass(frozen=True, eq=False, slots=True)
class Name:
    """A name of `ALLOWED`; `text` is its second part, which identifies it."""

    text: str


@dataclass(eq=False, slots=True)
class Made:
    """The record of an object that the usual reader would have made by a call.

    Attributes:
        kind: the name that it would have called.
        state: the state that it would have set on the result; None: none.
    """

    kind: str
    arguments: tuple[Any, ...]
    state: dict[str, Any] | None = None


def read_records(data: bytes) -> Any:
    """Returns the object of a pickle: numbers, texts, bytes, None, tuples, lists, dicts with texts
    as keys, `Name` and `Made`. Lists and dicts may contain themselves.

    Raises:
        TensorsRefused: for anything that pickles of weights do not have.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise TensorsRefused(f"it is larger than {MAX_PICKLE_BYTES} bytes")
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.run(opcode.name, argument)
    except TensorsRefused:
        raise
    except (ValueError, IndexError, KeyError) as error:
        raise TensorsRefused("it is damaged or no pickle") from error
    return machine.result()


_MARK = object()
_SKIPPED = frozenset({"PROTO", "FRAME", "STOP"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_VALUES = frozenset(
    {
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "SHORT_BINBYTES",
        "BINBYTES",
    }
)


class _Machine:
    """The stack and the memo."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._operations: dict[str, Callable[[Any], None]] = {
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "TUPLE": lambda _: self._stack.append(tuple(self._pop_to_mark())),
            "TUPLE1": lambda _: self._stack.append(self._pop_last(1)),
            "TUPLE2": lambda _: self._stack.append(self._pop_last(2)),
            "TUPLE3": lambda _: self._stack.append(self._pop_last(3)),
            "APPEND": lambda _: self._extend(self._pop_last(1)),
            "APPENDS": lambda _: self._extend(self._pop_to_mark()),
            "SETITEM": lambda _: self._set_items(self._pop_last(2)),
            "SETITEMS": lambda _: self._set_items(self._pop_to_mark()),
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "BINGET": lambda index: self._stack.append(self._memo[index]),
            "LONG_BINGET": lambda index: self._stack.append(self._memo[index]),
            "GLOBAL": lambda pair: self._name(*pair.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(*self._pop_last(2)),
            "REDUCE": lambda _: self._make(*self._pop_last(2)),
            "NEWOBJ": lambda _: self._make(*self._pop_last(2)),
            "BUILD": lambda _: self._set_state(*self._pop_last(1)),
        }

    def run(self, opcode: str, argument: Any) -> None:
        if opcode in _VALUES:
            self._stack.append(argument)
        elif opcode in _CONSTANTS:
            self._stack.append(_CONSTANTS[opcode])
        elif opcode in self._operations:
            self._operations[opcode](argument)
        elif opcode not in _SKIPPED:
            raise TensorsRefused(f"it has the opcode {opcode}, which no pickle of weights has")

    def result(self) -> Any:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise TensorsRefused("it does not end with one object")
        return self._stack[0]

    def _pop_last(self, count: int) -> tuple[Any, ...]:
        values = tuple(self._stack[-count:])
        if len(values) < count or any(value is _MARK for value in values):
            raise TensorsRefused("it takes values that are not there")
        del self._stack[-count:]
        return values

    def _pop_to_mark(self) -> list[Any]:
        values: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _remember(self, index: int) -> None:
        if self._stack[-1] is _MARK:
            raise TensorsRefused("it keeps what is no value")
        self._memo[index] = self._stack[-1]

    def _extend(self, values: tuple[Any, ...] | list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise TensorsRefused("it appends to what is no list")
        target.extend(values)

    def _set_items(self, values: tuple[Any, ...] | list[Any]) -> None:
        target, keys = self._stack[-1], values[::2]
        if not isinstance(target, dict) or not all(isinstance(key, str) for key in keys):
            raise TensorsRefused("it has a table whose keys are not texts")
        target.update(zip(keys, values[1::2], strict=True))

    def _name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TensorsRefused("it has a name that is no text")
        if (module, name) not in ALLOWED:
            asked = "".join(char for char in f"{module}.{name}"[:100] if char.isprintable())
            raise TensorsRefused(f"it asks for {asked}, which no pickle of weights needs")
        self._stack.append(Name(name))

    def _make(self, name: Any, arguments: Any) -> None:
        if not isinstance(name, Name) or not isinstance(arguments, tuple):
            raise TensorsRefused("it calls what is no name")
        self._stack.append(Made(name.text, arguments))

    def _set_state(self, state: Any) -> None:
        target = self._stack[-1]
        if not isinstance(target, Made) or not isinstance(state, dict) or target.state is not None:
            raise TensorsRefused("it sets a state where there is none")
        target.state = state
