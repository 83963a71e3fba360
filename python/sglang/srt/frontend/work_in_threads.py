"""Runs long work on a request in threads, so that the event loop is free for others: reading and
checking large bodies, compiling stop expressions, turning texts into token ids and back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sglang.srt.constrained.grammar_check import GrammarCheck, GrammarRefused, TooManyChecks
from sglang.srt.frontend.errors import ServiceError, field_error, shorten
from sglang.srt.frontend.generate_body import CheckedRequest
from sglang.srt.frontend.request_limits import RequestLimits, check_length, check_num_tokens
from sglang.srt.garbage import return_freed_memory
from sglang.srt.stop_expressions import check_expression_list
from sglang.srt.tokenizer import Tokenizer

TOKENIZE_IN_THREAD_CHARS = 16_384  # below it encoding takes less than about 3 ms
USUAL_CHARS_PER_TOKEN = 8  # the usual most, in texts of any language
PIECE_CHARS = 65_536
SURELY_MORE = 2  # cuts between pieces may add some tokens, but never double their number
FREED_CHARS = 200_000  # from here on, memory of encoding is given back to the system
CHECK_IN_THREAD_BYTES = 65_536  # below it parsing and checking takes some milliseconds at most
TOO_MANY_CHECKS = (
    "The grammar of this request could not be checked: {}. Try again later, or send one that this"
    " server knows."
)
T = TypeVar("T")
U = TypeVar("U")


async def in_thread_if_large(work: Callable[[], T], num_bytes: int) -> T:
    """Returns the result of `work` on a body of `num_bytes`; runs it in a thread if they are
    many."""
    return work() if num_bytes < CHECK_IN_THREAD_BYTES else await asyncio.to_thread(work)


async def map_texts(function: Callable[[T], U], items: Sequence[T], num_chars: int) -> list[U]:
    """Returns `function` of each item. With many characters it runs in a thread, so that the loop
    is free.

    A caller that is cancelled ends the thread's work after the item at hand.
    """
    if num_chars < TOKENIZE_IN_THREAD_CHARS:
        return [function(item) for item in items]
    has_left = threading.Event()

    def work() -> list[U]:
        try:
            return [function(item) for item in items if not has_left.is_set()]
        finally:
            if num_chars >= FREED_CHARS:
                return_freed_memory()

    try:
        return await asyncio.to_thread(work)
    finally:
        has_left.set()


async def _check_stop_expressions(request: CheckedRequest) -> None:
    """Compiles the stop expressions of a request, in a thread."""
    expressions = [text for p in request.prompts for text in p.sampling_params.stop_regexes]
    if not expressions:
        return
    try:
        await asyncio.to_thread(check_expression_list, expressions)
    except (ValueError, TimeoutError) as error:
        raise field_error("sampling_params.stop_regex", shorten(str(error))) from None


async def check_grammars(request: CheckedRequest, grammars: GrammarCheck | None) -> None:
    """Has the grammars of a request compiled, in a process of its own.

    Raises:
        RequestError: if one cannot be used.
        ServiceError: if too many wait for that.
    """
    params = [prompt.sampling_params for prompt in request.prompts]
    for grammar in dict.fromkeys(each.grammar for each in params):
        if grammar is None or grammars is None:
            continue
        try:
            await grammars.check(grammar)
        except GrammarRefused as error:
            raise field_error(f"sampling_params.{grammar.kind}", str(error)) from None
        except TooManyChecks as error:
            raise ServiceError(TOO_MANY_CHECKS.format(error), 503) from None


async def encode_texts(
    texts: Mapping[str, str], tokenizer: Tokenizer, limits: RequestLimits, add_special_tokens: bool
) -> list[list[int]]:
    """Returns the token ids of each text.

    Args:
        texts: by the client's names for them.

    Raises:
        RequestError: if one has more tokens than a request may have.
    """
    for name, text in texts.items():
        await refuse_long_text(name, text, tokenizer, limits)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens)

    values = list(texts.values())
    ids = await map_texts(encode, values, sum(map(len, values)))
    for name, found in zip(texts, ids, strict=True):
        check_num_tokens(name, len(found), limits)
    return ids


async def refuse_long_text(
    name: str, text: str, tokenizer: Tokenizer, limits: RequestLimits
) -> None:
    """Checks a text of very many characters before it is encoded as a whole, which takes time and
    200 bytes for each token. Its pieces together have about as many tokens as the text.

    Raises:
        RequestError: if it surely has more tokens than a request may have.
    """
    most = limits.max_req_len
    check_num_tokens(name, tokenizer.min_num_tokens(text), limits, is_counted=False)
    if len(text) <= most * USUAL_CHARS_PER_TOKEN:
        return
    count = 0
    for start in range(0, len(text), PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS]
        count += len(await asyncio.to_thread(tokenizer.encode, piece, False))
        if count > SURELY_MORE * most:
            check_num_tokens(name, most + 1, limits, is_counted=False)


async def encode_prompts(
    request: CheckedRequest, tokenizer: Tokenizer, limits: RequestLimits
) -> list[list[int]]:
    """Returns the token ids of each prompt, after it has checked its stop expressions.

    Raises:
        RequestError: if one has no tokens or too many, or such an expression cannot be used.
    """
    await _check_stop_expressions(request)
    for index, prompt in enumerate(request.prompts):
        if prompt.text is not None:
            await refuse_long_text(_name_of(request, index), prompt.text, tokenizer, limits)

    def encode(index: int) -> list[int]:
        return _input_ids_of(request, index, tokenizer, limits)

    num_chars = sum(len(prompt.text or "") for prompt in request.prompts)
    return await map_texts(encode, range(len(request.prompts)), num_chars)


def bos_alone(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids used for a text without tokens: the BOS, if the model has one."""
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def check_encoded_ids(name: str, ids: list[int], tokenizer: Tokenizer, vocab_size: int) -> None:
    """
    Raises:
        RequestError: with the text of the first token that the model does not have.
    """
    if max(ids, default=0) < vocab_size:
        return
    unknown = next(token_id for token_id in ids if token_id >= vocab_size)
    text = shorten(tokenizer.decode([unknown], skip_special_tokens=False))
    raise field_error(
        name,
        f"has the token {text!r}, whose id {unknown} is beyond the model's vocab_size {vocab_size}:"
        " the tokenizer has more tokens than the model. Leave that text out, or start the server"
        " with the model's own tokenizer (--tokenizer-path)",
    )


def _input_ids_of(
    request: CheckedRequest, index: int, tokenizer: Tokenizer, limits: RequestLimits
) -> list[int]:
    prompt, field = request.prompts[index], _name_of(request, index)
    max_new_tokens = 1 if prompt.has_default_length else prompt.sampling_params.max_new_tokens
    if prompt.text is None:
        input_ids = prompt.input_ids or []
    else:
        # A text that cannot fit is refused before it is encoded.
        at_least = max(1, tokenizer.min_num_tokens(prompt.text))
        check_length(field, at_least, max_new_tokens, limits, is_counted=False)
        input_ids = tokenizer.encode(prompt.text) or bos_alone(tokenizer)
        check_encoded_ids(field, input_ids, tokenizer, limits.vocab_size)
    check_length(field, len(input_ids), max_new_tokens, limits)
    return input_ids


def _name_of(request: CheckedRequest, index: int) -> str:
    """Returns the client's name of a prompt."""
    name = "input_ids" if request.prompts[index].text is None else "text"
    return f"{name}[{index}]" if request.is_batch else name
