"""New weights that have been read and do not serve yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang.srt.messages.control import (
    DRAFT_MODEL,
    TARGET_MODEL,
    FromDirectory,
    UpdateWeightsReq,
)
from sglang.srt.weight_sync.weight_reader import DRAFT, TARGET, StagedWeights, split_name

MODELS = {TARGET: TARGET_MODEL, DRAFT: DRAFT_MODEL}  # by the beginning of names of weights


@dataclass(slots=True)
class StagedUpdate:
    """New weights of one call, or of a session, that have not been taken over.

    Attributes:
        versions: new labels, by model.
        complete: models of which they include all weights.
        aborts: whether requests are ended instead of being waited for.
    """

    staged: StagedWeights = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    aborts: bool = False

    def add(self, message: UpdateWeightsReq, staged: StagedWeights) -> None:
        models = models_of(staged)
        self.staged.update(staged)
        self.label(models, message.weight_version)
        self.complete |= models if isinstance(message.source, FromDirectory) else set()
        self.aborts |= message.abort_all_requests

    def label(self, models: set[str], version: str | None) -> None:
        if version is not None:
            self.versions |= dict.fromkeys(models, version)


def models_of(staged: StagedWeights) -> set[str]:
    """Returns the models that have staged weights."""
    beginnings = {split_name(name, MODELS)[0] for name in staged}
    return {MODELS[beginning] for beginning in beginnings}
