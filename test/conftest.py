"""What holds for all tests."""

from __future__ import annotations

from typing import Any

import pytest

from target import TARGET, use_flags_as_defaults

# Their fixture `target`, two engines and two servers, is made once where one process runs them all.
SHARE_SERVERS = (
    "test/e2e/test_engine_determine_generation.py",
    "test/e2e/test_engine_flush_cache.py",
    "test/e2e/test_engine_pause_continue.py",
)

use_flags_as_defaults(TARGET)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each process whole files, as `--dist loadfile` does, and SHARE_SERVERS to one."""
    from xdist.scheduler import LoadFileScheduling

    class FilesOrGroups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return SHARE_SERVERS[0] if path in SHARE_SERVERS else path

    return FilesOrGroups(config, log)
