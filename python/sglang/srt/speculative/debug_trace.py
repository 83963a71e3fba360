"""SGLANG_MTP_DEBUG_TRACE: one JSON line per step of each request with `mtp_enabled`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.lookahead.contract import StepRecord
from sglang.srt.observability.request_step import RequestStep
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.step.worker import HostResult


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """The inputs and results of a step of R requests.

    Attributes:
        pending: [R, P] int64; tokens that the step leaves without KV.
        pending_lens: [R] int64; how many.
    """

    inputs: ForwardBatch
    num_predicted: list[int]
    pending: torch.Tensor
    pending_lens: torch.Tensor
    used_graph: bool


class DebugTrace:
    """Appends to a file; docs/mtp.md says what the fields mean.

    The worker tells of every step that it launches, the scheduler of every step that it reads.

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

    def launched(self, step: ComputedStep) -> _LaunchedStep:
        """Returns what a launched step fed, for its record."""
        state, rows = step.state, step.inputs.rows
        pending, pending_lens = state.pending(rows), state.pending_lens[rows]
        used_graph = step.forward.used_graph
        num_predicted = step.plan.counts.num_predicted
        return _LaunchedStep(step.inputs, num_predicted, pending, pending_lens, used_graph)

    def read(self, requests: Sequence[RequestStep], result: HostResult) -> None:
        """Writes the lines of a step."""
        assert isinstance(result.record, StepRecord), "The worker gave it."
        [step] = result.record.notes
        assert isinstance(step, _LaunchedStep), "`launched` gave it."
        for request in requests:
            if not request.params.mtp_enabled:
                continue
            self._file.write(json.dumps(self._fields(step, request)) + "\n")
            self._num_steps[request.req_id] += 1
            if request.finish_reason is not None:
                del self._num_steps[request.req_id]

    def _fields(self, step: _LaunchedStep, request: RequestStep) -> dict[str, Any]:
        inputs, index = step.inputs, request.index
        start, q_len = sum(inputs.q_lens[:index]), inputs.q_lens[index]
        if inputs.q_starts is not None:
            start, end = inputs.q_starts[index : index + 2].tolist()
            q_len = end - start
        rows = slice(start, start + q_len)
        tokens, positions = inputs.input_ids[rows].tolist(), inputs.positions[rows].tolist()
        pending = step.pending[index, : int(step.pending_lens[index])].tolist()
        phase = "seed" if request.ends_prompt else "steady" if request.emits else "prefill"
        after = "steady" if request.emits else "prefill"
        return {
            "rid": request.rid,
            "step": self._num_steps[request.req_id],
            "phase_before": phase,
            "phase_after": after if request.finish_reason is None else "finished",
            "q_len": q_len,
            "k": step.num_predicted[index],
            "effective_k": request.num_emitted,
            "input": tokens,
            "pending": pending if request.emits else [],
            "committed": tokens[: request.num_kept],
            "positions": positions,
            "seq_len_base": positions[0],
            "can_run_cuda_graph": step.used_graph,
            "finish_reason": request.finish_reason,
        }
