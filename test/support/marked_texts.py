"""Tells which texts a grammar takes, for a tokenizer with marks as models for chats have them."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from grammar_cases import DEMO, DEMO_EOS
from sglang.srt.constrained.matchers import GrammarCompiler, Matcher, is_set
from sglang.srt.sampling.grammar import Grammar
from sglang.srt.tokenizer import read_tokenizer_json

MARKS = ("<call>", "<think>", "<tool_call>", "</tool_call>")  # tokens that are shown
SPECIAL_MARKS = ("[CALLS]", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")


def make_tokenizer() -> RawTokenizer:
    """The demo model's, with marks as models for chats have them: some special, some not."""
    tokenizer = RawTokenizer.from_str(read_tokenizer_json(DEMO))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKS])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL_MARKS])
    return tokenizer


TOKENIZER = make_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), [DEMO_EOS])


@cache
def compiled(grammar: Grammar) -> Matcher:
    return COMPILER.compile(grammar)


def takes(grammar: Grammar, text: str) -> bool:
    """Tells whether a text is a whole output."""
    matcher = compiled(grammar).copy()
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        if not is_set(matcher.masks(), token):
            return False
        matcher.consume([token])
    return is_set(matcher.masks(), DEMO_EOS)


def random_text(grammar: Grammar, seed: int, max_tokens: int = 200) -> str | None:
    """A text that a grammar takes, by a walk over its masks; None if there was no end in time."""
    choice, matcher, output = random.Random(seed), compiled(grammar).copy(), list[int]()
    for _ in range(max_tokens):
        mask = np.frombuffer(matcher.masks(), np.uint8)
        tokens = set(np.unpackbits(mask, bitorder="little").nonzero()[0].tolist())
        if DEMO_EOS in tokens and (len(tokens) == 1 or choice.random() < 0.7):
            return TOKENIZER.decode(output, skip_special_tokens=False)
        output.append(choice.choice(sorted(tokens - {DEMO_EOS})))
        matcher.consume(output[-1:])
    return None
