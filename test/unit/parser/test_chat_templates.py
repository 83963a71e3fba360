"""Sources of chat templates, and the limits of one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from serving_utils import make_model_dir, make_tokenizer
from sglang.srt.parser import chat_templates
from sglang.srt.parser.chat_templates import ChatTemplates, TemplateError
from sglang.srt.parser.template_files import (
    MAX_TEMPLATE_BYTES,
    TemplateFileError,
    TemplateFiles,
    find_templates,
)

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": None,
    "add_generation_prompt": True,
}
CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": {"content": "<bos>", "__type": "AddedToken"},
    "eos_token": "<eos>",
}


@pytest.fixture(scope="module")
def hostile() -> Iterator[ChatTemplates]:
    sources = {
        "default": "{{ bos_token }}{{ messages[0].content }}",
        "tool_use": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
        "{% endfor %}",
    }
    files = TemplateFiles(sources, {"bos_token": "<s>"})
    templates = ChatTemplates(files, max_processes=1, max_seconds=1, max_chars=1000)
    yield templates
    templates.close()


def test_an_endless_template_is_ended_and_the_next_chat_is_answered(
    hostile: ChatTemplates,
) -> None:
    with pytest.raises(TemplateError, match="too much time or memory"):
        asyncio.run(hostile.render({**CHAT, "tools": [{}]}))
    assert asyncio.run(hostile.render(CHAT)) == "<s>hi"


def test_a_chat_whose_process_is_stopped_is_rendered_by_another(hostile: ChatTemplates) -> None:
    assert asyncio.run(hostile.render(CHAT)) == "<s>hi"
    for process in psutil.Process().children():
        if any("render_process" in word for word in process.cmdline()):
            process.suspend()
    assert asyncio.run(asyncio.wait_for(hostile.render(CHAT), timeout=20)) == "<s>hi"


def test_a_client_that_leaves_ends_the_work_on_its_chat(hostile: ChatTemplates) -> None:
    async def scenario() -> str:
        task = asyncio.create_task(hostile.render({**CHAT, "tools": [{}]}))
        await asyncio.sleep(0.3)
        waiting = asyncio.create_task(hostile.render(CHAT))
        task.cancel()
        started = time.monotonic()
        await asyncio.gather(task, return_exceptions=True)
        assert time.monotonic() - started < 5
        return await waiting

    assert asyncio.run(scenario()) == "<s>hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ [0] * 10 ** 10 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ messages[0].content | center(10 ** 10) }}",
        "{{ '\\ud800' }}",
        "{% if %}",
    ],
)
def test_what_a_template_may_not_take(source: str) -> None:
    templates = ChatTemplates(TemplateFiles({"default": source}), max_chars=100_000)
    with pytest.raises(TemplateError):
        asyncio.run(templates.render(CHAT))
    templates.close()


def test_chats_are_rendered_by_a_few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    real = chat_templates.RenderProcess

    def spy(setup: Any) -> Any:
        started.append(setup)
        return real(setup)

    monkeypatch.setattr(chat_templates, "RenderProcess", spy)
    templates = ChatTemplates(TemplateFiles({"default": "{{ messages[0].content }}"}))

    async def scenario() -> list[str]:
        chats = [{**CHAT, "messages": [{"role": "user", "content": str(i)}]} for i in range(20)]
        return await asyncio.gather(*(templates.render(chat) for chat in chats))

    assert asyncio.run(scenario()) == [str(i) for i in range(20)]
    assert 1 <= len(started) <= chat_templates.MAX_PROCESSES
    templates.close()


@pytest.mark.parametrize(
    ("entry", "files"),
    [
        ("of config", {}),
        ("of config", {"chat_template.jinja": "of file"}),
        ([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}], {}),
        (
            "of config",
            {"chat_template.jinja": "a", "additional_chat_templates/tool_use.jinja": "b"},
        ),
    ],
)
def test_templates_are_those_that_transformers_finds(
    tmp_path: Path, entry: Any, files: dict[str, str]
) -> None:
    folder = make_model_dir(tmp_path / "model")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "additional_chat_templates").mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": entry}))
    for name, text in files.items():
        (folder / name).write_text(text)
    found = find_templates(folder, None)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    for tools in (None, [{"type": "function"}]):
        name = found.choose(tools is not None)
        assert name is not None
        assert found.templates[name] == tokenizer.get_chat_template(None, tools)
    assert found.tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}


def test_special_tokens_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    tokens = {"bos_token": "<a>", "eos_token": {"content": "<b>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert find_templates(tmp_path, None).tokens == {"bos_token": "<a>", "eos_token": "<b>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<c>"}))
    assert find_templates(tmp_path, None).tokens == {"bos_token": "<a>", "eos_token": "<b>"}
    config = {"eos_token": "<c>", "added_tokens_decoder": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert find_templates(tmp_path, None).tokens == {"eos_token": "<c>"}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (None, "the model has no chat template"),
        ("{}", "the model has no chat template"),
        ("[", "tokenizer_config.json is not valid JSON"),
        ('{"chat_template": 3}', "no text and no list"),
        ('{"chat_template": [{"name": "a"}]}', "no text and no list"),
        ('{"chat_template": [{"name": "a", "template": "b"}]}', "none is the default"),
        (json.dumps({"chat_template": "x" * (MAX_TEMPLATE_BYTES + 1)}), "has more than"),
    ],
)
def test_a_model_s_own_files_hinder_chats_alone(
    tmp_path: Path, config: str | None, problem: str
) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    templates = ChatTemplates(find_templates(tmp_path, None))
    with pytest.raises(TemplateError, match=problem) as caught:
        templates.check(has_tools=False)
    assert "--chat-template FILE" in str(caught.value)


def test_the_flag_s_file_goes_before_the_model_s(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("model's")
    (tmp_path / "chat_templates").mkdir()
    (tmp_path / "chat_templates" / "rag.jinja").write_text("another")
    assert find_templates(tmp_path, None).templates == {"default": "model's", "rag": "another"}
    (tmp_path / "own.jinja").write_text("own")
    assert find_templates(tmp_path, str(tmp_path / "own.jinja")).templates == {"default": "own"}
    with pytest.raises(TemplateFileError, match=r"none\.jinja cannot be read"):
        find_templates(tmp_path, str(tmp_path / "none.jinja"))


def test_one_of_the_model_s_templates_may_be_for_all_chats(tmp_path: Path) -> None:
    entry = [{"name": name, "template": f"of {name}"} for name in ("default", "tool_use", "rag")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    files = find_templates(tmp_path, None)
    assert [files.choose(has_tools) for has_tools in (False, True)] == ["default", "tool_use"]
    for name in ("rag", "default"):
        chosen = files.with_only(name)
        assert [chosen.choose(has_tools) for has_tools in (False, True)] == [name, name]
    with pytest.raises(TemplateFileError, match="no chat template 'x'; there are: default, rag"):
        files.with_only("x")
    with pytest.raises(TemplateFileError, match="the model has no chat template;"):
        find_templates(tmp_path / "none", None).with_only("default")
