"""Says which drafter a server has, and what it needs before any model is loaded. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture


@dataclass(frozen=True, slots=True)
class AcceptThresholds:
    """Says how probable a draft of a sampled request must be: see `ConfirmByThresholds`.

    Attributes:
        single, acc: 0 to 1; SGLang's --speculative-accept-threshold-single and -acc.
    """

    single: float = 1.0
    acc: float = 1.0

    @property
    def is_exact(self) -> bool:
        """Tells whether tokens follow the target's own distribution."""
        return self.single == self.acc == 1.0


EXACT = AcceptThresholds()


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Says which drafter a server has.

    Attributes:
        name: in `DRAFTERS` (registry.py).
        options: what that drafter takes.
        thresholds: which of its drafts are accepted.
        asked_as: names by which requests choose a drafter, in lower case, each with the name that
            people are shown. Empty: `name` alone.
    """

    name: str
    options: Any
    thresholds: AcceptThresholds = EXACT
    asked_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> Mapping[str, str]:
        """Returns the names by which requests choose a drafter, each with the one that is shown."""
        return self.asked_as or {self.name: self.name}

    @property
    def shown(self) -> tuple[str, ...]:
        """Returns the names of its drafters, as people are shown them."""
        return tuple(dict.fromkeys(self.names.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterNeeds:
    """Holds what a drafter needs before any model is loaded.

    Attributes:
        max_drafts: drafts of a request in a step at most; with trees, nodes but the root.
        max_rows: rows that a request without a prompt feeds in a step at most.
        num_steps: initial draft depth, reported to clients (`speculative_num_steps`); 0 if it
            varies. `StepPlan.draft_length` is the present one.
        tiers: all numbers that it may become, for people to know.
        extra_slots: slots that such a request needs beyond those of `max_rows`, at most: draft
            steps write after the rows that the target keeps (`speculative/draft_steps.py`).
        has_trees: drafts may be trees.
        topk: drafts that follow each one, at most, for people to know.
        max_confirmed: drafts of a request that a step may confirm, at most; None: all, as of
            chains.
        keeps_confidence: the drafter packs steps (`StepCounts.packed`), or reads how sure it was of
            drafts (`RequestRows.confidence`).
        capture: which hidden states the target gives.
        suppressed_token_ids: ids that the target never emits.
        needs_prices: prices of steps are measured at start-up.
        price_cache: folder where these are kept for the next start (`TileSpecProfiler`); None: they
            are not.
        token_shift: how many positions ahead the token is that the drafter's models are fed at each
            position: 1 where they are fed the next one. For debugging alone (`KVCanary`).
        bypasses_graphs: the target's steps of several rows per request replay no captured graph.
        rounds: numbers of drafts that every request may verify, and be given, in steps that may be
            captured, each with the batch sizes that have it. Then `extend` and `propose` do nothing
            on the host that depends on more than these numbers, and the plan of a step has
            `StepPlan.next_drafts`. Empty: no step may be.
        proposes_without_output: `propose` gives drafts also where `extend` gave nothing.
    """

    max_drafts: int
    max_rows: int
    num_steps: int = 0
    tiers: tuple[int, ...] = ()
    extra_slots: int = 0
    has_trees: bool = False
    topk: int = 1
    max_confirmed: int | None = None
    keeps_confidence: bool = False
    capture: HiddenCapture = NO_CAPTURE
    suppressed_token_ids: tuple[int, ...] = ()
    needs_prices: bool = False
    price_cache: Path | None = None
    token_shift: int = 0
    bypasses_graphs: bool = False
    rounds: Mapping[int, Sequence[range]] = field(default_factory=dict)
    proposes_without_output: bool = False

    @property
    def max_slots(self) -> int:
        """Slots beyond its watermark that a request without a prompt needs, at most:
        `StepWidth.decode_rows` is no more."""
        return self.max_rows + self.extra_slots
