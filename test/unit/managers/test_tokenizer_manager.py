"""The tokenizer manager against a scripted scheduler: answers, aborts, failures, control calls."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing

import pytest

from fake_backend import FULL, LENGTH, Backend, answer_of, run
from serving_utils import make_model_dir
from sglang.srt.frontend.errors import RequestError, ServiceError
from sglang.srt.messages.control import (
    ContinueGenerationReq,
    EngineStatus,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    HealthPing,
    PauseGenerationReq,
)
from sglang.srt.messages.requests import DECODE_FAILED, STOP_TOO_SLOW, FinishReason
from sglang.srt.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("model")))


def test_single_answer_has_sglangs_form(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(answer_of(backend, text="hello", rid="mine"))
        await backend.wait_sent(1)
        (request,) = backend.requests
        assert request.input_ids == tokenizer.encode("hello")
        backend.put(request.req_id, "wor", (5,))
        backend.put(request.req_id, "ld", (6,), LENGTH)
        answer = await task
        latency = answer["meta_info"].pop("e2e_latency")
        assert latency >= 0
        assert answer == {
            "text": "world",
            "output_ids": [5, 6],
            "meta_info": {
                "id": "mine",
                "finish_reason": {"type": "length", "length": 2},
                "weight_version": "default",
                "weight_versions": [{"version": "default", "start": 0, "end": 2}],
                "prompt_tokens": 3,
                "completion_tokens": 1,
                "cached_tokens": 1,
                "num_retractions": 0,
            },
        }
        assert not backend.aborted

    run(tokenizer, scenario)


def test_samples_come_prompt_major_with_their_own_seeds(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        params = {"n": 2, "sampling_seed": 10}
        task = asyncio.create_task(
            answer_of(backend, text=["a", "b"], sampling_params=params, rid=["p", "q"])
        )
        await backend.wait_sent(4)
        assert [r.rid for r in backend.requests] == ["p", "p", "q", "q"]
        assert [r.sampling_params.sampling_seed for r in backend.requests] == [10, 11, 10, 11]
        for request in reversed(backend.requests):
            backend.put(request.req_id, f"t{request.req_id}", (1,), LENGTH)
        assert [item["text"] for item in await task] == [f"t{r.req_id}" for r in backend.requests]

    run(tokenizer, scenario)


def test_batch_of_one_is_answered_with_a_list(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(answer_of(backend, input_ids=[[1, 2]]))
        await backend.wait_sent(1)
        backend.put(backend.requests[0].req_id, "x", (1,), LENGTH)
        assert [item["text"] for item in await task] == ["x"]

    run(tokenizer, scenario)


def test_prompt_ids_come_back_if_wanted(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        body = {"text": ["hello", "the fox"], "return_prompt_token_ids": True}
        task = asyncio.create_task(answer_of(backend, **body))
        await backend.wait_sent(2)
        for request in backend.requests:
            backend.put(request.req_id, "x", (1,), LENGTH)
        expected = [tokenizer.encode("hello"), tokenizer.encode("the fox")]
        assert [item["prompt_token_ids"] for item in await task] == expected

    run(tokenizer, scenario)


def test_slow_reader_gets_coalesced_cumulative_chunks(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        chunks = []
        async with aclosing(backend.manager.generate_request({"text": "a", "stream": True})) as out:
            reading = asyncio.create_task(anext(out))
            await backend.wait_sent(1)
            req_id = backend.requests[0].req_id
            backend.put(req_id, "0", (0,))
            chunks.append(await reading)
            for number in range(1, 9):
                backend.put(req_id, str(number), (number,))
            backend.put(req_id, "9", (9,), LENGTH)
            await asyncio.sleep(0.01)
            chunks += [chunk async for chunk in out]
        assert [chunk["text"] for chunk in chunks] == ["0", "0123456789"]
        assert chunks[-1]["output_ids"] == list(range(10))
        assert "index" not in chunks[0]

    run(tokenizer, scenario)


def test_last_chunk_is_not_lost_when_it_comes_while_another_is_read(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        body = {"text": ["a", "b"], "stream": True}
        ends = []
        async with aclosing(backend.manager.generate_request(body)) as outputs:
            reading = asyncio.create_task(anext(outputs))
            await backend.wait_sent(2)
            first, second = backend.requests
            backend.put(first.req_id, "x", (1,))
            backend.put(second.req_id, "y", (1,))
            await reading
            backend.put(first.req_id, "X", (2,), LENGTH)
            backend.put(second.req_id, "Y", (2,), LENGTH)
            await asyncio.sleep(0.01)
            async for chunk in outputs:
                if chunk["meta_info"]["finish_reason"]:
                    ends.append((chunk["index"], chunk["text"]))
        assert sorted(ends) == [(0, "xX"), (1, "yY")]

    run(tokenizer, scenario)


def test_abandoned_and_cancelled_calls_are_aborted(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        outputs = backend.manager.generate_request({"text": "a", "stream": True})
        reading = asyncio.create_task(anext(outputs))
        await backend.wait_sent(1)
        backend.put(backend.requests[0].req_id, "x", (1,))
        await reading
        del outputs, reading
        gc.collect()
        await backend.wait_sent(2)
        assert backend.aborted == [backend.requests[0].req_id]
        task = asyncio.create_task(answer_of(backend, text="b"))
        await backend.wait_sent(3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert backend.aborted == [r.req_id for r in backend.requests]

    run(tokenizer, scenario)


def test_abort_matches_the_exact_rid_of_all_its_requests(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        tasks = [asyncio.create_task(answer_of(backend, text="a", rid=rid)) for rid in "aab"]
        tasks.append(asyncio.create_task(answer_of(backend, text="a", rid="aa")))
        await backend.wait_sent(4)
        assert backend.manager.abort_request("none") == 0
        assert backend.manager.abort_request("a") == 2
        assert backend.aborted == [r.req_id for r in backend.requests if r.rid == "a"]
        assert backend.manager.abort_request(abort_all=True) == 4
        abort = FinishReason(type="abort", message="aborted")
        for request in backend.requests:
            backend.put(request.req_id, "part", (1,), abort)
        answers = await asyncio.gather(*tasks)
        assert {item["meta_info"]["finish_reason"]["type"] for item in answers} == {"abort"}
        assert {item["text"] for item in answers} == {"part"}

    run(tokenizer, scenario)


def test_abort_by_prefix_is_only_for_those_who_ask(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        names = ("job-1", "job-10", "other")
        tasks = [asyncio.create_task(answer_of(backend, text="a", rid=rid)) for rid in names]
        await backend.wait_sent(3)
        assert backend.manager.abort_request("job-1") == 1
        assert backend.manager.abort_request("job-1", prefix=True) == 2
        assert backend.manager.abort_request(None, prefix=True) == 0
        for request in backend.requests:
            backend.put(request.req_id, "x", (1,), LENGTH)
        await asyncio.gather(*tasks)

    run(tokenizer, scenario)


def test_full_queue_fails_the_whole_batch_and_aborts_the_rest(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(answer_of(backend, text=["a", "b"]))
        await backend.wait_sent(2)
        backend.put(backend.requests[1].req_id, reason=FULL)
        with pytest.raises(ServiceError, match="queue is full") as error:
            await task
        assert error.value.status_code == 503
        assert backend.aborted == [backend.requests[0].req_id]

    run(tokenizer, scenario)


@pytest.mark.parametrize("broken", [DECODE_FAILED, STOP_TOO_SLOW])
def test_failed_sample_leaves_the_rest_of_its_batch_alone(
    tokenizer: Tokenizer, broken: FinishReason
) -> None:
    """The scheduler knows nothing of the failure, so it is told to end the request."""

    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(answer_of(backend, text=["a", "b"]))
        await backend.wait_sent(2)
        backend.put(backend.requests[0].req_id, "", (1,), broken)
        backend.put(backend.requests[1].req_id, "fine", (1,), LENGTH)
        first, second = await task
        assert first["meta_info"]["finish_reason"]["status_code"] == broken.status_code
        assert second["text"] == "fine"
        assert backend.aborted == [backend.requests[0].req_id]

    run(tokenizer, scenario)


def test_refusal_by_the_scheduler_is_the_clients_mistake(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(answer_of(backend, text="a"))
        await backend.wait_sent(1)
        reason = FinishReason(type="abort", message="too long", status_code=400)
        backend.put(backend.requests[0].req_id, reason=reason)
        with pytest.raises(RequestError, match="too long"):
            await task

    run(tokenizer, scenario)


def test_too_long_prompts_are_refused_before_anything_is_sent(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        for text in ("hello " * 400, "x" * 1_000_000):
            with pytest.raises(RequestError, match=r"text\[1\]"):
                await answer_of(backend, text=["fine", text])
        assert not backend.sent

    run(tokenizer, scenario)


def test_death_answers_every_client_once_and_refuses_later_ones(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        tasks = [asyncio.create_task(answer_of(backend, text="a")) for _ in range(3)]
        tasks.append(asyncio.create_task(backend.manager.control.flush_cache()))
        await backend.wait_sent(4)
        backend.manager.fail_all("The scheduler is dead.")
        backend.manager.fail_all("Again.")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, ServiceError)
            assert result.message == "The scheduler is dead."
        for later in (answer_of(backend, text="a"), backend.manager.health_ping()):
            with pytest.raises(ServiceError, match="dead"):
                await later
        assert len(backend.sent) == 4, "nothing is sent to a dead scheduler"

    run(tokenizer, scenario)


def test_drain_waits_then_aborts_and_refuses_new_requests(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        quick, slow = (asyncio.create_task(answer_of(backend, text=t)) for t in "ab")
        await backend.wait_sent(2)
        draining = asyncio.create_task(backend.manager.drain(0.05, asyncio.Event()))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="shutting down"):
            await answer_of(backend, text="late")
        first, second = backend.requests
        backend.put(first.req_id, "x", (1,), LENGTH)
        assert (await quick)["text"] == "x"
        await backend.wait_sent(3)
        assert backend.aborted == [second.req_id]
        backend.put(second.req_id, "y", (1,), FinishReason(type="abort", message="stop"))
        await draining
        with pytest.raises(ServiceError, match="shutting down") as error:
            await slow
        assert error.value.status_code == 503

    run(tokenizer, scenario)


def test_drain_ends_a_stream_with_what_it_has(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        outputs = backend.manager.generate_request({"text": "a", "stream": True})
        reading = asyncio.ensure_future(anext(outputs))
        await backend.wait_sent(1)
        draining = asyncio.create_task(backend.manager.drain(0.0, asyncio.Event()))
        await backend.wait_sent(2)
        backend.put(backend.requests[0].req_id, "y", (1,), FinishReason(type="abort"))
        chunk = await reading
        assert isinstance(chunk, dict)
        assert (chunk["text"], chunk["meta_info"]["finish_reason"]["type"]) == ("y", "abort")
        await outputs.aclose()
        await draining

    run(tokenizer, scenario)


def test_second_signal_hastens_the_drain(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(answer_of(backend, text="a"))
        await backend.wait_sent(1)
        hasten = asyncio.Event()
        draining = asyncio.create_task(backend.manager.drain(1000, hasten))
        hasten.set()
        await backend.wait_sent(2)
        backend.put(backend.requests[0].req_id, "y", (1,), FinishReason(type="abort"))
        await draining
        with pytest.raises(ServiceError, match="shutting down"):
            await task

    run(tokenizer, scenario)


@pytest.mark.parametrize("is_late", [False, True])
def test_drain_does_not_wait_for_frozen_requests(tokenizer: Tokenizer, is_late: bool) -> None:
    """Nothing runs, so nothing will end by itself; also if that begins after the drain."""

    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(answer_of(backend, text="a"))
        await backend.wait_sent(1)
        frozen = EngineStatus(stopped="Paused.", is_frozen=True)
        for status in (frozen, EngineStatus()) if is_late else (frozen,):
            backend.manager.handle(status)
        draining = asyncio.create_task(backend.manager.drain(1000, asyncio.Event()))
        if is_late:
            await asyncio.sleep(0.01)
            assert not backend.aborted
            backend.manager.handle(frozen)
        await backend.wait_sent(2)
        assert backend.aborted == [backend.requests[0].req_id]
        backend.put(backend.requests[0].req_id, "y", (1,), FinishReason(type="abort"))
        await draining
        with pytest.raises(ServiceError, match="shutting down"):
            await task

    run(tokenizer, scenario)


def test_drain_fails_control_calls_that_still_wait_in_the_end(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        control = backend.manager.control
        request = asyncio.create_task(answer_of(backend, text="a"))
        waiting = asyncio.create_task(control.call(PauseGenerationReq(mode="drain")))
        await backend.wait_sent(2)
        draining = asyncio.create_task(backend.manager.drain(1000, asyncio.Event()))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        backend.put(backend.requests[0].req_id, "x", (1,), LENGTH)
        await asyncio.gather(draining, request)
        for work in (waiting, control.call(ContinueGenerationReq())):
            with pytest.raises(ServiceError, match="shutting down") as error:
                await work
            assert error.value.status_code == 503

    run(tokenizer, scenario)


def test_control_replies_find_their_calls(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        flushes = [asyncio.create_task(backend.manager.control.flush_cache()) for _ in range(2)]
        ping = asyncio.create_task(backend.manager.health_ping())
        await backend.wait_sent(3)
        first, second = (m.call_id for m in backend.sent if isinstance(m, FlushCacheReqInput))
        backend.inbox.put_nowait(FlushCacheReqOutput(call_id=999, success=False))
        backend.inbox.put_nowait(FlushCacheReqOutput(call_id=second, success=False, error_msg="b"))
        backend.inbox.put_nowait(FlushCacheReqOutput(call_id=first, success=True))
        backend.inbox.put_nowait(next(m for m in backend.sent if isinstance(m, HealthPing)))
        replies = await asyncio.gather(*flushes)
        assert [reply.success for reply in replies] == [True, False]
        await ping

    run(tokenizer, scenario)


def test_control_call_without_reply_times_out(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        with pytest.raises(ServiceError, match="No answer"):
            await backend.manager.health_ping(timeout_s=0.01)

    run(tokenizer, scenario)


def test_a_length_that_nobody_set_gives_way_to_a_long_prompt(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        limit = backend.manager.limits.max_req_len
        assert limit > 130
        for num_tokens, expected in ((limit - 5, 5), (limit - 128, 128), (3, 128)):
            task = asyncio.create_task(answer_of(backend, input_ids=[7] * num_tokens))
            num_sent = len(backend.requests)
            await backend.wait_sent(num_sent + 1)
            request = backend.requests[-1]
            assert request.sampling_params.max_new_tokens == expected
            backend.put(request.req_id, "x", (1,), LENGTH)
            await task
        with pytest.raises(RequestError, match="together more than"):
            await answer_of(
                backend, input_ids=[7] * (limit - 5), sampling_params={"max_new_tokens": 128}
            )
        with pytest.raises(RequestError, match="together more than"):
            await answer_of(backend, input_ids=[7] * limit)

    run(tokenizer, scenario)
