"""The parts of a choice are the same whether its output comes whole or bit by bit."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sglang.srt.entrypoints.openai.chat_parts import ChoiceParts, Division
from sglang.srt.function_call.formats import CALL_FORMATS
from sglang.srt.parser.reasoning_parser import REASONING_FORMATS

NOW = '{"name": "now", "arguments": {"a": "\n", }}'
CALLS = {
    "qwen25": f"<tool_call>\n{NOW}\n{NOW}\n</tool_call>",
    "llama3": f"{NOW}\n{NOW}<|eom_id|>",
    "mistral": '[TOOL_CALLS]now[CALL_ID]a1[ARGS]{"a": "\n"}[TOOL_CALLS]now[ARGS]{"a": "\n"}',
}
Answer = tuple[str, str, list[tuple[int, str, str]]]


def answer(form: str, text: str, places: Iterable[int]) -> Answer:
    """Reasoning, content and calls of an output that is seen up to each of the places."""
    reasoning = REASONING_FORMATS["qwen3"]
    division = Division(reasoning=reasoning, calls=CALL_FORMATS[form], names=frozenset({"now"}))
    parts = ChoiceParts(division)
    news = [*(parts.news(text[:place], False) for place in places), parts.news(text, True)]
    calls = [call for each in news for call in each.calls or ()]
    return (
        "".join(each.reasoning for each in news),
        "".join(each.content for each in news),
        [(c["index"], c["function"]["name"], c["function"]["arguments"]) for c in calls],
    )


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize(
    ("before", "behind", "content"),
    [
        ("Sure.\n", "\n", "Sure."),
        ("\n", "\n\n", ""),
        ("<think>\nhm\n</think>\n\n", " Done.", "Done."),
        ("<think>\nhm\n</think>\n\nSure.\n", " Done.", "Sure.\nDone."),
    ],
)
def test_a_stream_has_the_parts_of_the_whole(
    form: str, before: str, behind: str, content: str
) -> None:
    text = before + CALLS[form] + behind
    whole = answer(form, text, ())
    assert whole[:2] == ("hm" if "hm" in before else "", content)
    assert [(index, name) for index, name, _ in whole[2]] == [(0, "now"), (1, "now")]
    assert answer(form, text, range(len(text))) == whole
    for place in range(len(text)):
        assert answer(form, text, [place]) == whole
