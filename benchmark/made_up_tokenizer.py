"""A tokenizer of any size for models of random weights: each id has a text, as in a real one."""

from __future__ import annotations

import random
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<bos>", "<eos>", "<mask>")
SPACE = "\u0120"  # how byte-level vocabularies write it
LETTERS_PER_WORD = (1, 7)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer.json: special tokens, the 256 bytes, and random words, most of them with a
    space before. Encoding gives a token for each byte.

    Raises:
        ValueError: if there is no room for all bytes.
    """
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(tokens):
        raise ValueError(f"A tokenizer has at least {len(tokens)} tokens, not {vocab_size}.")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    chooser = random.Random(0)
    while len(vocabulary) < vocab_size:
        letters = chooser.choices(string.ascii_lowercase, k=chooser.randint(*LETTERS_PER_WORD))
        word = SPACE * (chooser.random() < 0.7) + "".join(letters)
        vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
