"""SGLANG_MTP_DEBUG_TRACE and SGLANG_MTP_KV_LEAK_DEBUG."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sglang.srt.device_copies import HostCopy
from sglang.srt.managers.scheduler import SchedulerDebug
from sglang.srt.mem_cache.kv_audit import ReleaseReport
from sglang.srt.messages.control import AbortReq
from sglang.srt.speculative.debug_trace import DebugTrace
from sglang.srt.step import worker as step_contract
from utils import MTP_MAX_ROWS, SchedulerHarness, Setup, make_mtp_worker, make_runner

MASK = 5
PROMPT = [3, 1, 4, 1, 2, 0, 2, 4, 4, 1]
FIELDS = {
    "rid",
    "step",
    "phase_before",
    "phase_after",
    "q_len",
    "k",
    "effective_k",
    "input",
    "pending",
    "committed",
    "positions",
    "seq_len_base",
    "can_run_cuda_graph",
    "finish_reason",
}
MODES: list[dict[str, Any]] = [
    {"mtp_k": 3},
    {"mtp_k": 4, "mtp_strategy": ["conf_adapt", 0.6]},
    {"mtp_k": 4, "mtp_verify": True},
    {"mtp_k": 1},
]


def traced(small_model: Path, path: Path, overlap: bool) -> tuple[SchedulerHarness, list[Any]]:
    setup = Setup(chunked_prefill_size=4, enable_overlap=overlap)
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
    trace = DebugTrace(str(path))
    debug = SchedulerDebug(on_step_read=trace.read)
    worker = make_mtp_worker(runner, MASK, trace=trace)
    harness = SchedulerHarness(setup, worker, debug)
    for mode in MODES:
        harness.submit(PROMPT, temperature=0.0, max_new_tokens=11, mtp_enabled=True, **mode)
    harness.submit(PROMPT, temperature=0.0, max_new_tokens=11)
    harness.run()
    return harness, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_trace_tells_the_whole_decode(small_model: Path, tmp_path: Path, overlap: bool) -> None:
    harness, lines = traced(small_model, tmp_path / "trace.jsonl", overlap)
    by_rid = defaultdict(list)
    for line in lines:
        assert set(line) == FIELDS
        by_rid[line["rid"]].append(line)
    assert set(by_rid) == {f"request-{i + 1}" for i in range(len(MODES))}, "plain ones left out"
    for i, mode in enumerate(MODES):
        steps, outcome = by_rid[f"request-{i + 1}"], harness.outputs[i + 1]
        assert [line["step"] for line in steps] == list(range(len(steps)))
        assert [line["effective_k"] for line in steps if line["effective_k"]] == outcome.step_lens
        phases = [line["phase_before"] for line in steps]
        first = phases.index("seed")
        assert phases == ["prefill"] * first + ["seed"] + ["steady"] * (len(steps) - first - 1)
        assert first > 0 or i > 0, "Only others find the prompt in the cache."
        assert steps[-1]["phase_after"] == "finished"
        assert steps[-1]["finish_reason"] == "length"
        committed = [token for line in steps for token in line["committed"]]
        fed = (PROMPT + outcome.token_ids)[steps[0]["seq_len_base"] :]
        assert committed == fed[: len(committed)], "KV is of what was emitted"
        for line, following in zip(steps, [*steps[1:], None], strict=True):
            k = mode["mtp_k"] if line["phase_before"] != "prefill" else 0
            assert line["k"] == k
            assert len(line["input"]) == len(line["positions"]) == line["q_len"]
            start = line["seq_len_base"]
            assert line["positions"] == list(range(start, start + line["q_len"]))
            assert line["input"][len(line["input"]) - max(k - 1, 0) :] == [MASK] * max(k - 1, 0)
            if following is not None and line["phase_before"] != "prefill":
                num_pending = len(line["pending"])
                assert following["input"][:num_pending] == line["pending"]
                assert set(following["input"][num_pending:]) <= {MASK}


def test_tracing_changes_no_token(small_model: Path, tmp_path: Path) -> None:
    harness, _ = traced(small_model, tmp_path / "trace.jsonl", overlap=True)
    setup = Setup()
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
    for i, mode in enumerate(MODES):
        other = SchedulerHarness(setup, make_mtp_worker(runner, MASK))
        params = {"temperature": 0.0, "max_new_tokens": 11, "mtp_enabled": True, **mode}
        assert other.generate([PROMPT], **params) == [harness.outputs[i + 1].token_ids]


def test_a_traced_step_is_copied_to_the_host_once(small_model: Path, tmp_path: Path) -> None:
    with (
        mock.patch.object(step_contract, "HostCopy", wraps=HostCopy) as copies,
        mock.patch.object(
            DebugTrace, "launched", autospec=True, side_effect=DebugTrace.launched
        ) as steps,
    ):
        traced(small_model, tmp_path / "trace.jsonl", overlap=True)
    assert copies.call_count == steps.call_count > 0


def test_a_trace_that_cannot_be_written_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SGLANG_MTP_DEBUG_TRACE"):
        DebugTrace(str(tmp_path / "nowhere" / "trace.jsonl"))


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_audit_accounts_for_every_slot(small_model: Path, page_size: int) -> None:
    reports: list[ReleaseReport] = []
    setup = Setup(page_size=page_size, num_pages=400 // page_size)
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
    debug = SchedulerDebug(release_audit=reports.append)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, MASK), debug)
    params = {"temperature": 0.0, "max_new_tokens": 20, "mtp_enabled": True, "mtp_k": 4}
    for _ in range(3):
        harness.submit(PROMPT, **params)
    aborted = harness.submit(PROMPT[::-1], **params)
    for _ in range(3):
        harness.step()
    harness.inbox.messages.append(AbortReq(req_ids=[aborted]))
    harness.run()
    assert len(reports) == 4
    by_rid = {report.rid: report for report in reports}
    for report in reports:
        assert report.missing_from_terminal_release_count == 0
        assert report.freed_by_tail_cleanup_count == report.curr_step_token_count
    whole = by_rid["request-1"]
    num_committed = whole.retained_as_committed_count + whole.freed_committed_count
    assert len(PROMPT) <= num_committed < len(PROMPT) + 20
    assert whole.seed_anchor_old_loc_state == "cached"
    gone = by_rid[f"request-{aborted}"]
    assert gone.retained_as_committed_count <= len(PROMPT)


def test_the_audit_names_a_leaked_slot(small_model: Path) -> None:
    reports: list[ReleaseReport] = []
    setup = Setup()
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
    debug = SchedulerDebug(release_audit=reports.append)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, MASK), debug)
    harness.submit(PROMPT, temperature=0.0, max_new_tokens=20, mtp_enabled=True, mtp_k=4)
    for _ in range(3):
        harness.step()
    req = harness.scheduler.lifecycle.running[0]
    assert req.kv is not None
    leaked = req.kv.pages[-2:]
    free = harness.ledger.release

    def forgetful(kv: Any, tokens: Any) -> None:
        kv.pages = kv.pages[:-2]
        free(kv, tokens)

    harness.ledger.release = forgetful  # type: ignore[method-assign]
    harness.scheduler.checker.after_step = lambda transition: None  # type: ignore[method-assign]
    while not reports:
        harness.step()
    assert reports[0].missing_from_terminal_release_count == len(leaked)


@pytest.mark.parametrize("tau", [None, 0.5])
def test_steps_of_several_rows_without_graphs_are_told_of_once(
    small_model: Path, caplog: pytest.LogCaptureFixture, tau: float | None
) -> None:
    setup = Setup(max_running_requests=4)
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS, max_graph_width=0)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, MASK, bypasses_graphs=True))
    harness.generate([[5, 5]], max_new_tokens=4, temperature=0.0)
    assert not caplog.records, "a plain request was told of"
    params = {"mtp_enabled": True, "mtp_k": 3, "max_new_tokens": 12}
    strategy = {} if tau is None else {"mtp_strategy": ["conf_adapt", tau]}
    harness.generate([[1, 2, 3], [4]], **params, **strategy)
    (record,) = caplog.records
    kind = "static" if tau is None else "conf_adapt"
    told = f"decode_q_len_per_req=5, mtp_phase=seed, mtp_strategy_kind={kind}"
    assert told in record.getMessage()
