"""Stop expressions that would hurt the server: refused before they compile, or cut off alone."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from serving_utils import make_model_dir
from sglang.srt.base_worker import StepWidth
from sglang.srt.managers.batch_result_processor import accept_tokens
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import BatchTokenIDOutput, DecodeOptions, ReqOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.stops import BUDGET_S, StopSet, check_expressions
from sglang.srt.tokenizer import StopFinder, Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("model")))


def make_req(finder: StopFinder) -> Req:
    params = SamplingParams(max_new_tokens=1000)
    return Req(
        1, "a", [5], params, StepWidth(1, 0, 1), False, 0, 0, (), frozenset(), stop_finder=finder
    )


# Each of these crashed the process that compiled it, or took gigabytes.
LARGE = [
    "((((a|){60}){60}){60}){60}b",
    "(?:(?:(?:a|){60}+){60}+){60}+",
    "(" * 30 + "a" + ")+" * 30,
    "(" * 12 + "a" + "){2}" * 12,
    "(((a|) {60}) { 60 }){ ,60}b",
]


@pytest.mark.parametrize("expression", LARGE)
def test_large_expressions_are_refused_without_compiling_them(expression: str) -> None:
    start = time.thread_time()
    with pytest.raises(ValueError, match="smaller counts"):
        check_expressions([expression])
    assert time.thread_time() - start < 0.05


def test_what_hides_a_repeat_is_refused() -> None:
    for expression in ("(?x)((a) {60}) {60}", "(?i-x:a)", "((a)(?#c){60}){60}"):
        with pytest.raises(ValueError, match="x flag or comments"):
            check_expressions([expression])
    with pytest.raises(ValueError, match="groups"):
        check_expressions(["(" * 80 + "a" + ")" * 80])


def test_expressions_of_one_request_count_together() -> None:
    check_expressions(["(ab){200}"])
    with pytest.raises(ValueError, match="smaller counts"):
        check_expressions(["(ab){200}", "(cd){200}"])


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
]


def test_usual_expressions_pass() -> None:
    check_expressions(USUAL)


def test_what_is_accepted_compiles_in_little_memory() -> None:
    """The largest expression the check lets through, in a process with 1 GB of address space."""
    worst = "(" * 8 + "a" + "){2}" * 8
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from sglang.srt.stops import StopSet, check_expressions\n"
        f"check_expressions([{worst!r}])\n"
        f"assert StopSet([], [{worst!r}]).find('a' * 300, 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


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
    # 200 steps add 0.5 ms each; one search may overrun its share a little.
    assert time.thread_time() - start < 10 * BUDGET_S


def test_cheap_expressions_never_use_their_time_up() -> None:
    stops, text = StopSet([], USUAL), ""
    for _ in range(3000):
        text += "word "
        assert stops.find(text, len(text) - 5) is None
        stops.num_safe_chars(text)


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
