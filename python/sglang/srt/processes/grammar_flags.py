"""Sets up grammars from the flags and the model."""

from __future__ import annotations

from collections.abc import Iterable

from sglang.srt.constrained.grammar_messages import GrammarSetup
from sglang.srt.processes.tokenizer_flags import tokenizer_folder
from sglang.srt.server_args import ServerArgs

NO_GRAMMARS = "none"
REFUSAL = "the server was started with --grammar-backend none; start it without that flag"
NEEDS_TOKENIZER = "needs a tokenizer; start the server without --skip-tokenizer-init"


def grammar_refusal(args: ServerArgs) -> str | None:
    """Says why no request may have a grammar, and the remedy; None: it may."""
    if args.grammar_backend == NO_GRAMMARS:
        return REFUSAL
    return NEEDS_TOKENIZER if args.skip_tokenizer_init else None


def grammar_setup(
    args: ServerArgs,
    vocab_size: int,
    eos_token_ids: Iterable[int],
    never_allowed: Iterable[int] = (),
) -> GrammarSetup | None:
    """Returns the settings for the processes that work on grammars; None if requests may have none.

    Args:
        never_allowed: ids that nothing may emit.
    """
    folder = tokenizer_folder(args)
    if folder is None or grammar_refusal(args) is not None:
        return None
    return GrammarSetup(
        tokenizer_path=str(folder),
        vocab_size=vocab_size,
        eos_token_ids=sorted(eos_token_ids),
        never_allowed=sorted(never_allowed),
        max_request_seconds=args.max_grammar_time_s,
    )
