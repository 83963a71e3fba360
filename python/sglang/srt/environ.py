"""All debug switches that are environment variables."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Environ:
    """Values read once per process.

    Attributes:
        test_retract_interval: retract every running request after this many steps; 0 is never.
            `SGLANG_TEST_RETRACT` is a number of steps, or a true word for 3.
        strict_invariants: check the KV ledger after every step and raise on a violation
            (`SGLANG_STRICT_INVARIANTS`); otherwise it is checked when idle and logged.
        mtp_debug_trace: file that gets a JSON line per request and step (`SGLANG_MTP_DEBUG_TRACE`).
        kv_leak_debug: log what became of a request's KV slots when it ends, and the ledger when
            idle (`SGLANG_MTP_KV_LEAK_DEBUG`).
        graph_poison: overwrite the inputs and results of CUDA graphs before each replay, so that
            what a step forgot to fill shows; kernels then also tell of a column outside of its row
            of the page table, and the next step raises (`SGLANG_CUDA_GRAPH_POISON`).
        kv_canary: check in every step that the KV slots that it reads hold the tokens that they
            should hold, and raise if not; slow (`SGLANG_KV_CANARY`).
        mtp_fixed_k: every step predicts what its requests ask for, whatever the load, so that steps
            can be compared between runs (`SGLANG_MTP_FIXED_K`).
        simulated_accept_len: for benchmarks, tokens that a request accepts per step of drafts, the
            model's own one counted, on average and whatever the drafts are; None accepts what the
            model confirms (`SGLANG_SIMULATE_ACC_LEN`; 0 is None).
        tile_spec_drafts: for benchmarks, drafts of a request that a step with `--tile-spec`
            verifies on average, whatever they are worth (`SGLANG_TILE_SPEC_DRAFTS`); None: those
            that pay.
        nccl_sums: NCCL computes all sums of ranks, not our own exchange over memory that all
            their GPUs write (`SGLANG_NCCL_SUMS`).
        torch_profiler_dir: folder that `/start_profile` may write to; None: it may not
            (`SGLANG_TORCH_PROFILER_DIR`).
    """

    test_retract_interval: int = 0
    strict_invariants: bool = False
    mtp_debug_trace: str | None = None
    kv_leak_debug: bool = False
    graph_poison: bool = False
    kv_canary: bool = False
    mtp_fixed_k: bool = False
    simulated_accept_len: float | None = None
    tile_spec_drafts: float | None = None
    nccl_sums: bool = False
    torch_profiler_dir: str | None = None

    @classmethod
    def read(cls) -> Environ:
        """Reads `os.environ`.

        Raises:
            ValueError: if a variable holds a value that it cannot have.
        """
        return cls(
            test_retract_interval=_steps("SGLANG_TEST_RETRACT"),
            strict_invariants=_steps("SGLANG_STRICT_INVARIANTS") > 0,
            mtp_debug_trace=os.environ.get("SGLANG_MTP_DEBUG_TRACE") or None,
            kv_leak_debug=_steps("SGLANG_MTP_KV_LEAK_DEBUG") > 0,
            graph_poison=_steps("SGLANG_CUDA_GRAPH_POISON") > 0,
            kv_canary=_steps("SGLANG_KV_CANARY") > 0,
            mtp_fixed_k=_steps("SGLANG_MTP_FIXED_K") > 0,
            simulated_accept_len=_tokens("SGLANG_SIMULATE_ACC_LEN"),
            tile_spec_drafts=_tokens("SGLANG_TILE_SPEC_DRAFTS"),
            nccl_sums=_steps("SGLANG_NCCL_SUMS") > 0,
            torch_profiler_dir=os.environ.get("SGLANG_TORCH_PROFILER_DIR") or None,
        )


def _steps(name: str) -> int:
    value = os.environ.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return 0
    if value in ("true", "yes", "on"):
        return 3
    if value.isdigit():
        return int(value)
    raise ValueError(
        f"Environment variable {name}={value!r} is not a number of steps or a boolean."
    )


def _tokens(name: str) -> float | None:
    value = os.environ.get(name, "").strip()
    try:
        number = float(value or 0)
    except ValueError:
        number = math.nan
    if number == 0:
        return None
    if not 1 <= number < math.inf:
        raise ValueError(
            f"Environment variable {name}={value!r} is not a number of tokens, at least 1."
        )
    return number
