"""The benchmark of what HTTP takes of an Engine's throughput, and the server without a model."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from benchmark.made_up_tokenizer import SPECIAL_TOKENS, write_tokenizer
from benchmark.measure import http_overhead
from benchmark.paced_server import FIRST_PLAIN_ID, PacedScheduler
from benchmark.stream_ways import ROUTES
from sglang.srt.messages.control import AbortReq, HealthPing
from sglang.srt.messages.requests import BatchTokenIDOutput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.tokenizer import load_tokenizer

SMALL = ["--geometry=tiny", "--device=cpu", "--clients=2", "--input-len=8", "--output-len=8"]
ROLES = {"client", "front_end", "detokenizer", "scheduler"}


@pytest.fixture(autouse=True)
def collections_as_before() -> Iterator[None]:
    """The benchmark exempts what is there from collections of garbage."""
    yield
    gc.unfreeze()


def measured(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    once = ["--laps=1", "--rounds=1", f"--out={out}"]
    assert http_overhead.main([*SMALL, *once, *words]) == 0
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


@pytest.mark.long_matrix
def test_streams_over_http_are_measured_beside_an_engine(tmp_path: Path) -> None:
    engine, row = measured(tmp_path, "--routes", "/generate")["rows"]
    assert [engine["way"], row["way"]] == [http_overhead.ENGINE, "/generate"]
    assert "over_engine" not in engine
    assert row["over_engine"] == pytest.approx(row["tok_s"] / engine["tok_s"], abs=0.001)
    assert row["is_reached"] == (row["over_engine"] >= 0.95)
    assert set(row["cpu_shares"]) == ROLES


@pytest.mark.long_matrix
def test_each_route_of_a_server_without_a_model_answers_at_its_pace(tmp_path: Path) -> None:
    """Two streams, a token each in 20 ms: 100 tokens/s, less what the requests take."""
    rows = measured(tmp_path, "--paced-step-ms=20")["rows"]
    assert [row["way"] for row in rows] == [*ROUTES]
    for row in rows:
        assert 10 < row["tok_s"] <= 110
        assert "over_engine" not in row


def test_engine_and_server_have_the_same_flags() -> None:
    arguments = http_overhead.parse([*SMALL, "--attention-backend=triton"])
    flags = http_overhead.flags_of(arguments, "folder")
    command = http_overhead.server_command(arguments, flags)
    words = iter(command[command.index("-m") + 2 :])
    found = {}
    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        found[name] = True if flags[name] is True else next(words)
    assert found == {name: True if value is True else str(value) for name, value in flags.items()}


def test_a_result_without_a_model_does_not_replace_that_of_a_gpu() -> None:
    out = http_overhead.parse(["--paced-step-ms=7"]).out
    assert out != http_overhead.parse([]).out
    assert http_overhead.parse(["--paced-step-ms=7", "--out=x"]).out == Path("x")


# ---------------------------------------------------------------- the scheduler without a model


class Box:
    """An inbox whose messages a test gives, and an outbox."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.sent: list[Any] = []

    def drain(self) -> list[Any]:
        found, self.given = self.given, []
        return found

    def send(self, message: Any) -> None:
        self.sent.append(message)


def request(req_id: int, num_new: int) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=num_new)
    return TokenizedGenerateReqInput(
        req_id=req_id, rid="", input_ids=[5, 6], sampling_params=params
    )


def outputs_of(box: Box) -> list[Any]:
    batches = [message for message in box.sent if isinstance(message, BatchTokenIDOutput)]
    return [output for batch in batches for output in batch.outputs]


def test_each_request_gets_a_token_a_step_until_it_has_all() -> None:
    box = Box()
    scheduler = PacedScheduler(1.0, 10, box, box)
    box.given = [request(1, 3), request(2, 1), HealthPing(call_id=9)]
    scheduler.take_in()
    for _ in range(5):
        scheduler.step()
    assert box.sent[0].call_id == 9
    outputs = outputs_of(box)
    assert [output.req_id for output in outputs] == [1, 2, 1, 1]
    assert [output.completion_tokens for output in outputs] == [1, 1, 2, 3]
    ends = [output.finish_reason and output.finish_reason.length for output in outputs]
    assert ends == [None, 1, None, 3]
    assert [output.options is not None for output in outputs] == [True, True, False, False]
    assert all(FIRST_PLAIN_ID <= token < 10 for one in outputs for token in one.token_ids)


def test_an_aborted_request_ends_once_with_what_it_has() -> None:
    box = Box()
    scheduler = PacedScheduler(1.0, 10, box, box)
    box.given = [request(1, 100)]
    scheduler.take_in()
    scheduler.step()
    box.given = [AbortReq(req_ids=[1, 7]), AbortReq(req_ids=[1])]
    scheduler.take_in()
    scheduler.step()
    first, last = outputs_of(box)
    assert (first.completion_tokens, last.completion_tokens) == (1, 1)
    assert last.token_ids == []
    assert last.finish_reason.type == "abort"


# ---------------------------------------------------------------- the tokenizer


def test_each_id_of_a_made_up_tokenizer_has_a_text_of_its_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 700)
    tokenizer = load_tokenizer(tmp_path)
    assert sorted(tokenizer.vocabulary().values()) == list(range(700))
    words = [tokenizer.decode([token_id]) for token_id in range(3 + 256, 700)]
    assert all(words)
    assert len(set(words)) == len(words)
    assert tokenizer.decode(range(len(SPECIAL_TOKENS))) == ""
    text = "é = [1, 2]\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())
    stream = tokenizer.decode_stream()
    ids = [300, 650, 301, *tokenizer.encode("é"), 302]
    pieces = "".join(stream.push([token_id]) for token_id in ids)
    assert pieces + stream.flush() == tokenizer.decode(ids)


def test_a_tokenizer_has_room_for_all_bytes(tmp_path: Path) -> None:
    least = len(SPECIAL_TOKENS) + len(pre_tokenizers.ByteLevel.alphabet())
    with pytest.raises(ValueError, match=str(least)):
        write_tokenizer(tmp_path, least - 1)
    write_tokenizer(tmp_path, least)
