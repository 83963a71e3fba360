"""The HTTP application over a scheduler that answers by script: what tests of its routes share."""

from __future__ import annotations

import asyncio
import base64
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from fake_backend import LIMITS
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages.control import (
    ContinueGenerationReq,
    ControlReply,
    EngineStatus,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    FromFile,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthPing,
    PauseGenerationReq,
    UpdateWeightsReq,
)
from sglang.srt.model_config import load_model_config
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import Tokenizer

BYTES = base64.b64encode(b"weights").decode()
GROUP = {"master_address": "host", "master_port": 5000, "rank_offset": 1, "world_size": 2}
TENSORS = {"names": ["a", "b"], "dtypes": ["float32"] * 2, "shapes": [[2, 3], []]}
RAW = {"content-type": "application/octet-stream"}
MAX_WEIGHT_BYTES = 400

_applications: dict[str, tuple[ServerState, FastAPI]] = {}  # by flags: each takes long to make


def _application(fresh: ServerState) -> tuple[ServerState, FastAPI]:
    """Makes an application, or gives that of an earlier server with these flags another state."""
    flags = repr(vars(fresh.server_args))  # that of the flags leaves keys out
    if flags not in _applications:
        _applications[flags] = fresh, create_app(fresh)
    state, app = _applications[flags]
    vars(state).update(vars(fresh))
    return state, app


class Server:
    """The application, over a scheduler that answers every message at once."""

    def __init__(self, model_path: str, tokenizer: Tokenizer, **flags: Any) -> None:
        self.sent: list[Any] = []
        self.reply: dict[str, Any] = {}
        self.held: set[type] = set()  # messages that get no reply
        self.files: list[Path] = []  # of weights, as they were when the message came
        self.contents: list[bytes] = []
        self.internal_state: dict[str, Any] = {"engine_paused": False, "running_batch_size": 2}
        limits = {"max_request_bytes": 8000, "max_weight_bytes": MAX_WEIGHT_BYTES}
        args = ServerArgs(model_path=model_path, **{**limits, **flags})
        self.state, self.app = _application(ServerState(args, load_model_config(model_path)))
        never: Callable[[], Awaitable[Any]] = asyncio.Event().wait
        self.manager = TokenizerManager(tokenizer, LIMITS, self._take, never)
        self.state.manager = self.manager

    def _take(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, UpdateWeightsReq) and isinstance(message.source, FromFile):
            self._read_file(message.source)
        if type(message) in self.held:
            return
        if isinstance(message, PauseGenerationReq):
            self.manager.handle(EngineStatus(stopped="Generation is paused."))
        if isinstance(message, ContinueGenerationReq):
            self.manager.handle(EngineStatus())
        answer: Any
        if isinstance(message, FlushCacheReqInput):
            answer = FlushCacheReqOutput(call_id=message.call_id, success=True, flushed_items=5)
        elif isinstance(message, GetInternalStateReq):
            state = self.internal_state
            answer = GetInternalStateReqOutput(call_id=message.call_id, internal_state=state)
        elif isinstance(message, HealthPing):
            answer = message
        else:
            reply = {"success": True, "message": "Done.", **self.reply}
            answer = ControlReply(call_id=message.call_id, **reply)
        self.manager.handle(answer)

    def _read_file(self, source: FromFile) -> None:
        if source.delete:
            path = Path(source.path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            self.files.append(path)
            self.contents.append(path.read_bytes())

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        return asyncio.run(asyncio.wait_for(self.send(method, path, **kwargs), 10))

    async def send(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        assert self.state.manager in (None, self.manager), "A later server has this application."
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **kwargs)

    def only(self, kind: type) -> Any:
        """The one message of a kind that was sent."""
        (message,) = [m for m in self.sent if isinstance(m, kind)]
        return message
