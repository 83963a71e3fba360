"""Says what each drafter needs to know: the options of a `DrafterConfig`. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang.srt.head_config import DraftHeadConfig
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.model_config import ModelConfig
from sglang.srt.speculative.drafter_options import DrafterConfig

NGRAM_NAME = "ngram"  # in `DRAFTERS`


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Holds what the drafter needs to know.

    Attributes:
        head: of `load_head_config`, for this target.
        rounds: how many tokens are drafted, in chains or trees.
        suppressed_token_ids: ids that the target never emits.

    Raises:
        ValueError: for trees of a head that drafts chains alone, or of one that has fewer tokens
            than are to follow each draft.
    """

    head: DraftHeadConfig
    rounds: RoundOptions
    suppressed_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count, tree = self.head.num_tokens, self.rounds.tree
        if tree is not None and self.head.mask is not None:
            raise ValueError(
                f"--speculative-eagle-topk {tree.topk}: a head of P-EAGLE drafts chains alone; use"
                " --speculative-eagle-topk 1."
            )
        if tree is not None and tree.topk > count:
            raise ValueError(
                f"--speculative-eagle-topk {tree.topk}: the head drafts {count} different tokens"
                " alone; lower it."
            )

    @property
    def capture(self) -> HiddenCapture:
        """Says what the head reads of the target: last hidden states, or those of some layers."""
        taps = self.head.taps
        return HiddenCapture(all_rows=True) if taps is None else HiddenCapture(taps.layers)


@dataclass(frozen=True, slots=True)
class StandaloneConfig:
    """Holds what the drafter needs to know.

    Attributes:
        draft: of `load_draft_config`, for this target.
        rounds: how many tokens are drafted; no draft is free (`RoundOptions.num_free` 0).
        suppressed_token_ids: ids that the target never emits.
    """

    draft: ModelConfig
    rounds: RoundOptions
    suppressed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NgramLimits:
    """Says which matches count, and which of them win.

    Attributes:
        shortest: how long a match must be, at least 1.
        longest: what is beyond is not compared.
        by_frequency: of equally long matches the most frequent token wins, else the best place.
    """

    shortest: int
    longest: int
    by_frequency: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramConfig:
    """Holds what the drafter needs to know.

    Attributes:
        rounds: how many tokens are drafted, all without a draft step (`num_free`).
        limits: how long matches are, and which of equally long ones wins.
        capacity: tokens of ended requests that are searched, at least 2; None: DEFAULT_CAPACITY.
        breadth: different tokens that may follow the certain one after the shortest matches: 1
            drafts chains, more drafts trees of as many nodes (`RoundOptions.trees_of_any_size`).
        suppressed_token_ids: ids that the target never emits.
        min_breadth: likewise, after the longest matches; `breadth` at most.
        corpus_budget: drafts of a request in a step that may come from the corpus; None: all.
        corpus: see `NgramMemory`.
    """

    rounds: RoundOptions
    limits: NgramLimits
    capacity: int | None = None
    breadth: int = 1
    suppressed_token_ids: tuple[int, ...] = ()
    min_breadth: int = 1
    corpus_budget: int | None = None
    corpus: np.ndarray | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.rounds.tree is None, "Drafts of n-grams need no draft steps."
        assert self.rounds.num_steps <= self.rounds.num_free, "Drafts of n-grams need none."
        assert self.rounds.has_trees == (self.breadth > 1), "Breadth and rounds disagree."


@dataclass(frozen=True, kw_only=True, slots=True)
class PairConfig:
    """Holds what the drafter needs to know.

    Attributes:
        drafter: has a model of its own and drafts chains.
        ngrams: of chains; how many drafts there are is the other drafter's.
    """

    drafter: DrafterConfig
    ngrams: NgramConfig

    def __post_init__(self) -> None:
        assert not self.rounds.has_trees, "Chains alone."
        assert self.ngrams.breadth == 1, "Chains alone."

    @property
    def rounds(self) -> RoundOptions:
        """Says how many tokens are drafted."""
        rounds: RoundOptions = self.drafter.options.rounds
        return rounds
