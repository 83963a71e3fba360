"""`/v1/completions` against a scripted scheduler: text offsets, echo, what runs beside the loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest

from fake_backend import LENGTH, Backend, run
from sentencepiece_models import LAYOUTS, make_sentencepiece_dir
from serving_utils import BOS, make_model_dir
from sglang.srt.entrypoints.openai import serving_completions
from sglang.srt.entrypoints.openai.protocol import CompletionRequest, StreamOptions
from sglang.srt.frontend.errors import RequestError
from sglang.srt.messages.requests import BatchStrOutput, PositionLogprobs, ReqTextOutput
from sglang.srt.tokenizer import Tokenizer, load_tokenizer

OUTPUT = "é😀 fox"
EOS_ID, MASK_ID = 1, 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("layouts")
    return {
        layout: load_tokenizer(make_sentencepiece_dir(folder / layout, layout))
        for layout in LAYOUTS
    }


def positions(ids: list[int], others: tuple[int, ...] = ()) -> list[PositionLogprobs]:
    """Each token is the best one; `others` come behind it."""
    logprobs = [-1.0 - place for place in range(1 + len(others))]
    return [PositionLogprobs(i, -1.0, logprobs, [i, *others]) for i in ids]


def complete(
    tokenizer: Tokenizer, prompt: Any, output_ids: list[int], size: int = 1000, **fields: Any
) -> list[dict[str, Any]]:
    """Choices of all answers of `answers`."""
    found = answers(tokenizer, prompt, output_ids, size, **fields)
    return [choice for answer in found for choice in answer["choices"]]


def answers(
    tokenizer: Tokenizer,
    prompt: Any,
    output_ids: list[int],
    size: int = 1000,
    spans: tuple[tuple[str, int], ...] = (),
    others: tuple[int, ...] = (),
    **fields: Any,
) -> list[dict[str, Any]]:
    """The answer, or the chunks, of a completion whose output comes `size` tokens at a time."""
    body = CompletionRequest(prompt=prompt, logprobs=1, max_tokens=64, **fields)
    found: list[dict[str, Any]] = []

    async def scenario(backend: Backend) -> None:
        completion = serving_completions.Completion(backend.manager, body, "model")
        outputs = completion.chunks() if body.stream else completion.answer()
        async with aclosing(outputs):
            reading = asyncio.ensure_future(anext(outputs))
            await backend.wait_sent(1)
            assert backend.requests[0].streams == bool(body.stream)
            input_ids = backend.requests[0].input_ids
            skips = backend.requests[0].sampling_params.skip_special_tokens
            stream = tokenizer.decode_stream(skips, input_ids)
            for start in range(0, len(output_ids), size):
                ids = output_ids[start : start + size]
                is_last = start + size >= len(output_ids)
                output = ReqTextOutput(
                    0, stream.push(ids), ids, LENGTH if is_last else None, 3, start + len(ids), 0, 0
                )
                output.input_logprobs = positions(input_ids[1:]) if body.echo and not start else []
                output.output_logprobs = positions(ids, others)
                known = [span for span in spans if span[1] < start + len(ids)]
                output.weight_spans = {"target": known} if known else {}
                backend.inbox.put_nowait(BatchStrOutput(outputs=[output]))
                if body.stream or is_last:
                    found.append(await reading)
                    reading = asyncio.ensure_future(anext(outputs, None))
            if (last := await reading) is not None:
                found.append(last)

    run(tokenizer, scenario)
    return found


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello world", "<s>hello</s>world", "漢 ", [1, 1, 2]])
def test_offsets_are_true_where_a_first_space_is_stripped(
    sentencepiece: dict[str, Tokenizer], layout: str, stream: bool, prompt: Any
) -> None:
    tokenizer = sentencepiece[layout]
    output_ids = tokenizer.encode("hello é😀 fox", add_special_tokens=False)
    for echo in (False, True):
        choices = complete(tokenizer, prompt, output_ids, 1, echo=echo, stream=stream)
        text, offsets, tokens = joined(choices)
        start = prompt if echo and isinstance(prompt, str) else ""
        space = " " if isinstance(prompt, str) else ""  # else the output begins the text
        assert text == f"{start}{space}hello é😀 fox"
        assert offsets == sorted(offsets)
        assert all(0 <= offset <= len(text) for offset in offsets)
        num_output = len(output_ids)
        assert offsets[-num_output] == len(start)
        pieces = [
            text[here:after] for here, after in zip(offsets, [*offsets[1:], len(text)], strict=True)
        ]
        assert "".join(pieces) == text
        for token, piece in zip(tokens[-num_output:], pieces[-num_output:], strict=True):
            assert piece in (token, token.removeprefix(" ")) or "\ufffd" in token
        if echo and prompt == "<s>hello</s>world":
            assert {"<s>", "</s>"} <= set(pieces)
        assert "".join(tokens[-num_output:]).count(" ") == 3


def test_of_tokens_with_the_same_text_the_best_stays(tokenizer: Tokenizer) -> None:
    output_ids = tokenizer.encode("漢", False)
    parts = tokenizer.encode("語", False)
    assert len(output_ids) == 3
    (choice,) = complete(tokenizer, "hello", output_ids, others=(*parts, EOS_ID))
    for top in choice["logprobs"]["top_logprobs"]:
        assert top == {"\ufffd": -1.0, "<eos>": -2.0 - len(parts)}


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
    complete(tokenizer, "hello", tokenizer.encode(OUTPUT, False), stream=stream)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


SPANS = (("step-1", 0), ("step-2", 2))
METADATA = {
    "weight_version": "step-2",
    "weight_versions": [
        {"index": 0, "version": "step-1", "start": 0, "end": 2},
        {"index": 0, "version": "step-2", "start": 2, "end": 4},
    ],
}


@pytest.mark.parametrize("usage", [None, False, True])
def test_last_chunk_says_which_weights_generated_what(
    tokenizer: Tokenizer, usage: bool | None
) -> None:
    options = None if usage is None else StreamOptions(include_usage=usage)
    fields = {"stream": True, "stream_options": options}
    *chunks, last = answers(tokenizer, "hello", [5, 6, 7, 8], 1, SPANS, **fields)
    assert last["metadata"] == METADATA
    assert ("usage" in last) == bool(usage)
    assert len(chunks) == 3 + bool(usage)
    assert not any("metadata" in chunk for chunk in chunks)


def test_each_chunk_has_the_usage_of_its_choice_if_wanted(tokenizer: Tokenizer) -> None:
    options = StreamOptions(continuous_usage_stats=True)
    chunks = answers(tokenizer, "hello", [5, 6, 7], 1, stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3]
    assert all(chunk["choices"] for chunk in chunks)


def test_answer_says_which_weights_generated_what(tokenizer: Tokenizer) -> None:
    (answer,) = answers(tokenizer, "hello", [5, 6, 7, 8], spans=SPANS)
    assert answer["metadata"] == METADATA
    (answer,) = answers(tokenizer, "hello", [5, 6, 7, 8])
    assert "metadata" not in answer


@pytest.mark.parametrize("stream", [False, True])
def test_weights_of_every_choice_are_told_once(tokenizer: Tokenizer, stream: bool) -> None:
    """Choices may end in any order; only the end of the last one is the end."""
    body = CompletionRequest(prompt=["a", "b"], stream=stream)

    async def scenario(backend: Backend) -> None:
        completion = serving_completions.Completion(backend.manager, body, "model")

        async def read() -> list[dict[str, Any]]:
            outputs = completion.chunks() if stream else completion.answer()
            return [answer async for answer in outputs]

        reading = asyncio.create_task(read())
        await backend.wait_sent(2)
        for index, version in ((1, "new"), (0, "old")):
            req_id = backend.requests[index].req_id
            output = ReqTextOutput(
                req_id, "x", [5], LENGTH, 3, 1, 0, 0, weight_spans={"target": [(version, 0)]}
            )
            backend.inbox.put_nowait(BatchStrOutput(outputs=[output]))
            await asyncio.sleep(0.01)
        *others, last = await reading
        assert not any("metadata" in chunk for chunk in others)
        assert last["metadata"] == {
            "weight_version": "old",
            "weight_versions": [
                {"index": 0, "version": "old", "start": 0, "end": 1},
                {"index": 1, "version": "new", "start": 0, "end": 1},
            ],
        }

    run(tokenizer, scenario)


def test_an_empty_prompt_is_the_bos_alone(tokenizer: Tokenizer) -> None:
    (choice,) = complete(tokenizer, "", [5, 6], echo=True)
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]


@pytest.mark.parametrize(
    ("max_tokens", "prompt", "field"), [(5000, "hello", "max_tokens"), (1, [5] * 300, "prompt[0]")]
)
def test_what_is_too_long_is_named(
    tokenizer: Tokenizer, max_tokens: int, prompt: Any, field: str
) -> None:
    body = CompletionRequest(prompt=prompt, max_tokens=max_tokens)

    async def scenario(backend: Backend) -> None:
        outputs = serving_completions.Completion(backend.manager, body, "model").answer()
        with pytest.raises(RequestError) as caught:
            await anext(outputs)
        assert caught.value.field == field
        assert caught.value.message.startswith(f"{field}: the prompt ")
        assert f"and max_tokens ({max_tokens})" in caught.value.message

    run(tokenizer, scenario)


@pytest.mark.parametrize(("num_prompt", "expected"), [(5, 16), (250, 6), (255, 1)])
def test_the_default_length_gives_way_to_a_long_prompt(
    tokenizer: Tokenizer, num_prompt: int, expected: int
) -> None:
    """As in `/generate`: nobody has asked for these tokens."""
    body = CompletionRequest(prompt=[[5] * num_prompt, [5]])

    async def scenario(backend: Backend) -> None:
        outputs = serving_completions.Completion(backend.manager, body, "model").answer()
        reading = asyncio.ensure_future(anext(outputs))
        await backend.wait_sent(2)
        lengths = [request.sampling_params.max_new_tokens for request in backend.requests]
        assert lengths == [expected, 16]
        for request in backend.requests:
            backend.put(request.req_id, "x", (5,), LENGTH)
        await reading

    run(tokenizer, scenario)


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        ([0, 3, 3, 0, 3, 3], 0),  # the other samples find the prompt of the first
        ([2, 3, 3, 1, 3, 3], 3),
        ([9, 3, 3, 0, 0, 0], 3),  # retracted, it finds its own output too
    ],
)
@pytest.mark.parametrize("mode", ["whole", "stream", "continuous"])
def test_cached_tokens_are_those_of_each_prompts_first_sample(
    tokenizer: Tokenizer, mode: str, cached: list[int], expected: int
) -> None:
    options = StreamOptions(include_usage=True, continuous_usage_stats=mode == "continuous")
    body = CompletionRequest(
        prompt=["a", "b"],
        n=3,
        stream=mode != "whole",
        stream_options=None if mode == "whole" else options,
    )
    found: list[dict[str, Any]] = []

    async def scenario(backend: Backend) -> None:
        completion = serving_completions.Completion(backend.manager, body, "model")

        async def read() -> None:
            outputs = completion.chunks() if body.stream else completion.answer()
            found.extend([answer async for answer in outputs])

        reading = asyncio.create_task(read())
        await backend.wait_sent(len(cached))
        for request, num in reversed(list(zip(backend.requests, cached, strict=True))):
            output = ReqTextOutput(request.req_id, "x", [5], LENGTH, 3, 1, num, 0)
            backend.inbox.put_nowait(BatchStrOutput(outputs=[output]))
        await reading

    run(tokenizer, scenario)
    *chunks, last = [answer["usage"] for answer in found if "usage" in answer]
    assert last["prompt_tokens"] == 6
    assert last["prompt_tokens_details"] == {"cached_tokens": expected}
    assert len(chunks) == (len(cached) if mode == "continuous" else 0)
    of_chunks = sorted(usage["prompt_tokens_details"]["cached_tokens"] for usage in chunks)
    assert of_chunks == (sorted(min(num, 3) for num in cached) if chunks else [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_ids", [False, True])
def test_token_ids_of_prompt_and_output(tokenizer: Tokenizer, stream: bool, by_ids: bool) -> None:
    prompt_ids = tokenizer.encode("hello é world")
    assert prompt_ids[0] == tokenizer.bos_token_id  # which no text shows
    output_ids = tokenizer.encode(OUTPUT, False)
    prompt = prompt_ids if by_ids else "hello é world"
    first, *others = complete(
        tokenizer, prompt, output_ids, 2, stream=stream, return_token_ids=True
    )
    assert bool(others) == stream
    assert first["prompt_token_ids"] == prompt_ids
    assert not any("prompt_token_ids" in choice for choice in others)
    assert [i for choice in [first, *others] for i in choice["token_ids"]] == output_ids
    (plain,) = complete(tokenizer, prompt, output_ids)
    assert not {"token_ids", "prompt_token_ids"} & plain.keys()
