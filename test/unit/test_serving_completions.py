"""`/v1/completions` against a scripted scheduler: text offsets, echo, what runs beside the loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest

from fake_backend import LENGTH, Backend, run
from serving_utils import BOS, make_model_dir
from sglang.srt.entrypoints.openai import serving_completions
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.managers.io_struct import BatchStrOutput, PositionLogprobs, ReqTextOutput
from sglang.srt.tokenizer import Tokenizer, load_tokenizer

OUTPUT = "é😀 fox"
EOS_ID, MASK_ID = 1, 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("model")))


def positions(ids: list[int]) -> list[PositionLogprobs]:
    return [PositionLogprobs(token_id=i, logprob=-1.0, top=[(-1.0, i)]) for i in ids]


def complete(
    tokenizer: Tokenizer, prompt: Any, output_ids: list[int], size: int = 1000, **fields: Any
) -> list[dict[str, Any]]:
    """Choices of a completion whose output comes `size` tokens at a time."""
    body = CompletionRequest(prompt=prompt, logprobs=1, max_tokens=64, **fields)
    choices: list[dict[str, Any]] = []

    async def scenario(backend: Backend) -> None:
        completion = serving_completions.Completion(backend.manager, body, "model")
        outputs = completion.chunks() if body.stream else completion.answer()
        async with aclosing(outputs):
            reading = asyncio.ensure_future(anext(outputs))
            await backend.wait_sent(1)
            input_ids = backend.requests[0].input_ids
            stream = tokenizer.decode_stream(
                backend.requests[0].sampling_params.skip_special_tokens
            )
            for start in range(0, len(output_ids), size):
                ids = output_ids[start : start + size]
                is_last = start + size >= len(output_ids)
                output = ReqTextOutput(
                    0, stream.push(ids), ids, LENGTH if is_last else None, 3, start + len(ids), 0, 0
                )
                output.input_logprobs = positions(input_ids[1:]) if body.echo and not start else []
                output.output_logprobs = positions(ids)
                backend.inbox.put_nowait(BatchStrOutput(outputs=[output]))
                if body.stream or is_last:
                    choices.extend((await reading)["choices"])
                    reading = asyncio.ensure_future(anext(outputs, {"choices": []}))
            await reading

    run(tokenizer, scenario)
    return choices


def joined(choices: list[dict[str, Any]]) -> tuple[str, list[int], list[str]]:
    """Text, offsets and tokens of all chunks."""
    offsets = [offset for c in choices for offset in c["logprobs"]["text_offset"]]
    tokens = [token for c in choices for token in c["logprobs"]["tokens"]]
    return "".join(c["text"] for c in choices), offsets, tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("start", ["", BOS, "<mask>"])
def test_offsets_are_places_in_the_text_that_is_shown(
    tokenizer: Tokenizer, stream: bool, by_ids: bool, start: str
) -> None:
    prompt = f"{start}hello é world"
    ids = tokenizer.encode(prompt)
    output_ids = [*tokenizer.encode(OUTPUT, False), EOS_ID]
    choices = complete(
        tokenizer, ids if by_ids else prompt, output_ids, 1, echo=True, stream=stream
    )
    text, offsets, tokens = joined(choices)
    shown = "hello é world" if by_ids else prompt
    assert text == shown + OUTPUT
    assert len(offsets) == len(tokens) == len(ids) + len(output_ids)
    assert offsets == sorted(offsets)
    assert offsets[len(ids)] == len(shown)
    assert offsets[-1] == len(text)
    hidden = {BOS, "<mask>", "<eos>"} if by_ids else {"<eos>"}
    if start != BOS:
        hidden.add(BOS)
    for token, here, after in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
        if token in hidden:
            assert here == after
        elif "\ufffd" not in token:
            assert text[here:after] == token


def test_streamed_offsets_go_on_where_the_last_chunk_ended(tokenizer: Tokenizer) -> None:
    output_ids = tokenizer.encode(OUTPUT * 3, False)
    whole = joined(complete(tokenizer, "hello", output_ids))
    for size in (1, 2, 5):
        assert joined(complete(tokenizer, "hello", output_ids, size, stream=True)) == whole


def test_special_tokens_that_are_shown_have_a_place(tokenizer: Tokenizer) -> None:
    ids = [MASK_ID, *tokenizer.encode("fox", False)]
    text, offsets, _ = joined(complete(tokenizer, "hello", ids, skip_special_tokens=False))
    assert text == "<mask>fox"
    assert offsets[:2] == [0, len("<mask>")]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_built_beside_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    threads: list[int] = []
    push = serving_completions.TextOffsets.push

    def spy(self: serving_completions.TextOffsets, ids: list[int]) -> list[int]:
        threads.append(threading.get_ident())
        return push(self, ids)

    monkeypatch.setattr(serving_completions.TextOffsets, "push", spy)
    complete(tokenizer, "hello", tokenizer.encode(OUTPUT, False), echo=True, stream=stream)
    assert len(threads) == 2
    assert threading.get_ident() not in threads
