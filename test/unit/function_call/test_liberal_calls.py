"""Calls that are nearly as their family writes them are found, and what is no call is content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang.srt.function_call.formats import CALL_FORMATS, CallFormat
from sglang.srt.function_call.function_call_parser import FunctionCallParser

NAMES = frozenset(("weather", "now"))
Found = tuple[str, list[tuple[str, str]]]

NOW = ("now", {})
OSLO = ("weather", {"city": "Oslo"})
PARIS = ("weather", {"city": "Paris"})


def found_in(form: CallFormat, *pieces: str) -> Found:
    parser = FunctionCallParser(form, NAMES)
    found = [*(parser.push(piece) for piece in pieces), parser.finish()]
    calls = [(call.name, call.arguments) for piece in found for call in piece.calls]
    return "".join(piece.content for piece in found), calls


# An object with its name and arguments in each of the ways that leave no doubt, and the call.
OBJECTS: list[tuple[str, tuple[str, dict[str, Any]]]] = [
    ('{"name": "weather", "arguments": {"city": "Oslo"}}', OSLO),
    ('{"name": "weather", "parameters": {"city": "Oslo"}}', OSLO),
    ('{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}', OSLO),
    ('{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}', OSLO),
    ('{"function": {"name": "weather", "parameters": "{\\"city\\": \\"Oslo\\"}"}}', OSLO),
    ('{"name": "weather", "arguments": null, "parameters": {"city": "Oslo"}}', OSLO),
    ('{"name": "now", "parameters": null}', NOW),
    ('{"name": "now", "arguments": ""}', NOW),
    ('{"name": "now"}', NOW),
    ('{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}', OSLO),
    ('{"name": "weather", "arguments": "\n{\\"city\\": \\"Oslo\\",}\\n"}', OSLO),
    ('{"name": "now", "arguments": {"city": "a\nb\tc\r\n"}}', ("now", {"city": "a\nb\tc\r\n"})),
    ('{"name": "now", "arguments": {"a": "\\n", "b": [1, ], },\n}', ("now", {"a": "\n", "b": [1]})),
    ('{"name": "now", "arguments": "{\\"a\\": \\"x\ny\\"}"}', ("now", {"a": "x\ny"})),
    ('{"name": "weather", "arguments": "```json\\n{\\"city\\": \\"Oslo\\"}\\n```"}', OSLO),
]
NOT_OBJECTS = [
    '{"name": "now", "arguments": [1]}',
    '{"name": "now", "arguments": "[1]"}',
    '{"name": "now", "arguments": "x"}',
    '{"name": "now", "arguments": "{} {}"}',
    '{"name": "now", "arguments": "{"}',
    '{"name": 1, "arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"function": "now", "arguments": {}}',
    '{"function": {"arguments": {}}}',
    '{"name": "now", , "arguments": {}}',
    '{, "name": "now"}',
    '{"name": "now", "arguments": {"a": [,]}}',
    '{"name": now}',
    '{"name": "now", "arguments": {}',
    "{}",
    "[]",
]
AROUND = {
    "qwen25": [("<tool_call>\n", "\n</tool_call>"), ("<tool_call>```json\n", "\n```</tool_call>")],
    "llama3": [("", ""), ("<|python_tag|>", "<|eom_id|>"), ("\n```json\n", "\n```\n"), ("[", "]")],
    "mistral": [("[TOOL_CALLS]", ""), ("[TOOL_CALLS] [", "]</s>")],
}
BETWEEN = [", ", ",", ";\n", "\n", ""]

A = '{"name": "weather", "arguments": {"city": "Oslo"}}'
B = '{"name": "weather", "parameters": {"city": "Paris"}}'
C = '{"name": "now"}'
OTHER = '{"name": "other", "parameters": {}}'
DEFINITION = '{"function": {"name": "now", "description": "x", "parameters": {}}}'

# What models of a family have been seen to write, and its content and calls.
SAMPLES: dict[str, list[tuple[str, str, list[tuple[str, dict[str, Any]]]]]] = {
    "qwen25": [
        (f"Sure <tool_call>{A}</tool_call> Done.", "Sure Done.", [OSLO]),
        (f"Sure\n<tool_call>\n{A}\n</tool_call>\nDone.", "Sure\nDone.", [OSLO]),
        (f"Sure.<tool_call>{A}</tool_call>\n\nDone.\n", "Sure.\n\nDone.\n", [OSLO]),
        (f"Sure<tool_call>{A}</tool_call>Done", "Sure Done", [OSLO]),
        (f"a <tool_call>{A}</tool_call>\n<tool_call>{C}</tool_call> b", "a b", [OSLO, NOW]),
        (f"a<tool_call>{A}</tool_call>b <tool_call>{C}</tool_call>c", "a b c", [OSLO, NOW]),
        (f" \n<tool_call>{A}</tool_call>\n \n<tool_call>{C}</tool_call>\n ", "", [OSLO, NOW]),
        (f"<tool_call>{A}</tool_call> Done.", "Done.", [OSLO]),
        (f"Sure. <tool_call>{A}</tool_call>\n", "Sure.", [OSLO]),
        (f"<tool_call>\n{A}\n{B}\n</tool_call>", "", [OSLO, PARIS]),
        (f"<tool_call>\n[{A}, {B},]\n</tool_call>", "", [OSLO, PARIS]),
        (f"<tool_call>{A}\n<tool_call>{B}", "", [OSLO, PARIS]),
        (f"<tool_call>\n<tool_call>{B}</tool_call>", "", [PARIS]),
        (f"<tool_call>{A}, and </tool_call>", ", and </tool_call>", [OSLO]),
        (f"<tool_call>{A}</tool_", "", [OSLO]),
        (f'<tool_call>{{"a": "b\n<tool_call>{B}</tool_call>', '<tool_call>{"a": "b', [PARIS]),
        ("a <tool_call> b </tool_call> c", "a <tool_call> b </tool_call> c", []),
    ],
    "llama3": [
        (f"{A}\n{B}", "", [OSLO, PARIS]),
        (f"{A}{B}, {C};{C}", "", [OSLO, PARIS, NOW, NOW]),
        (f"[{A}, {B}]", "", [OSLO, PARIS]),
        (f"I look. {A}", "I look.", [OSLO]),
        (f"I look: {A}; {C}<|eot_id|>", "I look:", [OSLO, NOW]),
        (f"I look: [{A}, {C}]\n", "I look:", [OSLO, NOW]),
        (f"我来看。{A}", "我来看。", [OSLO]),
        (f"I look\n\n  {A}\n\nShall I go on?", "I look\n\nShall I go on?", [OSLO]),
        (f"I look <|python_tag|>{OTHER}<|eom_id|>", "I look", [("other", {})]),
        (f"<|python_tag|>{A}<|python_tag|>{C}<|eom_id|>", "", [OSLO, NOW]),
        (f"{A} Done.", "Done.", [OSLO]),
        (f"{A}; done", "; done", [OSLO]),
        (f"{A}; {OTHER}", f"; {OTHER}", [OSLO]),
        (f"I look:\n```json\n{A}\n```\n", "I look:", [OSLO]),
        ("Hello<|eom_id|>", "Hello", []),
        ("Hello <|eot_id|>\n", "Hello <|eot_id|>\n", []),
        ("Hello<|eom", "Hello<|eom", []),
        ('<|python_tag|>print("now")<|eom_id|>', '<|python_tag|>print("now")', []),
        *(
            (text, text, [])
            for text in (
                f"Say {A}",
                f'"call": {A}\n',
                f"Write it thus: {A} and so on.",
                f"Write it thus: {A}, and so on.",
                f"Write it thus: [{A}] and so on.",
                f"I look: {OTHER}",
                f"I look:\n{OTHER}",
                f"[{OTHER}, {A}]",
                f"I have\n{DEFINITION}\n",
                f"```python\nx = {A}\n```",
                'x\n{\n  "a": 1\n}\n[1] y',
                "```\n{}\n```",
                "`x`\n`y`",
                " \n",
            )
        ),
    ],
    "mistral": [
        (
            '[TOOL_CALLS]weather[CALL_ID]a1B2c3D[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}</s>',
            "",
            [OSLO, NOW],
        ),
        ('a [TOOL_CALLS] weather [CALL_ID] x9 [ARGS] {"city": "Oslo",} b', "a b", [OSLO]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}\nnow[CALL_ID]b[ARGS]{}', "", [OSLO, NOW]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}, now[ARGS]{}', "", [OSLO, NOW]),
        (f"[TOOL_CALLS] [{A}, {C}]\n\nDone.", "Done.", [OSLO, NOW]),
        (f"[TOOL_CALLS]{A}, {C}", "", [OSLO, NOW]),
        (f"[TOOL_CALLS] [{A}]\n[{C}]", "", [OSLO, NOW]),
        (f"Hm.[TOOL_CALLS][{A}][TOOL_CALLS][{C}]Done", "Hm. Done", [OSLO, NOW]),
        ("[TOOL_CALLS]now[ARGS]{} now it is {x", "now it is {x", [NOW]),
        *(
            (text, text, [])
            for text in (
                "[TOOL_CALLS] I will [ARGS] not",
                "[TOOL_CALLS]now[CALL_ID]a b[ARGS]{}",
                "[TOOL_CALLS]now[ARGS][]",
                "[TOOL_CALLS]now[CALL",
                f"I look.\n{A}",
            )
        ),
    ],
}
CASES = [(name, *sample) for name, samples in SAMPLES.items() for sample in samples]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_outputs_of_models_have_their_content_and_calls(
    name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    found = found_in(CALL_FORMATS[name], text)
    assert (found[0], [(call, json.loads(arguments)) for call, arguments in found[1]]) == (
        content,
        calls,
    )


@pytest.mark.parametrize("name", AROUND)
def test_every_way_to_write_an_object_is_a_call_in_every_format(name: str) -> None:
    for text, call in OBJECTS:
        for before, behind in AROUND[name]:
            content, found = found_in(CALL_FORMATS[name], before + text + behind)
            assert [(each, json.loads(arguments)) for each, arguments in found] == [call], text
            assert content == ""


@pytest.mark.parametrize("name", AROUND)
def test_calls_behind_each_other_may_be_separated_in_any_way(name: str) -> None:
    for before, behind in AROUND[name]:
        for between in BETWEEN:
            texts, calls = zip(*OBJECTS, strict=True)
            content, found = found_in(CALL_FORMATS[name], before + between.join(texts) + behind)
            assert [(each, json.loads(arguments)) for each, arguments in found] == list(calls)
            assert content == ""


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("text", NOT_OBJECTS)
def test_what_is_not_certain_stays_content(name: str, text: str) -> None:
    form = CALL_FORMATS[name]
    for before, behind in AROUND[name]:
        whole = before + text + behind
        end = next(filter(whole.endswith, form.ends), "")
        assert found_in(form, whole) == (whole.removesuffix(end), [])


def test_arguments_that_are_right_stay_as_they_were_written() -> None:
    arguments = '{ "n": 1e400, "i": 12345678901234567890123, "s": "\\u00e9\\/", "s": "é" }'
    for text in (
        f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>',
        f'<tool_call>{{"name": "now", "arguments": {json.dumps(arguments)}}}</tool_call>',
    ):
        assert found_in(CALL_FORMATS["hermes"], text) == ("", [("now", arguments)])


def every_text() -> list[tuple[str, str]]:
    """A format's name and a text: all samples, and all ways to write an object."""
    found = [(name, text) for name, text, _, _ in CASES]
    for name, arounds in AROUND.items():
        before, behind = arounds[-1]
        texts = [text for text, _ in OBJECTS] + NOT_OBJECTS
        found += [(name, f"I look. {before}{text}{behind} Done") for text in texts]
    return found


@pytest.mark.parametrize("name", AROUND)
def test_a_stream_and_a_whole_answer_are_the_same_wherever_they_are_cut(name: str) -> None:
    form = CALL_FORMATS[name]
    for text in (text for each, text in every_text() if each == name):
        whole = found_in(form, text)
        assert found_in(form, *text) == whole, text
        for place in range(1, len(text)):
            assert found_in(form, text[:place], text[place:]) == whole, (text, place)
