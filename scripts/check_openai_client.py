"""Does the unmodified `openai` package work with a server of this runtime?

    python -m pip install --target build/openai-client openai     # or a wheel of it
    python scripts/check_openai_client.py --client build/openai-client

Without --url it starts a server of the bundled model on a port of this machine, with parsers of
calls and reasoning, and stops it at the end. Prints one line per check, and exits with 1 if one
fails.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 120
MESSAGES = [{"role": "user", "content": "Read the lines of a file."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}


class Checks:
    """The checks, over a client of the package and the name of the model."""

    def __init__(self, openai: Any, url: str) -> None:
        self._openai = openai
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._model = self._client.models.list().data[0].id

    def all(self) -> dict[str, Callable[[], None]]:
        """By name."""
        return {
            "models": self.models,
            "completion": self.completion,
            "chat": self.chat,
            "chat, streamed": self.stream,
            "logprobs": self.logprobs,
            "tools": self.tools,
            "response_format": self.response_format,
            "response_format, parsed": self.parsed,
            "errors": self.errors,
            "errors of a stream's start": self.stream_errors,
        }

    def _chat(self, **fields: Any) -> Any:
        fields = {"messages": MESSAGES, "model": self._model, **GREEDY, **fields}
        return self._client.chat.completions.create(**fields)

    def models(self) -> None:
        model = self._client.models.retrieve(self._model)
        assert model.id == self._model
        assert model.object == "model"

    def completion(self) -> None:
        answer = self._client.completions.create(model=self._model, prompt="def f(", **GREEDY)
        assert answer.choices[0].text
        assert answer.usage.total_tokens == (
            answer.usage.prompt_tokens + answer.usage.completion_tokens
        )

    def chat(self) -> None:
        answer = self._chat(n=2, seed=1)
        assert [choice.index for choice in answer.choices] == [0, 1]
        message = answer.choices[0].message
        assert message.role == "assistant"
        assert message.content
        assert message.reasoning_content is None
        assert answer.choices[0].finish_reason in ("stop", "length")
        self._chat(messages=[*MESSAGES, message, *MESSAGES])  # as it came

    def stream(self) -> None:
        whole = self._chat().choices[0].message.content
        chunks = list(self._chat(stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(parts) == whole
        assert chunks[-1].usage.completion_tokens > 0
        assert chunks[-2].choices[0].finish_reason in ("stop", "length")

    def logprobs(self) -> None:
        content = self._chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        assert all(len(entry.top_logprobs) == 3 for entry in content)
        assert all(entry.logprob <= 0 for entry in content)

    def tools(self) -> None:
        """The bundled model knows no tools: what it writes is content, and no error."""
        for choice in ("auto", "none", "required"):
            answer = self._chat(tools=TOOLS, tool_choice=choice)
            message = answer.choices[0].message
            assert message.content or message.tool_calls
        list(self._chat(tools=TOOLS, stream=True))

    def response_format(self) -> None:
        lines = {"type": "integer", "minimum": 0, "maximum": 999}
        schema = {"type": "object", "properties": {"lines": lines}, "required": ["lines"]}
        wanted = {"name": "file", "schema": schema | {"additionalProperties": False}}
        form = {"type": "json_schema", "json_schema": wanted}
        choice = self._chat(response_format=form, max_tokens=200).choices[0]
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.message.content)) == {"lines"}
        choice = self._chat(response_format={"type": "json_object"}).choices[0]
        assert choice.message.content.startswith("{")

    def parsed(self) -> None:
        """The package makes the schema of a class, and an object of it of the answer."""

        from pydantic import BaseModel  # comes with the package

        class File(BaseModel):
            path: Literal["a.txt", "b.txt"]
            is_new: bool | None

        answer = self._client.chat.completions.parse(
            messages=MESSAGES, model=self._model, temperature=0, response_format=File
        )
        assert isinstance(answer.choices[0].message.parsed, File)

    def errors(self) -> None:
        self._is_refused("temperature", temperature=-1)
        try:
            self._client.models.retrieve("nothing")
        except self._openai.NotFoundError:
            return
        raise AssertionError("a model that does not exist was found")

    def stream_errors(self) -> None:
        schema = {"name": "x", "schema": {"uniqueItems": True}}
        wanted = {"type": "json_schema", "json_schema": schema}
        self._is_refused("response_format", stream=True, response_format=wanted)

    def _is_refused(self, field: str, **fields: Any) -> None:
        try:
            self._chat(**fields)
        except self._openai.BadRequestError as error:
            found = (error.param, bool(error.body["message"]))
        else:
            found = (None, False)
        assert found == (field, True)


@contextmanager
def demo_server() -> Iterator[str]:
    """The URL of a server of the bundled model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "demo"]
    command += ["--port", str(port), "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    process = subprocess.Popen(command, cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("The server does not start.")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def run_checks(openai: Any, url: str) -> bool:
    """Whether all checks hold."""
    print(f"openai {openai.__version__} at {url}")
    failed = False
    for name, check in Checks(openai, url).all().items():
        try:
            check()
        except Exception:  # noqa: BLE001 - a check that fails says so, and the others go on
            failed = True
            print(f"{name}: failed\n{traceback.format_exc()}")
        else:
            print(f"{name}: ok")
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--client", type=Path, help="Folder that the package is installed in.")
    parser.add_argument("--url", help="A running server, such as http://127.0.0.1:30000.")
    arguments = parser.parse_args()
    if arguments.client is not None:
        sys.path.append(str(arguments.client))
    try:
        import openai
    except ImportError:
        raise SystemExit(__doc__) from None
    if arguments.url is not None:
        raise SystemExit(not run_checks(openai, arguments.url))
    with demo_server() as url:
        raise SystemExit(not run_checks(openai, url))


if __name__ == "__main__":
    main()
