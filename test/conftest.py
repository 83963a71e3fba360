"""What holds for all tests."""

from __future__ import annotations

from typing import Any

import pytest

from target import TARGET, use_flags_as_defaults

# Their fixture `target`, two engines and a server, is made once where one process runs them all.
SHARE_SERVERS = (
    "test/e2e/test_engine_determine_generation.py",
    "test/e2e/test_engine_flush_cache.py",
    "test/e2e/test_engine_pause_continue.py",
)
# Files that take longest, the longest first. Processes that begin with them end at about the same
# time; the order of files by their number of tests, xdist's own, leaves the longest to one process.
LONGEST_FIRST = (
    *SHARE_SERVERS,
    "test/e2e/test_server_lifecycle.py",
    "test/e2e/test_greedy_equality.py",
    "test/e2e/test_tools_and_log.py",
    "test/e2e/test_mtp.py",
    "sgl-kernel/tests/test_build.py",
    "test/e2e/test_logprobs_and_penalties.py",
    "test/unit/mtp/test_mtp_equality.py",
    "test/unit/layers/test_triton_attention.py",
    "test/unit/step/test_triton_step_ops.py",
    "test/e2e/test_weight_updates.py",
    "test/unit/mtp/test_ledger_matrix.py",
    "test/unit/speculative/test_eagle.py",
    "test/e2e/test_paused_server.py",
    "test/e2e/test_http_storm.py",
    "test/unit/speculative/test_toy_drafters.py",
    "test/unit/speculative/test_second_model_drafter.py",
    "test/e2e/test_front_end_load.py",
    "test/unit/speculative/test_accept_thresholds.py",
    "test/unit/managers/test_storm.py",
    "test/unit/layers/test_attention.py",
    "test/unit/test_demo_heads.py",
)

use_flags_as_defaults(TARGET)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes: LONGEST_FIRST, then the other files in their order."""
    if hasattr(config, "workerinput"):
        ranks = {path: rank for rank, path in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each process whole files in the order of collection, as `--dist loadfile` does, and
    SHARE_SERVERS to one."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # xdist before 3.8 knows only its own order

    class FilesOrGroups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return SHARE_SERVERS[0] if path in SHARE_SERVERS else path

    return FilesOrGroups(config, log)
