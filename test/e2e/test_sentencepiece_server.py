"""Texts of a real server whose tokenizer strips a first space: as transformers decodes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentencepiece_models import make_sentencepiece_dir
from serving_utils import DUMMY, RunningServer, events, running_server

pytestmark = pytest.mark.long_matrix

WORDS = {"regex": "( (hello|world|é|fox|😀)){2,4}"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sentencepiece_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 1}))
    with running_server(folder, *DUMMY) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    file = str(folder / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, eos_token="</s>", bos_token="<s>")


def text_behind(oracle: Any, prompt: list[int], output: list[int], skips: bool = True) -> str:
    before, whole = (
        oracle.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        for ids in (prompt, prompt + output)
    )
    assert whole.startswith(before)
    return str(whole[len(before) :])


def generate(server: RunningServer, **body: Any) -> Any:
    response = server.post("/generate", {"return_prompt_token_ids": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_grammar_is_met_as_text(server: RunningServer) -> None:
    params = {"regex": "    return x", "temperature": 0}
    assert generate(server, text="def f(x):\n", sampling_params=params)["text"] == "    return x"


def test_sampled_texts_are_what_transformers_adds(server: RunningServer, oracle: Any) -> None:
    params = {**WORDS, "n": 4, "max_new_tokens": 20}
    found = generate(server, text=["hello", "漢"], sampling_params=params)
    found += generate(server, input_ids=[[1, 1]], sampling_params=params)  # shows nothing
    assert len(found) == 12
    for item in found:
        prompt, output = item["prompt_token_ids"], item["output_ids"]
        assert item["text"] == text_behind(oracle, prompt, output)
        assert item["text"].startswith(" ") == (prompt != [1, 1])


def test_a_stream_is_the_answer(server: RunningServer, oracle: Any) -> None:
    params = {**WORDS, "temperature": 0, "skip_special_tokens": False, "no_stop_trim": True}
    body = {"text": "hello", "sampling_params": {**params, "max_new_tokens": 30}}
    whole = generate(server, **body)
    assert whole["text"] == text_behind(oracle, *ids_of(whole), skips=False)
    with server.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        *chunks, done = events(response.iter_lines())
    assert done == "[DONE]"
    assert chunks[-1]["text"] == whole["text"]
    assert all(whole["text"].startswith(chunk["text"]) for chunk in chunks)


def ids_of(answer: dict[str, Any]) -> tuple[list[int], list[int]]:
    return answer["prompt_token_ids"], answer["output_ids"]


def test_a_stop_may_begin_with_the_first_space(server: RunningServer) -> None:
    params = {"regex": " hello world", "stop": [" hello"], "temperature": 0}
    (kept, cut) = (
        generate(server, text="hello", sampling_params={**params, "no_stop_trim": keeps})
        for keeps in (True, False)
    )
    assert (kept["text"], cut["text"]) == (" hello", "")
    assert kept["meta_info"]["finish_reason"] == {"type": "stop", "matched": " hello"}


def test_texts_of_logprobs_have_their_space(server: RunningServer) -> None:
    params = {"regex": " hello world", "temperature": 0}
    fields = {"return_logprob": True, "return_text_in_logprobs": True}
    meta = generate(server, text="hello", sampling_params=params, **fields)["meta_info"]
    texts = [text for _, _, text in meta["output_token_logprobs"]]
    assert "".join(texts).removesuffix("</s>") == " hello world"


@pytest.mark.parametrize("echo", [False, True])
def test_completions_go_on_in_their_prompt(server: RunningServer, echo: bool) -> None:
    body = {"prompt": "hello", "regex": " world 😀", "echo": echo, "logprobs": 2}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    text, offsets = choice["text"], choice["logprobs"]["text_offset"]
    assert text == "hello" * echo + " world 😀"
    ends = [*offsets[1:], len(text)]
    assert "".join(text[start:end] for start, end in zip(offsets, ends, strict=True)) == text


def test_a_message_is_continued_with_its_space(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "hello"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "regex": " world 漢",
        "logprobs": True,
    }
    (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
    assert choice["message"]["content"] == " world 漢"
    entries = [entry for entry in choice["logprobs"]["content"] if entry["token"] != "</s>"]
    text = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
    assert text == " world 漢"


def test_only_routes_of_openai_get_the_defaults_of_the_models_file(server: RunningServer) -> None:
    body = {"prompt": "hello", "n": 3, "max_tokens": 8}
    texts = [choice["text"] for choice in server.post("/v1/completions", body).json()["choices"]]
    assert len({*texts}) == 1
    found = generate(server, text="hello", sampling_params={"n": 3, "max_new_tokens": 8})
    assert len({item["text"] for item in found}) == 3
