"""Says what is refused before torch is loaded, of GPUs too, and what is left to the scheduler."""

from __future__ import annotations

import importlib.util
import logging
import re
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Barrier, Event
from typing import Any

import pytest

from sglang.srt.environ import Environ
from sglang.srt.host import Host
from sglang.srt.layers.triton_launch import INTERPRETED
from sglang.srt.messages.requests import SchedulerInfo
from sglang.srt.model_config import load_model_config
from sglang.srt.platform import Platform
from sglang.srt.processes import flag_checks
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.determinism import check_determinism
from sglang.srt.processes.flag_checks import MTP_IS_OFF, check_flags
from sglang.srt.processes.round_flags import Asked
from sglang.srt.processes.runtime_config import resolve
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.registry import ATTENTION_BACKENDS, ATTENTION_LIMITS, ROW_INDEPENDENT, TRANSFORMERS
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter_options import DrafterConfig

MODEL = load_model_config("demo")
GIB = 1 << 30
CPU = Host(devices=frozenset({"cpu"}), num_cores=4, available_bytes=8 * GIB)
MAYBE_GPU = Host(devices=frozenset({"cpu", "cuda"}), num_cores=4, available_bytes=8 * GIB)
EAGLE3 = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "demo-eagle3"}
TREES = {**EAGLE3, "speculative_eagle_topk": 2}


def checked(host: Host, **flags: Any) -> SchedulerInfo:
    return check_flags(ServerArgs(model_path="demo", **flags), MODEL, Environ(), host)


def refused(host: Host, **flags: Any) -> str:
    with pytest.raises(ConfigError) as error:
        checked(host, **flags)
    return str(error.value)


@pytest.fixture(autouse=True)
def has_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_checks_in_two_threads_leave_the_levels_of_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    make, package = flag_checks.drafter_from_flags, logging.getLogger("sglang")
    level, entered, left = package.level, Barrier(2), Event()

    def slow(asked: Asked) -> DrafterConfig | None:
        is_first = entered.wait(timeout=30) == 0
        assert is_first or left.wait(timeout=30)
        return make(asked)

    monkeypatch.setattr(flag_checks, "drafter_from_flags", slow)
    with ThreadPoolExecutor(2) as threads:
        checks = [threads.submit(checked, CPU) for _ in range(2)]
        wait(checks, return_when=FIRST_COMPLETED)
        left.set()
        for check in checks:
            check.result()
    assert package.level == level


def test_what_a_gpu_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"device": "cuda", "attention_backend": "flashinfer"}
    assert "has no float32; use --dtype bfloat16 or float16" in refused(
        MAYBE_GPU, dtype="float", **flags
    )
    checked(MAYBE_GPU, dtype="half", **flags)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "flashinfer is not installed" in refused(MAYBE_GPU, dtype="half", **flags)


def test_masks_of_trees_that_are_too_large_are_refused() -> None:
    flags = {**TREES, "dtype": "half", "device": "cuda", "attention_backend": "flashinfer"}
    checked(MAYBE_GPU, **flags)
    said = refused(MAYBE_GPU, max_running_requests=65_536, **flags)
    assert "lower --chunked-prefill-size, --max-running-requests or" in said
    checked(MAYBE_GPU, max_running_requests=65_536, **{**flags, "attention_backend": "triton"})


@pytest.mark.parametrize("backend", sorted(ATTENTION_LIMITS))
def test_where_there_may_be_a_gpu_only_what_suits_no_device_is_refused(backend: str) -> None:
    checked(MAYBE_GPU, attention_backend=backend, dtype="half")
    if backend == "flashinfer":
        assert "has no float32" in refused(MAYBE_GPU, attention_backend=backend, dtype="float32")
    if backend != "torch_native":
        assert "not on cpu" in refused(CPU, attention_backend=backend)


@pytest.mark.parametrize("name", sorted(ATTENTION_LIMITS))
def test_a_backend_says_of_itself_what_is_known_before(name: str) -> None:
    if name == "triton" and INTERPRETED:
        pytest.skip("Triton is interpreted, on a CPU too.")
    limits, says = ATTENTION_LIMITS[name], ATTENTION_BACKENDS.load(name).capabilities()
    dtypes = {str(dtype).removeprefix("torch.") for dtype in says.dtypes}
    assert (limits.devices, limits.dtypes) == (says.devices, dtypes)
    assert limits.max_mask_entries == says.max_mask_entries


@pytest.mark.parametrize("flags", [{}, EAGLE3, {"max_total_tokens": 100}])
def test_what_is_known_is_what_the_scheduler_comes_to(flags: dict[str, Any]) -> None:
    args, platform = ServerArgs(model_path="demo", **flags), Platform("cpu", 4, 8 * GIB, "cpu")
    known, found = checked(CPU, **flags), resolve(args, platform, MODEL, Environ())
    assert known.context_len == found.execution.context_len
    assert known.mtp_max_k == (0 if found.mtp is None else found.mtp.max_k)
    assert known.mtp_refusal == (MTP_IS_OFF if flags is EAGLE3 else None)
    assert known.max_req_len == min(MODEL.context_len, flags.get("max_total_tokens", 1 << 20) - 1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {**EAGLE3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 9},
            "has no effect beside",
        ),
        ({"tile_spec": True}, "has no effect here"),
        (
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_draft_model_path": "demo-draft",
                "tokenizer_path": "/no/tokenizer",
            },
            "has no tokenizer",
        ),
    ],
)
def test_warnings_are_left_to_resolve(
    flags: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    checked(CPU, **flags)
    assert caplog.messages == []
    resolve(
        ServerArgs(model_path="demo", **flags),
        Platform("cpu", 4, 8 * GIB, "cpu"),
        MODEL,
        Environ(),
    )
    assert says in caplog.text


DETERMINISTIC = {"enable_deterministic_inference": True, "device": "cuda", "dtype": "bfloat16"}
ASKING = {"enable_deterministic_requests": True, "device": "cuda", "dtype": "bfloat16"}
GPU = Platform(
    device="cuda", num_cores=4, available_host_bytes=8 * GIB, device_name="", capability=(9, 0)
)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"device": "cpu"}, "--enable-deterministic-inference needs a GPU"),
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer adds up in an order"),
        ({"attention_backend": "torch_native"}, "--attention-backend torch_native adds up"),
        ({"tp_size": 2}, "--tp-size 2 adds up over ranks"),
        ({"quantization": "fp8"}, "does not cover weights in fp8; use weights of 16 bits"),
        (TREES, "does not cover trees of drafts; draft chains"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 2},
            "does not cover trees of drafts; draft chains",
        ),
    ],
    ids=str,
)
def test_what_determinism_does_not_cover_is_refused(flags: dict[str, Any], says: str) -> None:
    assert says in refused(MAYBE_GPU, **DETERMINISTIC | flags)
    asking = says.replace("deterministic-inference", "deterministic-requests")
    assert asking in refused(MAYBE_GPU, **ASKING | flags)
    checked(MAYBE_GPU, **ASKING | flags | {"enable_deterministic_requests": False})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"impl": TRANSFORMERS}, "does not cover LlamaForCausalLM, which transformers' code"),
        (
            {"hf": {**MODEL.hf, "text_config": {"quantization_config": {"quant_method": "fp8"}}}},
            "does not cover weights in fp8",
        ),
    ],
    ids=["transformers", "fp8"],
)
def test_models_that_determinism_does_not_cover_are_refused(
    changes: dict[str, Any], says: str
) -> None:
    args, model = ServerArgs(model_path="demo", **DETERMINISTIC), replace(MODEL, **changes)
    check_determinism(args, MODEL, ["cuda"])
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_determinism(args, model, ["cuda"])


def test_requests_that_may_be_deterministic_are_not_accepted_by_thresholds() -> None:
    """A drafter's models have the usual orders, so what they propose depends on the company."""
    thresholds = EAGLE3 | {"speculative_accept_threshold_acc": 0.9}
    said = refused(MAYBE_GPU, **ASKING | thresholds)
    assert "--enable-deterministic-requests does not cover accept thresholds below 1" in said
    for name in ("acc", "single"):
        assert f"--speculative-accept-threshold-{name}" in said
    checked(MAYBE_GPU, **DETERMINISTIC | thresholds)


def test_determinism_covers_chains_of_all_drafters() -> None:
    for drafter in (EAGLE3, {"speculative_algorithm": "NGRAM"}, EAGLE3 | {"tile_spec": True}):
        checked(MAYBE_GPU, **DETERMINISTIC | drafter)
        checked(MAYBE_GPU, **ASKING | drafter)


def test_determinism_chooses_kernels_of_its_own() -> None:
    for flags in (DETERMINISTIC, DETERMINISTIC | ASKING):
        execution = resolve(ServerArgs(model_path="demo", **flags), GPU, MODEL, Environ()).execution
        assert (execution.attention_backend, execution.ops) == (ROW_INDEPENDENT, ROW_INDEPENDENT)
        assert not execution.capabilities.tree_masks
        assert execution.orders == (True,)
        assert not execution.has_both_orders


def test_requests_that_may_be_deterministic_leave_the_kernels_and_have_both() -> None:
    args = ServerArgs(model_path="demo", **ASKING, **EAGLE3)
    without = replace(args, enable_deterministic_requests=False)
    config, plain = (resolve(each, GPU, MODEL, Environ()) for each in (args, without))
    execution = config.execution
    assert execution.orders == (False, True)
    assert config.scheduler.planner.has_both_orders
    assert 0.8 < execution.static_memory_share < plain.execution.static_memory_share
    share = plain.execution.static_memory_share
    assert plain.execution == replace(execution, has_both_orders=False, static_memory_share=share)
    assert [each.orders for each in drafter_models(config.drafter, execution)] == [(False,)]
    eager = resolve(replace(args, disable_cuda_graph=True), GPU, MODEL, Environ()).execution
    assert eager.static_memory_share == share, "There are no graphs to leave room for."
    chosen = resolve(replace(args, mem_fraction_static=0.5), GPU, MODEL, Environ()).execution
    assert chosen.static_memory_share == 0.5
