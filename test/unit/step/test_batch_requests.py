"""The requests of a step as data that goes to other processes, and as columns."""

from __future__ import annotations

import msgspec

from sglang.srt.step.worker import BatchRequest, ScheduleBatch

REQUESTS = [
    BatchRequest(5, 9, 7, emits=False, kv_len_before=16),
    BatchRequest(2),
    BatchRequest(9, 4),
]


def test_requests_arrive_in_another_process_as_they_were() -> None:
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(REQUESTS), type=list[BatchRequest])
    assert arrived == REQUESTS
    assert isinstance(arrived[0], BatchRequest)


def test_columns_have_the_numbers_of_each_request_in_their_order() -> None:
    batch = ScheduleBatch(REQUESTS)
    columns = (
        batch.rows,
        batch.max_q_lens,
        batch.num_prompt_tokens,
        batch.emits,
        batch.kv_lens_before,
    )
    assert list(zip(*columns, strict=True)) == [tuple(request) for request in REQUESTS]
