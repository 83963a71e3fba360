"""Weights without a model, for schedulers that tests step by hand."""

from __future__ import annotations

from typing import Any

import torch

from fake_worker import FakeWorker
from sglang.srt.sent_tensors import WeightSelector
from sglang.srt.weight_sync.weight_reader import StagedWeights, WeightUpdateError


class FakeWeights:
    """Staging is recorded, taking over changes what a `FakeWorker` computes KV with.

    Attributes:
        num_applied: updates taken over.
        error: raised by the next `apply`, once.
    """

    has_draft = False

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.num_applied = 0
        self.values = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.ones(2)}
        self.error: Exception | None = None

    def reader(self, selector: WeightSelector) -> FakeWeights:
        return self

    def from_directory(self, path: str) -> StagedWeights:
        return self._stage(path)

    def from_file(self, path: str) -> StagedWeights:
        return self._stage(path)

    def from_safetensors(self, data: bytes) -> StagedWeights:
        return self._stage(data.decode())

    def from_tensors(self, tensors: Any) -> StagedWeights:
        return dict(tensors)

    def apply(self, staged: StagedWeights) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.num_applied += 1
        for name in staged.keys() & self.values.keys():
            self.values[name] = staged[name].expand(self.values[name].shape).clone()
        if isinstance(self._worker, FakeWorker):
            self._worker.weights_version += 1

    def names(self) -> list[str]:
        return sorted(self.values)

    def value_of(self, name: str) -> torch.Tensor | None:
        return self.values.get(name)

    def _stage(self, name: str) -> StagedWeights:
        if name == "bad":
            raise WeightUpdateError("There is no such weight.")
        return {name: torch.zeros(1)}
