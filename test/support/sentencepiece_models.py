"""Small tokenizers in the layouts of SentencePiece, and model directories that have them.

Both write a space as "▁", put one before a text, which decoding strips, and have 256 tokens of
single bytes for characters that the vocabulary lacks. PREPEND is the layout of Llama 2, Mistral 7B
and Yi: a normaliser writes "▁". METASPACE: the pre-tokenizer of that name does.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from serving_utils import make_model_dir

PREPEND, METASPACE = LAYOUTS = ("prepend", "metaspace")
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
SPECIAL = ("<unk>", "<s>", "</s>")
FIRST_BYTE_ID = len(SPECIAL)  # the token of byte 0; those of the other bytes follow
SPACE = "▁"
CHARS = [SPACE, *string.ascii_letters, *string.digits, *string.punctuation, "é"]
WORDS = ("def", "▁return", "▁hello", "▁world", "▁the", "▁fox", "▁x", "▁é", "▁▁▁▁")


def make_sentencepiece_tokenizer(layout: str = PREPEND) -> tokenizers.Tokenizer:
    """A BPE tokenizer with byte fallback that adds BOS. It knows CHARS, WORDS and their starts."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = dict.fromkeys((word[:i], word[i]) for word in WORDS for i in range(1, len(word)))
    tokens = [*SPECIAL, *bytes_, *CHARS, *(left + right for left, right in merges)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if layout == PREPEND:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS_ID)]
    )
    return tokenizer


def make_sentencepiece_dir(directory: Path, layout: str = PREPEND, **config: Any) -> Path:
    """A model for `--load-format dummy` with such a tokenizer; `config` goes to its config."""
    special = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    return make_model_dir(
        directory, tokenizer=make_sentencepiece_tokenizer(layout), **special | config
    )
