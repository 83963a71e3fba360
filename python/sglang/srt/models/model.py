"""The contract of models that a runner runs, and the names of their weights in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from sglang.srt.head_layouts import renamed
from sglang.srt.layers.attention.base_attn_backend import PLAIN, ScoreForm
from sglang.srt.layers.forward_batch import ForwardBatch, ModelOutput
from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import Embedding, Linear


@dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """Says where a checkpoint's tensors are not just the model's parameters and stored buffers.

    Attributes:
        prefixes: beginnings of names, each with what the model has instead; one after the other.
        ignored: tensors that may be there, and are not read.
        zero_if_missing: weights that may be missing.
        apart: beginnings of names of tensors that are there for a drafter, and are not read.
        only: beginnings of the names of all that is read, where another model has the same files;
            empty for no bound.
        computed: parameters that no checkpoint holds.
        tied: weights that checkpoints may store under either of two names, each with its other
            name. A model has one memory for both, unless it is told to `untie`.
        borrowed: weights that another model has too, where values are the same, each with its
            names there, of which the first counts that is there; see `Model.borrow`.
        lender: folder of that model.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    ignored: frozenset[str] = frozenset()
    zero_if_missing: frozenset[str] = frozenset()
    apart: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    computed: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)
    borrowed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lender: Path | None = None

    def own_name(self, name: str) -> str:
        """The model's name of a checkpoint's tensor."""
        return renamed(name, self.prefixes)

    def holds(self, name: str) -> bool:
        """Tells whether a checkpoint's tensor is for this model."""
        is_other = bool(self.only) and not name.startswith(self.only)
        return not (is_other or name.startswith(self.apart))

    def filled_by_tied(self, names: Set[str]) -> dict[str, str]:
        """Tied weights beside `names`, each with the one among them that gives its values."""
        pairs = (*self.tied.items(), *((other, name) for name, other in self.tied.items()))
        return {name: other for name, other in pairs if name not in names and other in names}


@dataclass(frozen=True, slots=True)
class SharedModules:
    """Modules that a model shares with a head that drafts for it. They are no submodules of the
    head, so their weights are the model's alone: updated, released and counted with it."""

    embed_tokens: Embedding
    lm_head: Linear


class Model(nn.Module):
    """A model of any kind. Parameters bear the checkpoint's names, but for `checkpoint_names` and
    fused ones (`FusedLinear`).

    Attributes:
        windows, scores: sliding window of each layer, and the form of the scores of all, for the
            attention backend.
        hidden_width: width of the `ForwardBatch.hidden` that a prompt's rows have; 0 if the model
            reads tokens alone.
        draft_hidden_width: the same of the rows of draft steps: the width of `ModelOutput.hidden`.
        reads_one_row: no step reads more than one row of a request, whatever it is used for.
        mask_token_id: of a head that drafts several tokens in one pass, the token of the rows from
            which it does; None: others.
        checkpoint_names: see there.
    """

    windows: tuple[int | None, ...]
    scores: ScoreForm = PLAIN
    hidden_width: int = 0
    draft_hidden_width: int = 0
    reads_one_row: bool = False
    mask_token_id: int | None = None
    checkpoint_names = CheckpointNames()

    def complete(self) -> None:
        """Computes what no checkpoint holds. The model was built without memory and has just got
        it, in the type of its weights."""
        raise NotImplementedError

    def untie(self) -> None:
        """Gives tied weights memory of their own. The model has none yet."""
        raise NotImplementedError

    def borrow(self, name: str) -> None:
        """Does without a weight, which another model has too. This one has no memory yet."""
        raise NotImplementedError

    def shared_modules(self) -> SharedModules:
        """Gives a head that drafts for this model what it shares."""
        raise NotImplementedError

    def problem_of(self, name: str, values: torch.Tensor) -> str | None:
        """Describes what is wrong with the values of a weight that has the right shape and kind of
        type; None if nothing is."""
        return None

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps its own token ids to the target's, if it drafts for one: int64 of any shape."""
        return ids

    def forward(
        self, batch: ForwardBatch, runtime: LayerRuntime, capture: HiddenCapture = NO_CAPTURE
    ) -> ModelOutput:
        """Hidden states of a batch that `runtime` has planned; see `ModelOutput`."""
        raise NotImplementedError

    def compute_logits(self, hidden: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        """Logits [S, number of tokens], in the model's type, of hidden states [S, hidden_size] that
        `forward` gave: of the rows that somebody reads."""
        raise NotImplementedError
