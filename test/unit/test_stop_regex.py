"""Stop expressions that would hurt the server: refused before they compile, or cut off alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
import tracemalloc
import weakref
from unittest import mock

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving_utils import environ, make_model_dir
from sglang.srt import stop_expressions
from sglang.srt import stops as stops_module
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.messages.requests import BatchTokenIDOutput, DecodeOptions, ReqOutput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.scheduling.batch_result_processor import accept_tokens
from sglang.srt.scheduling.request import Req
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.stop_expressions import (
    MAX_PROGRAM_SIZE,
    check_expression_list,
    check_size,
    compiled,
    program_size,
)
from sglang.srt.stops import BUDGET_S, SharedTime, StopSet
from sglang.srt.tokenizer import StopFinder, Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("model")))


def make_req(finder: StopFinder) -> Req:
    params = SamplingParams(max_new_tokens=1000)
    width = StepWidth(1, 0, 1)
    return Req(1, "a", [5], params, width, 0, 0, (), frozenset(), stop_finder=finder)


# Each of these crashed the process that compiled it, took gigabytes, or blocked it for seconds.
LARGE = [
    "((((a|){60}){60}){60}){60}b",
    "(?:(?:(?:a|){60}+){60}+){60}+",
    "(" * 30 + "a" + ")+" * 30,
    "(" * 12 + "a" + "){2}" * 12,
    ".{999999999}",
    ".{2000000}",
    "a{2000000,}?",
    "[a-z]{2000000,3000000}+",
    r"\p{L}{2000000}",
    r"\x41{2000000}",
    "(?i)ß{2000000}",
    r"(?:\X{100}\R{100}){60}",
    "(?:.{1000}){1000}",
    "(?=(?:a{1000}|b){1000})c",
    "(?<!a{2000000})b",
    "(?>a|b{1000}){1000}",
    "[]({]{2000000}",
    r"[^\])[[:alpha:](]{2000000}",
    "(a(?i){200}(?i){200}){200}",
    "(a)(?(1)b{2000}|c{2000}){9}",
    "(?|(a{99}){99}|b){99}",
    "((?P<n>a{40}){40})" + "(?&n)" * 20,
    "9{" + "9" * 250 + "}",
]


@pytest.mark.parametrize("expression", LARGE)
def test_large_expressions_are_refused_without_compiling_them(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regex, "compile", None)
    with pytest.raises(ValueError, match=f"more than {MAX_PROGRAM_SIZE}; repeat less"):
        check_size([expression])


@pytest.mark.parametrize(
    "expression",
    [
        "(?x)((a) {60}) {60}",
        "(?i-x:a)",
        "((a)(?#c){60}){60}",
        "(?if)[^a]",
        "(?V1)[[a-z]--[b]]",
        "((((a){e<=0}{60}){e<=0}{60}){e<=0}{60}){e<=0}{60}",
        "(?:foo){1<=e<=2}",
        "(?:foo){2i+1d<=4:[a-z]}",
        "[[:a-b:]](]",
        "[abc",
        "abc\\",
    ],
)
def test_what_hides_a_repeat_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="write"):
        check_size([expression])


def test_too_many_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups"):
        check_size(["(" * 80 + "a" + ")" * 80])


def test_named_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="not a usable regular expression"):
        check_expression_list([r"\L<words>"])


def test_expressions_of_one_request_count_together_and_the_same_one_once() -> None:
    check_size(["(ab){1500}", "(ab){1500}"])
    with pytest.raises(ValueError, match="too large once compiled"):
        check_size(["(ab){1500}", "(cd){1500}"])


USUAL = [
    r"\n\n",
    r"\d{3}-\d{4}",
    r"(\d{1,3}\.){3}\d{1,3}",
    "```(?:python|py)?\n",
    "(?:foo|bar)+baz",
    r"\bEND\b",
    "[a-z]{1,5000}!",
    r"(?i)the end",
    r"(?P<q>['\"]).*?(?P=q);",
    r"\{(?:[^{}]|(?R))*\}",
    r'\{"name": "[^"]*"',
    r"[^\]]{20}\]",
    r"\(?fox",
]


def test_usual_expressions_pass() -> None:
    check_size([*USUAL, "".join(f"({char}+)+" for char in "abcdefghijkl")])
    check_expression_list(USUAL)


PIECES = st.sampled_from(
    [
        "a",
        "b",
        ".",
        "é",
        "ß",
        "()",
        "|",
        "(",
        ")",
        "(?:",
        "(?i)",
        "(?i:",
        "(?=",
        "(?<!",
        "(?>",
        "(?|",
        "(?P<n>a)",
        "(?1)",
        "(?R)",
        "(?(1)a|b)",
        "[a-z]",
        "[^]]",
        "[](]",
        "[[]",
        "[\\]]",
        "[[:alpha:]]",
        "[a-[:digit:]]",
        "[[:x]",
        "\\d",
        "\\b",
        "\\X",
        "\\R",
        "\\K",
        "\\p{L}",
        "\\x41",
        "\\N{SPACE}",
        "\\(",
        "{}",
        "{e<=0}",
        "{e}",
        "{e:[)]}",
        "(?x)",
        "(?f)",
        "(?V1)",
        "(?#c)",
        "{2}",
        "{3,}",
        "{0,9}",
        "{,9}",
        "{99}",
        "{300}",
        "+",
        "*",
        "?",
        "+?",
        "++",
        "{9}?",
        "{1}",
        "{9",
    ]
)


@given(st.lists(PIECES, min_size=1, max_size=14).map("".join))
@example("(?i:(?>a)?()?{?(){9,})(?i){200}")
@example("(a(?i){30}(?i)){30}")
@settings(max_examples=300, deadline=None)
def test_memory_of_compiling_is_bounded_by_the_size(expression: str) -> None:
    try:
        check_size([expression])
    except ValueError:
        return
    tracemalloc.start()
    try:
        regex.compile(expression, cache_pattern=False)
    except Exception:  # noqa: BLE001 - refused by compiling; only its memory counts
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # What the Python part of the regex module holds per character, and what it loads once.
    assert peak < 300 * program_size(expression) + 4000 * len(expression) + 200_000


@pytest.mark.parametrize("worst", ["." + "{9990}", "(a){3300}", "(" * 6 + "a" + "){2}" * 6])
def test_what_is_accepted_compiles_in_little_memory(worst: str) -> None:
    """In a process with 1 GB of address space."""
    check_size([worst])
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from sglang.srt.stop_expressions import check_expression_list\n"
        f"check_expression_list([{worst!r}])\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environ())


def test_compiling_many_expressions_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(stop_expressions, "COMPILE_TIMEOUT_S", -1.0)
    monkeypatch.setattr(stop_expressions, "check_expression", tried.append)
    with pytest.raises(TimeoutError, match="takes too long to compile"):
        check_expression_list(["a", "b"])
    assert not tried


def test_requests_share_a_compiled_expression_as_long_as_one_needs_it() -> None:
    first, text = compiled("a|b+c"), "a|b+c"
    assert compiled(text) is first
    gone = weakref.ref(first)
    del first
    assert gone() is None


def test_stops_compile_when_they_are_first_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the scheduler compiles for requests that run, not for all that wait."""
    texts = []
    monkeypatch.setattr(stops_module, "compiled", lambda text: texts.append(text) or compiled(text))
    stops = StopSet([], ["x+y"])
    assert stops
    assert not texts
    assert stops.find("xxy", 0) is not None
    stops.find("xxy", 0)
    assert texts == ["x+y"]


def test_time_beyond_the_usual_is_shared_by_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests there are, their slow searches take one budget."""
    monkeypatch.setattr(stops_module, "SHARED_S", 0.05)
    monkeypatch.setattr(stops_module, "_shared_time", SharedTime())
    used_s = []
    for _ in range(20):
        start_s = time.thread_time()
        with pytest.raises(TimeoutError):
            StopSet([], ["(a|aa)+$x"]).find("a" * 300, 299)
        used_s.append(time.thread_time() - start_s)
    assert sum(used_s) < 20 * BUDGET_S / 4
    assert StopSet([], ["b+c"]).find("abbc", 3) is not None  # others are searched as before


def test_time_of_a_request_is_bounded_however_many_tokens_and_expressions() -> None:
    stops = StopSet([], ["(a|aa)+$x"] * 32)
    start = time.thread_time()
    timed_out = 0
    for length in range(100, 300):
        try:
            stops.find("a" * length, length - 1)
        except TimeoutError:
            timed_out += 1
    assert timed_out > 0
    # 200 steps add 1 ms each; one search may overrun its share a little.
    assert time.thread_time() - start < 10 * BUDGET_S


def test_expressions_within_their_own_time_never_use_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The searches of a token take just as long as it may, by a clock of the test's own: nothing
    comes out of what requests share."""
    shared = mock.Mock(left_s=1.0)
    monkeypatch.setattr(stops_module, "_shared_time", shared)
    search_s = stops_module.OWN_S / (2 * len(USUAL))
    now = itertools.count()
    monkeypatch.setattr(
        stops_module.time,
        "thread_time",
        lambda: (number := next(now)) // 2 * search_s + number % 2 * search_s,
    )
    stops, text = StopSet([], USUAL), ""
    for _ in range(300):
        text += "word "
        assert stops.find(text, len(text) - 5) is None
        stops.num_safe_chars(text)
    assert all(call.args[0] < 1e-9 for call in shared.take.call_args_list)


def test_searches_that_take_a_millisecond_use_up_what_requests_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a step of some milliseconds that is much, and each of a hundred requests could."""
    now = itertools.count()
    monkeypatch.setattr(stops_module, "SHARED_REFILL_SHARE", 0.0)
    monkeypatch.setattr(stops_module, "_shared_time", shared := SharedTime())
    monkeypatch.setattr(stops_module.time, "thread_time", lambda: next(now) * 0.001)
    for _ in range(100):
        assert StopSet([], ["x+y"]).find("a", 0) is None
    assert shared.left_s == pytest.approx(stops_module.SHARED_S - 100 * 0.0008)


def test_too_slow_an_expression_ends_its_request_alone_in_the_scheduler(
    tokenizer: Tokenizer,
) -> None:
    req = make_req(StopFinder(tokenizer, StopSet([], ["(a|aa)+$x"]), True))
    reason = None
    for token in tokenizer.encode("a" * 200, add_special_tokens=False):
        reason = reason or accept_tokens(req, [token])
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 400)


def test_a_failing_search_ends_its_request_alone_in_the_scheduler(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    finder = StopFinder(tokenizer, StopSet(["x"]), True)
    monkeypatch.setattr(finder, "push", fail)
    reason = accept_tokens(make_req(finder), [300])
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 500)


@pytest.mark.parametrize(("expression", "status"), [("(a|aa)+$x", 400), ("(", 500)])
def test_the_detokenizer_ends_only_the_request_whose_expression_fails(
    tokenizer: Tokenizer, expression: str, status: int
) -> None:
    sent: list = []
    manager = DetokenizerManager(tokenizer, sent.append)
    ids = tokenizer.encode("a" * 200, add_special_tokens=False)
    bad = DecodeOptions(True, [], False, [expression])
    good = DecodeOptions(True, [], False, ["never"])

    def output(req_id: int, options: DecodeOptions) -> ReqOutput:
        return ReqOutput(req_id, ids, None, 1, len(ids), 0, 0, options)

    manager.handle(BatchTokenIDOutput(outputs=[output(1, bad), output(2, good)]))
    first, second = sent[0].outputs
    assert (first.finish_reason.type, first.finish_reason.status_code) == ("abort", status)
    assert second.finish_reason is None
    assert second.text.startswith("aaa")
