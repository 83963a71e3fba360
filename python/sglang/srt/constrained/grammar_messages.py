"""The messages between a server's processes and those that work on grammars.

The first message to such a process is a `GrammarSetup`; then come any of `Request`. `CheckGrammar`
is answered by a `Verdict`, `OpenGrammar` by an `Opened` when it is compiled, and `WantedMasks` by
`Masks`, in any order.
"""

from __future__ import annotations

import os

import msgspec

from sglang.srt.sampling.grammar import Grammar

MAX_SLOW_MASKS = max(1, min(4, (os.cpu_count() or 1) // 2))  # that are worked on at a time


class GrammarSetup(msgspec.Struct, kw_only=True, frozen=True):
    """The settings that all grammars of a server share.

    Attributes:
        tokenizer_path: folder of the tokenizer.
        vocab_size: V, the width of the logits.
        eos_token_ids: they end an output, where the grammar lets it end.
        never_allowed: ids that nothing may emit.
        max_memory_mib: of the process.
        max_check_seconds: of a processor, for a `CheckGrammar`.
        max_request_seconds: of a processor, for all masks of a request.
    """

    tokenizer_path: str
    vocab_size: int
    eos_token_ids: list[int]
    never_allowed: list[int] = []
    max_memory_mib: int = 4096
    max_check_seconds: int = 5
    max_request_seconds: float = 30.0


class CheckGrammar(msgspec.Struct, tag=True):
    """Can this grammar be compiled and used?"""

    grammar: Grammar


class OpenGrammar(msgspec.Struct, tag=True):
    """A request begins.

    Attributes:
        session: a number for it.
        tokens: its output so far.
    """

    session: int
    grammar: Grammar
    tokens: list[int]


class CloseGrammar(msgspec.Struct, tag=True):
    """A request has ended."""

    session: int


class WantedMasks(msgspec.Struct, tag=True):
    """Asks what a request may be given next. Nothing else is asked of it until there is an answer.

    Attributes:
        tokens: its output since the question before.
        drafts, parents: as in `DraftedTokens`.
        is_slow: what was asked of it lately took long.
    """

    session: int
    tokens: list[int]
    drafts: list[int]
    parents: list[int]
    is_slow: bool = False


Request = CheckGrammar | OpenGrammar | CloseGrammar | WantedMasks


class Verdict(msgspec.Struct, tag=True):
    """Says whether a grammar can be used.

    Attributes:
        error: why not; None if it can.
        has_panicked: the library failed, and may fail again in this process.
    """

    error: str | None = None
    has_panicked: bool = False


class Opened(msgspec.Struct, tag=True):
    """A grammar is compiled, or cannot be, which `Masks` will say."""

    session: int


class Masks(msgspec.Struct, tag=True):
    """The tokens that a request may be given.

    Attributes:
        bitmask: for its certain token and each draft ceil(V / 32) int32, as in `AllowedTokens`.
        error: why there is none.
        has_panicked: as in `Verdict`.
        seconds: of a processor, that it took.
    """

    session: int
    bitmask: bytes = b""
    error: str | None = None
    has_panicked: bool = False
    seconds: float = 0.0


Reply = Verdict | Opened | Masks
