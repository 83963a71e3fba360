"""A small Llama that says given texts: what `training/train_scripted.py` has made.

`TEXTS` are by name; a prompt that ends in `prompt_of(name)` brings one out, greedily. So any call
of a function, reasoning or markup can come out of a real server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("scripted_model")
_GIVEN = json.loads((FOLDER / "texts.json").read_text(encoding="utf-8"))
TEXTS: dict[str, str] = _GIVEN["texts"]
TOOLS: list[dict[str, Any]] = _GIVEN["tools"]


def trigger(name: str) -> str:
    """Gives the special token that asks for a text."""
    assert name in TEXTS, name
    return f"<|say:{name}|>"


def prompt_of(name: str, opening: str = "") -> str:
    """A prompt of `/generate`; `opening` stands where a chat template may open the answer."""
    return f"<|user|>{trigger(name)}<|assistant|>{opening}"


def messages_of(name: str) -> list[dict[str, Any]]:
    """A chat whose answer is the text."""
    return [{"role": "user", "content": trigger(name)}]
