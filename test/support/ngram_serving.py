"""A scheduler with drafts of n-grams, and what its memory of ended requests should hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafted_serving import Drafted
from drafter_checks import DraftCounter
from eagle_serving import group_for, setup_for
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.drafter_configs import NgramConfig, NgramLimits
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.speculative.ngram_confidence import MatchConfidence
from sglang.srt.speculative.ngram_memory import NO_TAG, NgramMemory
from sglang.srt.speculative.ngram_texts import joined_texts
from sglang.srt.step.price_table import PriceTable
from utils import Setup

Key = tuple[str, str]
AMPLE = 5000  # slots, for all texts of a test


def ngram_config(
    num_drafts: int,
    breadth: int = 1,
    capacity: int = AMPLE,
    longest: int = 6,
    suppressed: tuple[int, ...] = (),
    by_frequency: bool = False,
    min_breadth: int = 1,
    corpus: list[list[int]] | None = None,
    corpus_budget: int | None = None,
    **options: Any,
) -> DrafterConfig:
    """`options` are of `RoundOptions`; `corpus` is of texts."""
    options["trees_of_any_size"] = breadth > 1
    rounds = RoundOptions(num_drafts, num_free=num_drafts, **options)
    limits = NgramLimits(1, longest, by_frequency)
    config = NgramConfig(
        rounds=rounds,
        limits=limits,
        capacity=capacity,
        breadth=breadth,
        suppressed_token_ids=suppressed,
        min_breadth=min_breadth,
        corpus_budget=corpus_budget,
        corpus=None if corpus is None else joined_texts(corpus),
    )
    return DrafterConfig("ngram", config)


def learnt(harness: Drafted) -> MatchConfidence:
    """Returns what the drafter has counted on the device."""
    chains: MatchConfidence = harness.drafter._chains
    return chains


class Served(Drafted):
    """Serves with n-gram drafts and counts in `seen` what becomes of them. `listeners` are told of
    each step."""

    def __init__(
        self,
        target: Path,
        drafter: DrafterConfig,
        setup: Setup | None = None,
        prices: PriceTable | None = None,
    ) -> None:
        setup = setup or setup_for(drafter.options.rounds.num_steps)
        counter = DraftCounter()
        self.seen: Counter[str] = counter.seen
        self.listeners: list[Callable[[ComputedStep], None]] = [counter]

        def on_step(step: ComputedStep) -> None:
            for listener in self.listeners:
                listener(step)

        self.group = group_for(target, drafter, setup)
        super().__init__(
            self.group,
            drafter,
            setup,
            checks_kv=True,
            prices=prices,
            on_step=on_step,
        )
        self.prompts: dict[int, tuple[list[int], Key]] = {}

    @property
    def memory(self) -> NgramMemory:
        memory: NgramMemory = self.drafter.memory
        return memory

    def submit(self, input_ids: list[int], *args: Any, **params: Any) -> int:
        req_id = super().submit(input_ids, *args, **params)
        cache_key = params.get("cache_key", ("", ""))
        self.prompts[req_id] = input_ids, (*cache_key, params.get("deterministic", False))
        return req_id

    def flush(self) -> None:
        """Texts that have ended are kept once a further step begins: that of a request of another
        key, whose own text is not kept."""
        self.submit([0], cache_key=("flush", ""), temperature=0.0, max_new_tokens=1)
        self.run()

    def texts_told(self) -> dict[int, list[tuple[int, ...]]]:
        """Returns by the tags of namespaces the texts of requests that have ended and were not
        aborted, as their clients know them, without prefixes that were cached. In order of size."""
        found: dict[int, list[tuple[int, ...]]] = {}
        for req_id, (prompt, key) in self.prompts.items():
            told = self.outputs[req_id]
            if key[0] == "flush" or told.finish_reason is None:
                continue
            if told.finish_reason.type != "abort":
                text = tuple(prompt + told.token_ids)[told.cached_tokens :]
                found.setdefault(self.memory.tag_of(key), []).append(text)
        return {tag: sorted(texts) for tag, texts in found.items()}

    def texts_kept(self) -> dict[int, list[tuple[int, ...]]]:
        """Returns the texts that the memory holds, likewise."""
        found: dict[int, list[tuple[int, ...]]] = {}
        text: list[int] = []
        before = NO_TAG
        for token, tag in zip(self.memory.tokens.tolist(), self.memory.tags.tolist(), strict=True):
            if tag == NO_TAG and text:
                found.setdefault(before, []).append(tuple(text))
                text = []
            elif tag != NO_TAG:
                assert not text or tag == before, "Texts without an end between them."
                text.append(token)
            before = tag
        return {tag: sorted(texts) for tag, texts in found.items()}
