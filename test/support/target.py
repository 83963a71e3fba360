"""Runs the suites that compare tokens on the CPU, or where SGLANG_TEST_TARGET says.

    SGLANG_TEST_TARGET='{"attention_backend": "triton", "disable_cuda_graph": true}' pytest test/e2e

The value is a JSON object of fields of `ServerArgs` for a GPU; `scripts/run_gpu_suite.sh` sets it.
Engines, servers and runners of tests that do not say otherwise get them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

from sglang.srt.server_args import ServerArgs

VARIABLE = "SGLANG_TEST_TARGET"
# Differences of the two best logits within which rounding may choose either.
MAX_GAPS = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.125}


@dataclass(frozen=True)
class Target:
    """The device under test and what runs on it."""

    flags: dict[str, Any]

    @property
    def device(self) -> str:
        return str(self.flags.get("device", "cpu"))

    @property
    def attention_backend(self) -> str:
        return str(self.flags.get("attention_backend", "torch_native"))

    @property
    def dtype(self) -> str:
        return str(self.flags.get("dtype", "float32"))

    @property
    def max_gap(self) -> float:
        return MAX_GAPS[self.dtype]

    @property
    def overlap(self) -> bool:
        return not self.flags.get("disable_overlap_schedule", False)

    def graph_width(self, max_decode_rows: int) -> int:
        """Rows of a request in steps that replay graphs."""
        if self.device == "cpu" or self.flags.get("disable_cuda_graph", False):
            return 0
        return 1 if self.flags.get("disable_mtp_cuda_graph", False) else max_decode_rows

    def command_line(self) -> list[str]:
        """The flags as a command line."""
        words: list[str] = []
        for name, value in self.flags.items():
            if value is not False:
                words.append(f"--{name.replace('_', '-')}")
                words += [] if value is True else [str(value)]
        return words


def read_target() -> Target:
    """From the environment; a GPU's flags come with a device and float32."""
    text = os.environ.get(VARIABLE)
    if not text:
        return Target({})
    flags = {"device": "cuda", "dtype": "float32", **json.loads(text)}
    known = {entry.name for entry in dataclasses.fields(ServerArgs)}
    assert not flags.keys() - known, f"{VARIABLE} names no flags: {sorted(flags.keys() - known)}"
    return Target(flags)


TARGET = read_target()


def use_flags_as_defaults(target: Target) -> None:
    """`ServerArgs`, and so `Engine`, without a flag takes the target's."""
    defaults = ServerArgs.__init__.__kwdefaults__
    assert defaults is not None
    defaults.update(target.flags)
