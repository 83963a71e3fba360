"""Chats that the bundled model answers with a call. It knows no tools, but it goes on as a chat has
gone so far: earlier answers are calls, and nothing else."""

from __future__ import annotations

import json
from typing import Any

NAME = "read_file"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


def calling_chat(path: str) -> dict[str, Any]:
    """Fields of a body: the answer should be a call of `read_file` with this path.

    It ends where the model would ask the next question itself.
    """
    question = {"role": "user", "content": f"Read {path}"}
    call = json.dumps({"name": NAME, "arguments": {"path": path}})
    answer = {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}
    return {
        "messages": [*[question, answer] * 3, question],
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
        "stop": ["# Read"],
    }
