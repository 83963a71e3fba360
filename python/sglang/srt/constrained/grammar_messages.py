"""What crosses between a server's processes and those that work on grammars.

The first message to such a process is a `GrammarSetup`; then come any of `Request`. `CheckGrammar`
is answered by a `Verdict`, `OpenGrammar` by an `Opened` when it is compiled, and `MaskStep` by the
`Masks` of each of its requests, in their order.
"""

from __future__ import annotations

import msgspec

from sglang.srt.sampling.grammar import Grammar


class GrammarSetup(msgspec.Struct, kw_only=True, frozen=True):
    """What all grammars of a server share.

    Attributes:
        tokenizer_path: folder of the tokenizer.
        vocab_size: V, the width of the logits.
        eos_token_ids: they end an output, where the grammar lets it end.
        never_allowed: ids that nothing may emit.
        max_memory_mib: of the process.
        max_check_seconds: of a processor, for a `CheckGrammar`.
    """

    tokenizer_path: str
    vocab_size: int
    eos_token_ids: list[int]
    never_allowed: list[int] = []
    max_memory_mib: int = 4096
    max_check_seconds: int = 5


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


class WantedMasks(msgspec.Struct):
    """What may a request be given next?

    Attributes:
        tokens: its output since the question before.
        drafts, parents: as in `DraftedTokens`.
    """

    session: int
    tokens: list[int]
    drafts: list[int]
    parents: list[int]


class MaskStep(msgspec.Struct, tag=True):
    """The requests of a step."""

    wanted: list[WantedMasks]


Request = CheckGrammar | OpenGrammar | CloseGrammar | MaskStep


class Verdict(msgspec.Struct, tag=True):
    """Whether a grammar can be used, and if not, why."""

    error: str | None = None


class Opened(msgspec.Struct, tag=True):
    """A grammar is compiled, or cannot be, which `Masks` will say."""

    session: int


class Masks(msgspec.Struct, tag=True):
    """What a request may be given.

    Attributes:
        bitmask: for its certain token and each draft ceil(V / 32) int32, as in `AllowedTokens`.
        error: why there is none.
    """

    bitmask: bytes = b""
    error: str | None = None


Reply = Verdict | Opened | Masks
