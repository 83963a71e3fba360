"""A tokenizer manager against a scripted scheduler: what its unit tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from serving_utils import VOCAB_SIZE
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages.control import AbortReq
from sglang.srt.messages.requests import (
    BatchStrOutput,
    FinishReason,
    ReqTextOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.process_watch import ProcessWatch
from sglang.srt.tokenizer import Tokenizer

LIMITS = RequestLimits(
    vocab_size=VOCAB_SIZE,
    max_req_len=256,
    max_req_len_reason="the model's context length",
    max_batch_size=64,
    max_n=8,
    max_stop_strings=4,
    max_stop_string_chars=16,
    max_top_logprobs=16,
    max_token_ids_logprob=8,
    max_cache_key_chars=16,
    allow_hidden_states=True,
)
LENGTH = FinishReason(type="length", length=2)
FULL = FinishReason(type="abort", message="The queue is full.", status_code=503)


class Backend:
    """Stands for scheduler and detokenizer: records what is sent, answers what a test says."""

    def __init__(self, tokenizer: Tokenizer, watch: ProcessWatch | None = None) -> None:
        self.sent: list[Any] = []
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.manager = TokenizerManager(
            tokenizer, LIMITS, self.sent.append, self.inbox.get, watch=watch
        )

    @property
    def requests(self) -> list[TokenizedGenerateReqInput]:
        return [m for m in self.sent if isinstance(m, TokenizedGenerateReqInput)]

    @property
    def aborted(self) -> list[int]:
        return [i for m in self.sent if isinstance(m, AbortReq) for i in m.req_ids]

    def put(
        self,
        req_id: int,
        text: str = "",
        ids: tuple[int, ...] = (),
        reason: Any = None,
        hidden_states: Sequence[bytes] = (),
        queue_time_s: float | None = None,
    ) -> None:
        spans = {"target": [("default", 0)]} if ids else {}
        output = ReqTextOutput(
            req_id,
            text,
            list(ids),
            reason,
            3,
            len(ids),
            1,
            0,
            hidden_states=list(hidden_states),
            weight_spans=spans,
            queue_time_s=queue_time_s,
        )
        self.inbox.put_nowait(BatchStrOutput(outputs=[output]))

    async def wait_sent(self, count: int) -> None:
        while len(self.sent) < count:
            await asyncio.sleep(0)


def run(
    tokenizer: Tokenizer,
    scenario: Callable[[Backend], Awaitable[None]],
    watch: ProcessWatch | None = None,
) -> None:
    """Runs a scenario with the manager's receive loop beside it; nothing may be left behind."""

    async def main() -> None:
        backend = Backend(tokenizer, watch)
        receiving = asyncio.create_task(backend.manager.run())
        await asyncio.wait_for(scenario(backend), 20)
        receiving.cancel()
        assert not backend.manager._samples
        assert not backend.manager.control._replies

    asyncio.run(main())


async def answer_of(backend: Backend, **body: Any) -> Any:
    async with aclosing(backend.manager.generate_request(body)) as outputs:
        return await anext(outputs)
