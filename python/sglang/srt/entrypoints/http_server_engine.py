"""An engine behind HTTP: a server of its own in another process, with the Engine's methods."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPResponse
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast
from urllib.error import HTTPError
from urllib.parse import urlencode

import msgspec

from sglang.srt.entrypoints.engine_answers import SamplingInput, sampling_fields
from sglang.srt.entrypoints.launch_error import LaunchError
from sglang.srt.entrypoints.serialized_updates import SerializedTensors, serialized_request
from sglang.srt.entrypoints.server_child import direct_opener, is_ready, start_server
from sglang.srt.entrypoints.tensor_file import NamedTensors, written_tensors
from sglang.srt.server_args import ServerArgs

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1


def launch_server_process(
    server_args: ServerArgs, timeout_s: float = START_TIMEOUT_S
) -> subprocess.Popen[bytes]:
    """Starts a server and waits until it takes requests. It ends with this process.

    Raises:
        ConfigError: for a number that its flag cannot be.
        LaunchError: if it cannot start, or not in time; its log says why.
    """
    process = start_server(server_args)
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if is_ready(server_args):
            return process
        time.sleep(POLL_S)
    if process.poll() is None:
        process.kill()
        process.wait()
        raise LaunchError(f"The server was not ready in {timeout_s:g} s.")
    raise LaunchError(f"The server ended with exit code {process.returncode}; its log says why.")


class HttpServerEngineAdapter:
    """The methods of an `Engine` over a server that it starts. Use it as a context manager, or call
    `shutdown`.

    Raises:
        LaunchError: if the server cannot start.
    """

    def __init__(self, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is not None and kwargs:
            raise ValueError("Give server_args or keyword arguments, not both.")
        self.server_args = server_args or ServerArgs(**kwargs)
        self._opener = direct_opener()
        self.process = launch_server_process(self.server_args)

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: SamplingInput = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """The answer of `/generate`; with `stream`, an iterator of cumulative chunks.

        Raises:
            ValueError: naming the field that is wrong. So do all calls.
            RuntimeError: if the server cannot answer. So do all calls.
        """
        body = {
            "text": prompt,
            "input_ids": input_ids,
            "sampling_params": sampling_fields(sampling_params),
            "stream": stream,
            **fields,
        }
        if stream:
            return self._stream(body)
        return self._call("/generate", body, self.server_args.api_key)

    def update_weights_from_tensor(
        self,
        named_tensors: NamedTensors | SerializedTensors,
        load_format: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Changes some weights to these tensors; arguments as for an Engine."""
        if (request := serialized_request(named_tensors, load_format, options)) is not None:
            return self._call("/update_weights_from_tensor", msgspec.structs.asdict(request))
        given = {"load_format": load_format, **options}
        query = urlencode({k: _word(v) for k, v in given.items() if v is not None})
        with (
            written_tensors(
                cast("NamedTensors", named_tensors), Path(tempfile.gettempdir())
            ) as source,
            open(source.path, "rb") as file,
        ):
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Length": str(os.fstat(file.fileno()).st_size),
            }
            with self._open(f"/update_weights_from_tensor?{query}", file, headers) as answer:
                return msgspec.json.decode(answer.read())

    def flush_cache(self) -> bool:
        """Empties the prefix cache.

        Raises:
            ValueError: if requests hold KV.
        """
        with self._open("/flush_cache", b"", {}):
            return True

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Gives memory back; `tags` as for an Engine."""
        return self._call("/release_memory_occupation", {"tags": tags})

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Takes released memory again."""
        return self._call("/resume_memory_occupation", {"tags": tags})

    def pause_generation(self, mode: str = "abort") -> dict[str, Any]:
        """Stops generation; answers when the engine has stopped."""
        return self._call("/pause_generation", {"mode": mode})

    def continue_generation(self) -> dict[str, Any]:
        """Ends a pause."""
        return self._call("/continue_generation", {})

    def shutdown(self) -> None:
        """Ends the server; later calls do nothing."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _call(self, path: str, body: dict[str, Any], key: str | None = None) -> Any:
        with self._open(path, msgspec.json.encode(body), JSON, key) as answer:
            return msgspec.json.decode(answer.read())

    def _stream(self, body: dict[str, Any]) -> Iterator[Any]:
        key = self.server_args.api_key
        with self._open("/generate", msgspec.json.encode(body), JSON, key) as answer:
            for line in answer:
                data = line.removeprefix(b"data:").strip()
                if not data or data == b"[DONE]":
                    continue
                chunk = msgspec.json.decode(data)
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                yield chunk

    def _open(
        self,
        path: str,
        data: bytes | IO[bytes],
        headers: dict[str, str],
        key: str | None = None,
    ) -> HTTPResponse:
        """The answer of a POST; without a key with that of the admin."""
        key = key or self.server_args.admin_api_key or self.server_args.api_key
        given = headers if key is None else {**headers, "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.server_args.url() + path, data, given, method="POST")
        try:
            answer: HTTPResponse = self._opener.open(request)
        except HTTPError as error:
            message = _message_of(error.read())
            kind = ValueError if error.code < 500 else RuntimeError
            raise kind(message or f"{path}: HTTP {error.code}.") from None
        except OSError as error:
            raise RuntimeError(f"The server does not answer: {error}.") from None
        return answer


JSON = {"Content-Type": "application/json"}


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _message_of(raw: bytes) -> str:
    """Returns the message of an error's body."""
    try:
        return str(msgspec.json.decode(raw)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return raw[:300].decode(errors="replace").strip()
