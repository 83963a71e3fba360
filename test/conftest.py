"""Holds the set-up of all tests."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sglang.srt.garbage import keep_out_of_collections
from target import TARGET, use_flags_as_defaults
from turns import case_of, chosen, is_more

# Files of which one process runs all, so that their servers and engines are started once: the
# fixtures `target` and `openai_server`.
SHARE_SERVERS = (
    (
        "test/e2e/test_engine_determine_generation.py",
        "test/e2e/test_engine_flush_cache.py",
        "test/e2e/test_engine_pause_continue.py",
    ),
    (
        "test/e2e/test_tools_and_log.py",
        "test/e2e/test_openai_chat.py",
        "test/e2e/test_openai_completions.py",
    ),
)
GROUP_OF = {path: group[0] for group in SHARE_SERVERS for path in group}
# Files that take longest, the longest first. Processes that begin with them end at about the same
# time; the order of files by their number of tests, xdist's own, leaves the longest to one process.
LONGEST_FIRST = (
    *(group[0] for group in SHARE_SERVERS),
    "test/unit/layers/test_triton_compiles.py",
    "test/e2e/test_server_lifecycle.py",
    "test/unit/workers/test_round_graphs.py",
    "test/unit/speculative/test_ngram_serving.py",
    "sgl-kernel/tests/test_build.py",
    "test/unit/speculative/test_sampled_distribution.py",
    "test/e2e/test_mtp.py",
    "test/unit/speculative/test_mtp_equality.py",
    "test/e2e/test_logprobs_and_penalties.py",
    "test/unit/benchmark/test_inflate.py",
    "test/e2e/test_weight_updates.py",
    "test/e2e/test_page_in_browser.py",
    "test/e2e/test_greedy_equality.py",
    "test/unit/speculative/test_tile_spec_serving.py",
    "test/unit/speculative/test_standalone_graphs.py",
    "test/e2e/test_trainer_names.py",
    "test/unit/speculative/test_ledger_matrix.py",
    "test/unit/layers/test_triton_attention.py",
    "test/unit/speculative/test_eagle_trees.py",
    "test/unit/speculative/test_eagle.py",
    "test/unit/models/test_long_prompts.py",
    "sgl-kernel/tests/test_emulated_kernels.py",
    "test/e2e/test_front_end_load.py",
    "test/unit/speculative/test_switched_graphs.py",
    "test/unit/model_executor/test_recorded_graphs.py",
    "test/unit/speculative/test_adaptive_serving.py",
    "test/unit/speculative/test_toy_drafters.py",
    "test/e2e/test_pages.py",
    "test/e2e/test_stopped_processes.py",
    "test/e2e/test_paused_server.py",
    "test/unit/speculative/test_accept_thresholds.py",
    "test/unit/benchmark/test_standalone_benchmark.py",
    "test/unit/model_executor/test_draft_tree_passes.py",
    "test/unit/speculative/test_ngram_graphs.py",
    "test/unit/test_train_draft.py",
    "test/e2e/test_http_storm.py",
    "test/unit/managers/test_storm.py",
    "test/unit/step/test_triton_step_ops.py",
)

MANY_MODULES = 100
num_modules: list[int] = []  # that were imported when objects were last exempted from collections

use_flags_as_defaults(TARGET)
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub, nor does a process of one
gc.disable()  # until all tests are collected: nothing that imports make is garbage


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is not of this turn, and sorts for several processes: SHARE_SERVERS by what
    they share, the other LONGEST_FIRST, the other files in their order."""
    take_turn(config, items)
    if not hasattr(config, "workerinput"):
        return
    ranks = {path: rank for rank, path in enumerate(LONGEST_FIRST)}

    def place(item: pytest.Item) -> tuple[int, str]:
        path = item.nodeid.partition("::")[0]
        rank = ranks.get(GROUP_OF.get(path, path), len(ranks))
        shares_targets = path in SHARE_SERVERS[0]
        return rank, vars(item)["callspec"].params["target"] if shares_targets else ""

    items.sort(key=place)


def take_turn(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the cases of long matrices that TEST_TURN does not choose."""
    turn = os.environ.get("TEST_TURN", "all")
    if turn == "all":
        return
    cases = [case_of(item) for item in items]
    taken = chosen(turn, sorted({case for case in cases if case is not None}))
    if not is_more(turn):
        taken.add(None)
    pairs = list(zip(items, cases, strict=True))
    config.hook.pytest_deselected(items=[item for item, case in pairs if case not in taken])
    items[:] = [item for item, case in pairs if case in taken]


def pytest_unconfigure() -> None:
    """Lets the interpreter free everything at its end: nanobind warns of what is left."""
    gc.unfreeze()


def pytest_collection_finish() -> None:
    """Keeps garbage collections from looking at what imports and the collection of tests have made,
    which lives to the end: that took each most of a second."""
    gc.enable()
    keep_out_of_collections()
    num_modules.append(len(sys.modules))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Exempts also what tests before this one have imported: a model of transformers brings more
    than a thousand modules along, and each capture of a graph collects garbage."""
    if len(sys.modules) > num_modules[-1] + MANY_MODULES:
        keep_out_of_collections()
        num_modules.append(len(sys.modules))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each process whole files in the order of collection, as `--dist loadfile` does, and
    SHARE_SERVERS to one."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # xdist before 3.8 knows only its own order

    class FilesOrGroups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return GROUP_OF.get(path, path)

    return FilesOrGroups(config, log)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Leaves nothing of a server's logging, which is set up for a process of its own."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
