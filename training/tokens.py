"""The demo models' tokenizer, a byte-level BPE; streams of tokens, and windows cut from them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm import tqdm

from training.corpus import Corpus, SourceFile

VOCAB_SIZE = 4096
BOS_TOKEN, EOS_TOKEN, MASK_TOKEN = "<|begin_of_text|>", "<|end_of_text|>", "<|mask|>"
SPECIAL_TOKENS = (BOS_TOKEN, EOS_TOKEN, MASK_TOKEN)
BOS_ID, EOS_ID, MASK_ID = 0, 1, 2

# Pieces that BPE merges within. Line ends and the indentation after them stay apart from each other
# and from the rest, so that a prompt cut before or after a line end or an indentation has the very
# tokens that the model saw there in training. Otherwise: a word with at most one character before
# it, up to three digits, other visible characters, blanks.
PIECE_PATTERN = (
    r"[\r\n]+|(?<=[\r\n])[ \t]+"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+(?!\S)|\s+"
)


def train_tokenizer(files: list[SourceFile], max_bytes: int) -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE entries (Sennrich et al. 2016; bytes as in GPT-2, 2019).

    Trained on the first `max_bytes` of the (shuffled) files. Ids 0, 1, 2 are BOS, EOS and mask;
    the post-processor puts one BOS before an encoded text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    budget, texts = max_bytes, []
    for file in files:
        if budget <= 0:
            break
        texts.append(file.text)
        budget -= len(file.text)
    tokenizer.train_from_iterator(tqdm(texts, desc="BPE", unit="file", mininterval=1.0), trainer)
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    if tokenizer.get_vocab_size() != VOCAB_SIZE or ids != [BOS_ID, EOS_ID, MASK_ID]:
        raise RuntimeError(
            f"BPE training gave {tokenizer.get_vocab_size()} entries and special ids {ids}; "
            f"{VOCAB_SIZE} entries are needed. Train on more text (--bpe-bytes)."
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A",
        pair=f"{BOS_TOKEN} $A {BOS_TOKEN}:1 $B:1",
        special_tokens=[(BOS_TOKEN, BOS_ID)],
    )
    return tokenizer


def pack(tokenizer: Tokenizer, files: list[SourceFile], label: str | None = None) -> np.ndarray:
    """One token stream, BOS text EOS per file. Returns [num_tokens] uint16.

    Special-token names inside a file are encoded as ordinary text. `label` shows a progress bar.
    """
    tokenizer.encode_special_tokens = True
    parts: list[np.ndarray] = []
    group = 256
    starts = range(0, len(files), group)
    for start in tqdm(starts, desc=label, unit="group", mininterval=1.0, disable=label is None):
        texts = [file.text for file in files[start : start + group]]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            parts.append(np.array([BOS_ID, *encoding.ids, EOS_ID], dtype=np.uint16))
    tokenizer.encode_special_tokens = False
    return np.concatenate(parts)


def held_out_streams(
    corpus: Corpus, tokenizer: Tokenizer, max_tokens: int | None
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Per held-out package its token stream [N] uint16 and its bytes of source.

    `max_tokens` keeps the beginning of each stream and that share of the bytes.
    """
    streams, num_bytes = {}, {}
    for row in corpus.packages(corpus.held_out):
        name = str(row["name"])
        files = [file for file in corpus.held_out if file.package.name == name]
        stream = pack(tokenizer, files)
        streams[name] = stream[:max_tokens]
        num_bytes[name] = round(int(row["bytes"]) * len(streams[name]) / len(stream))
    return streams, num_bytes


def training_windows(
    stream: Tensor, context: int, rows: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches (inputs, targets), each [rows, context] int64, from a stream [N] int32.

    Every pass cuts the stream at a new random phase and visits the windows in a new order. Inputs
    begin with BOS in place of the token before the window.
    """
    device = stream.device
    offsets = torch.arange(context, device=device)
    if len(stream) < (rows + 1) * context:
        raise RuntimeError(
            f"{len(stream):,} training tokens do not fill a batch of {rows} x {context}: lower "
            "--batch-size or --context, or raise --max-corpus-bytes."
        )
    while True:
        phase = int(torch.randint(context, (), generator=generator, device=device))
        count = (len(stream) - phase) // context
        order = torch.randperm(count, generator=generator, device=device)
        for chosen in order[: count - count % rows].split(rows):
            targets = stream[(chosen * context + phase)[:, None] + offsets].long()
            inputs = targets.roll(1, dims=1)
            inputs[:, 0] = BOS_ID
            yield inputs, targets
