"""The weights of all models that serve together: a target, and a draft model or none.

One update may change both. They are told apart by their names: those of the draft model begin with
`draft.`, except where an update is of the draft model alone.
"""

from __future__ import annotations

import torch

from sglang.srt.model_loader.weight_copies import have_equal_values
from sglang.srt.sent_tensors import WeightSelector
from sglang.srt.shard import Cut
from sglang.srt.weight_sync.weight_reader import (
    DRAFT,
    TARGET,
    StagedWeights,
    WeightReader,
    WeightUpdateError,
    split_name,
    weights_of,
)
from sglang.srt.weight_sync.weight_store import WeightStore

NO_DRAFT_MODEL = (
    "selector: this server has no draft model with weights of its own; send target or all, or start"
    " the server with --speculative-draft-model-path."
)


class ServingWeights:
    """The weights of the target and of its draft model, each in its `WeightStore`.

    Attributes:
        has_draft: whether there is a draft model with weights of its own.
    """

    def __init__(self, target: WeightStore, draft: WeightStore | None = None) -> None:
        self._stores = {TARGET: target}
        if draft is not None:
            self._stores[DRAFT] = draft
            draft.places.lend(target.places)
        self.has_draft = draft is not None

    def reader(self, selector: WeightSelector) -> WeightReader:
        """Returns what reads new weights of the selected models.

        Raises:
            WeightUpdateError: if they are of a draft model, and there is none.
        """
        if selector == "draft" and not self.has_draft:
            raise WeightUpdateError(NO_DRAFT_MODEL)
        wanted = {"target": (TARGET,), "draft": (DRAFT,), "all": (*self._stores,)}[selector]
        return WeightReader({each: self._stores[each].places for each in wanted}, wanted[0])

    def apply(self, staged: StagedWeights) -> None:
        """Copies staged weights into place, of all models or of none.

        Raises:
            WeightUpdateError: if one of them cannot take its weights; then nothing has changed.
        """
        self.check(staged)
        for store, part in self._changed(staged).items():
            store.apply(part)

    def check(self, staged: StagedWeights) -> None:
        """Returns if `apply` may take these weights."""
        for store, part in self._changed(staged).items():
            store.check(part)
        self._check_lent({each: weights_of(staged, each) for each in self._stores})

    def _changed(self, staged: StagedWeights) -> dict[WeightStore, StagedWeights]:
        parts = {store: weights_of(staged, each) for each, store in self._stores.items()}
        return {store: part for store, part in parts.items() if part}

    def _check_lent(self, parts: dict[str, StagedWeights]) -> None:
        """
        Raises:
            WeightUpdateError: if weights that the draft model borrows have other values than those
                that the target will have.
        """
        if DRAFT not in parts:
            return
        places = self._stores[DRAFT].places
        for name, (place, theirs) in places.lent.items():
            if name not in parts[DRAFT]:
                continue
            given, value = places.part_of(name, parts[DRAFT][name]), place
            if theirs in parts[TARGET]:
                value = places.part_of(name, parts[TARGET][theirs])
            if not have_equal_values(given, value, place.dtype):
                raise WeightUpdateError(
                    f"The update has {name} of the draft model with other values than the target's"
                    f" {theirs}, but this draft model was loaded with equal ones and uses the"
                    " target's; leave it out, or start the server with a draft model whose own one"
                    " differs."
                )

    def names(self) -> list[str]:
        """Names of all weights, the draft model's with `draft.` before it."""
        return [
            beginning + name for beginning, store in self._stores.items() for name in store.names()
        ]

    def value_of(self, name: str) -> torch.Tensor | None:
        """Returns the values that serve under such a name; see `WeightStore.value_of`."""
        beginning, own_name = split_name(name, self._stores)
        return self._stores[beginning].value_of(own_name)

    def stacked_in(self, name: str) -> list[str]:
        """Names the weights that a checkpoint may hold as one under such a name."""
        beginning, own_name = split_name(name, self._stores)
        places = self._stores[beginning].places
        return [beginning + each for each in places.stacked_in(own_name)]

    def cut_of(self, name: str) -> Cut | None:
        """Returns the part of a weight that this rank has; None: all, or there is no such one."""
        beginning, own_name = split_name(name, self._stores)
        return self._stores[beginning].places.cut_of(own_name)

    def empty(self, name: str) -> torch.Tensor:
        """Makes room on the host for all values of a weight that is known to have a place."""
        beginning, own_name = split_name(name, self._stores)
        places = self._stores[beginning].places
        return torch.empty(places.shape_of(own_name), dtype=places[own_name].dtype)
