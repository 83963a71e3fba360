"""The routes about tokens, as clients use them that keep no tokenizer of their own."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
from transformers import AutoTokenizer

from fake_server import Server
from serving_utils import make_model_dir
from sglang.srt.model_config import resolve_model_path
from sglang.srt.tokenizer import load_tokenizer

CHAT = [
    {"role": "user", "content": "Read a file.\nLine by line."},
    {"role": "assistant", "content": "def read(path):"},
    {"role": "user", "content": "Now write it."},
]
TEXT = "def grüße(name):\n    return f'Hallo {name}'\n"


@pytest.fixture(scope="module")
def model_path() -> Path:
    return Path(resolve_model_path("demo"))


@pytest.fixture
def server(model_path: Path) -> Server:
    return Server("demo", load_tokenizer(model_path))


def test_a_text_comes_back_from_its_token_ids(tmp_path: Path) -> None:
    model_path = make_model_dir(tmp_path)  # whose tokens are all in the fake backend's vocabulary
    server = Server(str(model_path), load_tokenizer(model_path))
    ids = server.post("/tokenize", {"prompt": TEXT, "add_special_tokens": False}).json()["tokens"]
    assert (
        ids
        == AutoTokenizer.from_pretrained(model_path)(TEXT, add_special_tokens=False)["input_ids"]
    )
    assert server.post("/detokenize", {"tokens": ids}).json() == {"text": TEXT, "prompt": TEXT}
    several = server.post("/detokenize", {"tokens": [ids, ids]}).json()
    assert several == {"text": [TEXT, TEXT], "prompt": [TEXT, TEXT]}


def test_a_chat_rendered_by_the_client_is_what_transformers_renders(
    server: Server, model_path: Path
) -> None:
    info = server.request("GET", "/tokenizer_info").json()
    expected = AutoTokenizer.from_pretrained(model_path).apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        info["chat_template"]
    )
    rendered = template.render(
        messages=CHAT, bos_token=info["bos_token"], add_generation_prompt=True
    )
    assert rendered == expected


def test_a_model_without_a_template_has_none(model_path: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(model_path / name)
    server = Server(str(tmp_path), load_tokenizer(tmp_path))
    assert server.request("GET", "/tokenizer_info").json()["chat_template"] is None
