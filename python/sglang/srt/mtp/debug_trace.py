"""SGLANG_MTP_DEBUG_TRACE: one JSON line per step of each request that looks ahead."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from sglang.srt.step.worker import StepRecord


class DebugTrace:
    """Appends to a file; docs/mtp.md says what the fields mean.

    Raises:
        ValueError: if the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("a", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"SGLANG_MTP_DEBUG_TRACE={path!r} cannot be written: {error.strerror}."
            ) from None
        self._num_steps: Counter[int] = Counter()

    def __call__(self, record: StepRecord) -> None:
        """Notes a step of one request."""
        if not record.params.mtp_enabled:
            return
        self._file.write(json.dumps(self._fields(record)) + "\n")
        self._num_steps[record.req_id] += 1
        if record.finish_reason is not None:
            del self._num_steps[record.req_id]

    def _fields(self, record: StepRecord) -> dict[str, Any]:
        fed, index = record.fed, record.index
        start = sum(fed.q_lens[:index])
        rows = slice(start, start + fed.q_lens[index])
        tokens, positions = fed.input_ids[rows].tolist(), fed.positions[rows].tolist()
        pending = fed.pending[index, : int(fed.pending_lens[index])].tolist()
        phase = "seed" if record.ends_prompt else "steady" if record.emits else "prefill"
        after = "steady" if record.emits else "prefill"
        return {
            "rid": record.rid,
            "step": self._num_steps[record.req_id],
            "phase_before": phase,
            "phase_after": after if record.finish_reason is None else "finished",
            "q_len": fed.q_lens[index],
            "k": fed.num_predicted[index],
            "effective_k": record.num_emitted,
            "input": tokens,
            "pending": pending if record.emits else [],
            "committed": tokens[: record.num_kept],
            "positions": positions,
            "seq_len_base": positions[0],
            "can_run_cuda_graph": fed.used_graph,
            "finish_reason": record.finish_reason,
        }
