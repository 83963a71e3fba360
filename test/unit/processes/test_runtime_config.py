"""From wishes to sub-configs, and refusals that name the flag and the remedy."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from sglang.srt.environ import Environ
from sglang.srt.flag_values import flags_of
from sglang.srt.host import Host
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.lookahead.prompt_budget import PromptBudget
from sglang.srt.mem_cache.kv_sizing import row_width
from sglang.srt.model_config import ModelConfig, load_model_config, resolve_model_path
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.platform import Platform, memory_for
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.flag_checks import (
    CPU_KV_MAX_BYTES,
    CPU_KV_SHARE,
    MAX_CHUNKS,
    MAX_CPU_THREADS,
    check_flags,
)
from sglang.srt.processes.runtime_config import (
    DEFAULT_MAX_STEP_MS,
    GPU_STATIC_SHARE,
    MAX_GRAPH_ROWS,
    NO_DRAFTS,
    RuntimeConfig,
    resolve,
    with_chunks_that_fit,
    with_drafter,
)
from sglang.srt.processes.worker_factory import (
    make_prompt_budget,
    measure_prices,
)
from sglang.srt.registry import (
    ATTENTION_BACKENDS,
    DEFAULT_ATTENTION_BACKENDS,
    DEFAULT_OPERATIONS,
    DRAFTERS,
    MODELS,
    OPERATIONS,
    Operations,
    Registry,
    load,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter_options import DrafterConfig, DrafterNeeds
from sglang.srt.step.price_table import StepShape
from utils import make_random_llama

GIB = 1 << 30
HOST = Host(devices=frozenset({"cpu"}), num_cores=4, available_bytes=8 * GIB)
PLATFORM = Platform(device="cpu", num_cores=4, available_host_bytes=8 * GIB, device_name="cpu")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def model(model_path: Path) -> ModelConfig:
    return load_model_config(str(model_path))


@pytest.fixture(scope="module")
def mtp_model() -> ModelConfig:
    return load_model_config(str(resolve_model_path("demo")))


def resolved(
    model: ModelConfig,
    platform: Platform = PLATFORM,
    environ: Environ | None = None,
    **flags: Any,
) -> RuntimeConfig:
    args = ServerArgs(model_path=str(model.path), **flags)
    return resolve(args, platform, model, environ or Environ())


def refusal(model: ModelConfig, **flags: Any) -> str:
    with pytest.raises(ConfigError) as error:
        resolved(model, **flags)
    assert "\n" not in str(error.value)
    args = ServerArgs(model_path=str(model.path), **flags)
    with pytest.raises(ConfigError) as early:
        check_flags(args, model, Environ(), HOST)
    assert str(early.value) == str(error.value)
    return str(error.value)


def test_flags_reach_the_part_that_they_are_for(model: ModelConfig) -> None:
    config = resolved(
        model,
        environ=Environ(test_retract_interval=3, strict_invariants=True),
        load_format="dummy",
        dtype="bfloat16",
        context_length=100,
        max_total_tokens=640,
        page_size=16,
        max_running_requests=5,
        max_queued_requests=6,
        chunked_prefill_size=7,
        schedule_policy="lpm",
        schedule_conservativeness=0.5,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        num_threads=2,
        random_seed=8,
        quantization="fp8",
    )
    execution, scheduler = config.execution, config.scheduler
    assert config.model is model
    assert execution.model == replace(model, rounds_weights=True)
    assert (execution.load_format, execution.dtype) == ("dummy", "bfloat16")
    assert (execution.context_len, execution.page_size) == (100, 16)
    assert (execution.max_total_tokens, execution.max_running_requests) == (640, 5)
    assert execution.num_threads == 2
    assert scheduler.planner.max_running_requests == 5
    assert scheduler.planner.chunked_prefill_size == 7
    assert scheduler.planner.schedule_policy == "lpm"
    assert scheduler.planner.retract_interval == 3
    assert scheduler.max_queued_requests == 6
    assert (scheduler.schedule_conservativeness, scheduler.random_seed) == (0.5, 8)
    assert scheduler.strict_invariants
    assert not scheduler.enable_overlap
    assert not config.use_radix_cache


@pytest.mark.parametrize("wished", ["auto", 8192, -1])
def test_chunks_are_no_larger_than_the_memory_allows(model: ModelConfig, wished: int) -> None:
    """A prompt that was not to be split is: in one step it would never run."""
    config = resolved(model, chunked_prefill_size=wished)
    assert with_chunks_that_fit(config, config.execution.max_prompt_rows) == config
    planner = with_chunks_that_fit(config, 256).scheduler.planner
    assert (planner.chunked_prefill_size, planner.splits_prompts) == (256, True)


def on_a_gpu(capability: tuple[int, int] = (9, 0)) -> Platform:
    return replace(PLATFORM, device="cuda", device_name="A GPU", capability=capability)


def test_defaults_on_a_gpu(mtp_model: ModelConfig) -> None:
    config = resolved(mtp_model, platform=on_a_gpu())
    execution = config.execution
    assert (execution.device, execution.dtype) == ("cuda", mtp_model.dtype)
    assert execution.attention_backend == execution.ops == "triton"
    assert execution.kv_budget_bytes is None
    assert 0 < execution.static_memory_share < 1
    assert execution.max_graph_width == execution.max_decode_rows == 15
    assert execution.max_graph_rows > 0
    assert config.mtp is not None
    assert config.mtp.length_policy == "load_aware_masks"
    assert not config.mtp.trims_rows
    assert not config.mtp.bypasses_graphs
    fixed = resolved(mtp_model, platform=on_a_gpu(), environ=Environ(mtp_fixed_k=True))
    assert fixed.mtp is not None
    assert fixed.mtp.length_policy == "fixed"
    on_a_cpu = resolved(mtp_model)
    assert on_a_cpu.mtp is not None
    assert on_a_cpu.mtp.length_policy == "load_aware_masks"


@pytest.mark.parametrize(
    ("flags", "width", "has_prompts", "bypasses"),
    [
        ({"disable_cuda_graph": True}, 0, False, False),
        ({"disable_mtp_cuda_graph": True}, 1, False, True),
        ({"disable_cuda_graph": True, "disable_mtp_cuda_graph": True}, 0, False, False),
    ],
    ids=str,
)
def test_switches_of_graphs(
    mtp_model: ModelConfig, flags: dict[str, bool], width: int, has_prompts: bool, bypasses: bool
) -> None:
    config = resolved(mtp_model, platform=on_a_gpu(), **flags)
    assert config.execution.max_graph_width == width
    assert (config.execution.max_graph_rows > 0) is has_prompts
    assert config.mtp is not None
    assert config.mtp.bypasses_graphs is bypasses


def test_without_a_mask_token_the_switch_of_multi_token_graphs_changes_nothing(
    model: ModelConfig,
) -> None:
    config = resolved(model, platform=on_a_gpu(), disable_mtp_cuda_graph=True)
    assert config.execution == resolved(model, platform=on_a_gpu()).execution


def test_an_old_gpu_is_refused_unless_the_cpu_is_asked_for(model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"A GPU has compute capability 7\.5.*--device cpu"):
        resolved(model, platform=on_a_gpu((7, 5)))
    assert resolved(model, platform=on_a_gpu((7, 5)), device="cpu").execution.device == "cpu"


def test_memory_that_is_not_there_says_for_what_and_how_to_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 << 20, 80 << 20))
    text = "weights: 5 of 80 MiB are free. Take less. `nvidia-smi`"
    with pytest.raises(MemoryError, match=text), memory_for("the weights", "Take less."):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    with pytest.raises(ValueError, match="as it is"), memory_for("the weights", "Take less."):
        raise ValueError("as it is")


@pytest.mark.parametrize(("name", "dtype"), [("half", "float16"), ("float", "float32")])
def test_a_type_has_its_other_name_too(model: ModelConfig, name: str, dtype: str) -> None:
    assert resolved(model, dtype=name).execution.dtype == dtype


def test_what_the_log_and_clients_are_told_reaches_the_scheduler(model: ModelConfig) -> None:
    config = resolved(model, decode_log_interval=7, weight_version="step-7").scheduler
    assert (config.decode_log_interval, config.weight_version) == (7, "step-7")


@pytest.mark.parametrize("version", ["", "x" * 129, "a\nb"])
def test_a_label_that_updates_could_not_give_is_refused(model: ModelConfig, version: str) -> None:
    assert "--weight-version" in refusal(model, weight_version=version)


def test_defaults_on_a_cpu(model: ModelConfig) -> None:
    config = resolved(model)
    assert config.execution.device == "cpu"
    assert config.execution.dtype == "float32"
    assert config.execution.attention_backend == "torch_native"
    assert config.execution.context_len == model.context_len
    assert config.scheduler.eos_token_ids == frozenset(model.eos_token_ids) == {1}
    assert config.scheduler.enable_overlap
    assert config.use_radix_cache
    assert config.mtp is None


def test_a_row_holds_the_context_and_three_steps_beyond_in_whole_pages(
    model: ModelConfig, mtp_model: ModelConfig
) -> None:
    widths = {
        (source.path.name, page_size): resolved(
            source, context_length=200, page_size=page_size
        ).execution.row_width
        for source in (model, mtp_model)
        for page_size in (1, 4, 16, 64)
    }
    assert [widths["llama", size] for size in (1, 4, 16, 64)] == [203, 204, 208, 256]
    assert [widths["tiny-code", size] for size in (1, 4, 16, 64)] == [245, 248, 256, 256]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (4, 4), (500, MAX_CPU_THREADS)])
def test_threads_follow_the_cores_up_to_a_limit(
    model: ModelConfig, cores: int, threads: int
) -> None:
    platform = dataclasses.replace(PLATFORM, num_cores=cores)
    assert resolved(model, platform).execution.num_threads == threads


@pytest.mark.parametrize(
    ("flags", "available", "expected"),
    [
        ({}, 4 * GIB, int(4 * GIB * CPU_KV_SHARE)),
        ({}, 1000 * GIB, CPU_KV_MAX_BYTES),
        ({"mem_fraction_static": 0.5}, 1000 * GIB, 500 * GIB),
        ({"max_total_tokens": 9}, 1000 * GIB, 1000 * GIB),
        ({"mem_fraction_static": 0.5, "max_total_tokens": 9}, 4 * GIB, 2 * GIB),
    ],
    ids=str,
)
def test_memory_for_kv(
    model: ModelConfig, flags: dict[str, Any], available: int, expected: int
) -> None:
    platform = dataclasses.replace(PLATFORM, available_host_bytes=available)
    assert resolved(model, platform, **flags).execution.kv_budget_bytes == expected


def chunks(model: ModelConfig, platform: Platform = PLATFORM, **flags: Any) -> tuple[Any, ...]:
    """Gives the largest chunk and the bound on steps in ms."""
    config = resolved(model, platform, **flags)
    planner = config.scheduler.planner
    assert config.execution.max_prompt_rows == planner.chunked_prefill_size
    return planner.chunked_prefill_size, planner.max_step_ms


def test_chunks_follow_the_load_unless_a_number_is_named(model: ModelConfig) -> None:
    gpu = on_a_gpu()
    assert chunks(model) == chunks(model, chunked_prefill_size="auto") == (2048, 0.0)
    assert chunks(model, chunked_prefill_size=None) == (2048, 0.0)
    assert chunks(model, gpu) == (8192, DEFAULT_MAX_STEP_MS["cuda"])
    assert chunks(model, gpu, max_step_ms=0.0) == (8192, 0.0)
    assert chunks(model, gpu, max_step_ms=7.5) == (8192, 7.5)
    assert chunks(model, max_step_ms=7.5) == (2048, 7.5)
    for platform in (PLATFORM, gpu):
        assert chunks(model, platform, chunked_prefill_size=512) == (512, 0.0)
        assert chunks(model, platform, chunked_prefill_size=512, max_step_ms=0) == (512, 0.0)
        whole = chunks(model, platform, chunked_prefill_size=-1, context_length=100)
        assert whole == (100, 0.0)


@pytest.mark.parametrize("value", [-1.0])
def test_a_bound_on_steps_must_be_a_time(model: ModelConfig, value: float) -> None:
    message = refusal(model, max_step_ms=value)
    assert message == "--max-step-ms must be milliseconds above 0, or 0 for no bound."


@pytest.mark.parametrize("chunk", [512, -1])
def test_a_bound_needs_chunks_that_may_change(model: ModelConfig, chunk: int) -> None:
    message = refusal(model, chunked_prefill_size=chunk, max_step_ms=40.0)
    assert "--max-step-ms" in message
    assert "--chunked-prefill-size auto" in message


def is_bounded(budget: PromptBudget) -> bool:
    allowance = budget.open(StepShape(1, 1, 1, 1), True)
    allowance.take(0, 1)
    return allowance.price_ms is not None


@pytest.mark.parametrize(
    ("flags", "measures", "bounds"),
    [
        ({}, False, False),
        ({"max_step_ms": 50.0}, True, True),
        ({"chunked_prefill_size": 64}, False, False),
    ],
    ids=str,
)
def test_prices_are_measured_where_something_goes_by_them(
    model: ModelConfig,
    mtp_model: ModelConfig,
    flags: dict[str, Any],
    measures: bool,
    bounds: bool,
) -> None:
    flags = {"load_format": "dummy", "max_total_tokens": 600, **flags}
    config = resolved(model, **flags)
    prices = measure_prices(config, make_runners(config.execution).target)
    assert (prices is not None) is measures
    assert is_bounded(make_prompt_budget(config, prices)) is bounds
    for fixed_k in (False, True):
        config = resolved(mtp_model, environ=Environ(mtp_fixed_k=fixed_k), **flags)
        prices = measure_prices(config, make_runners(config.execution).target)
        assert (prices is not None) is (measures or not fixed_k)
        assert is_bounded(make_prompt_budget(config, prices)) is bounds


def test_chunks_of_minus_1_split_no_prompt(model: ModelConfig) -> None:
    planner = resolved(model, chunked_prefill_size=-1, context_length=100).scheduler.planner
    assert (planner.chunked_prefill_size, planner.splits_prompts) == (100, False)
    assert resolved(model).scheduler.planner.splits_prompts
    for value in (0, -2, "many", "512", ""):
        message = refusal(model, chunked_prefill_size=value)
        assert "--chunked-prefill-size must be at least 1, or -1 for no chunks, or auto" in message


@pytest.mark.parametrize("value", [0, -1, -(10**9)])
@pytest.mark.parametrize(
    "name",
    [
        "page_size",
        "max_running_requests",
        "max_queued_requests",
        "num_threads",
        "context_length",
        "max_connections",
        "max_header_bytes",
        "max_request_bytes",
        "max_batch_size_per_request",
        "max_tokenize_tokens",
        "max_weight_bytes",
        "max_n",
    ],
)
def test_a_size_below_1_is_refused_with_its_flag(model: ModelConfig, name: str, value: int) -> None:
    message = refusal(model, **{name: value})
    assert f"--{name.replace('_', '-')}" in message
    assert "1" in message


NUMBERS = {
    name: hint
    for name, hint in get_type_hints(ServerArgs).items()
    if {int, float} & {*get_args(hint), hint} and name in flags_of(ServerArgs)
}
ALGORITHM_OF = {  # what a flag of speculation needs beside itself
    name: {"speculative_algorithm": "NGRAM"} for name in NUMBERS if "speculative_ngram" in name
}
# What an absurd number must not do: make memory by the thousand for each request.
LARGE = {"row_width": 1 << 20, "max_running_requests": 1 << 16, "num_threads": 64}


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_works_or_is_refused_in_one_line_that_names_the_flag(
    model: ModelConfig, name: str
) -> None:
    for value in (0, -1, 10**9, 10**30):
        check_number(model, name, value)


def check_number(model: ModelConfig, name: str, value: int) -> None:
    flags: dict[str, Any] = {name: value, **ALGORITHM_OF.get(name, {})}
    try:
        config = resolved(model, **flags)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message
        assert f"--{name.replace('_', '-')}" in message
        return
    assert value < 10**30
    execution = dataclasses.asdict(config.execution)
    assert all(execution[size] <= most for size, most in LARGE.items())
    assert config.scheduler.stream_interval >= 1


@pytest.mark.parametrize(
    ("name", "least"),
    [("shutdown_timeout_s", 0.0), ("watchdog_timeout", 0.0), ("max_grammar_time_s", 0.001)],
)
def test_times_below_their_least_are_refused(model: ModelConfig, name: str, least: float) -> None:
    resolved(model, **{name: least})
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} .* must be .* from"):
        resolved(model, **{name: least - 0.001})


@pytest.mark.parametrize("value", [0, -1, 10**9])
def test_the_size_of_the_pool_works_or_names_its_flag(model: ModelConfig, value: int) -> None:
    platform = dataclasses.replace(PLATFORM, available_host_bytes=GIB)
    flags = {"load_format": "dummy", "max_total_tokens": value}
    with pytest.raises(ValueError, match="--max-total-tokens"):
        make_runners(resolved(model, platform, **flags).execution)


def test_more_threads_than_cores_can_bear_are_refused_with_their_number(model: ModelConfig) -> None:
    assert resolved(model, num_threads=16).execution.num_threads == 16
    for value in (17, 100_000):
        message = refusal(model, num_threads=value)
        assert f"--num-threads {value} must be 16 at most" in message
        assert "4 cores" in message


def test_tables_that_the_host_has_no_memory_for_are_refused(model: ModelConfig) -> None:
    flags = {"page_size": 65_536, "max_running_requests": 65_536}
    assert "--max-running-requests 65536 needs 32 GiB" in refusal(model, **flags)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_conservativeness_must_be_a_positive_number(model: ModelConfig, value: float) -> None:
    message = refusal(model, schedule_conservativeness=value)
    assert "--schedule-conservativeness" in message


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 2.0])
def test_a_memory_share_outside_0_and_1_is_refused(model: ModelConfig, value: float) -> None:
    assert "--mem-fraction-static" in refusal(model, mem_fraction_static=value)


def test_more_context_than_the_model_has_is_refused_with_its_limit(model: ModelConfig) -> None:
    assert resolved(model, context_length=512).execution.context_len == 512
    message = refusal(model, context_length=513)
    assert "--context-length 513" in message
    assert "512" in message


def test_a_gpu_that_is_not_there_is_refused_with_the_remedy(model: ModelConfig) -> None:
    message = refusal(model, device="cuda")
    assert "--device cuda" in message
    assert "--device cpu" in message


def test_a_gpu_is_used_where_there_is_one(model: ModelConfig) -> None:
    platform = dataclasses.replace(PLATFORM, device="cuda", device_name="a GPU")
    execution = resolved(model, platform).execution
    assert (execution.device, execution.dtype) == ("cuda", model.dtype)
    assert execution.kv_budget_bytes is None
    assert execution.static_memory_share == GPU_STATIC_SHARE
    asked = resolved(model, platform, device="cpu", mem_fraction_static=0.5).execution
    assert (asked.device, asked.dtype) == ("cpu", "float32")
    assert asked.kv_budget_bytes == 4 * GIB


def test_every_device_of_the_flag_has_its_defaults() -> None:
    device = next(flag for flag in dataclasses.fields(ServerArgs) if flag.name == "device")
    defaults_by_device = (
        DEFAULT_ATTENTION_BACKENDS,
        DEFAULT_OPERATIONS,
        MAX_CHUNKS,
        DEFAULT_MAX_STEP_MS,
    )
    for defaults in defaults_by_device:
        assert {"auto", *defaults} == set(device.metadata["choices"])
    assert set(DEFAULT_ATTENTION_BACKENDS.values()) <= set(ATTENTION_BACKENDS.names)
    assert set(DEFAULT_OPERATIONS.values()) <= set(OPERATIONS)


def with_mask(path: Path, mask: Any) -> ModelConfig:
    config = json.loads((path / "config.json").read_text())
    model = load_model_config(str(path))
    return dataclasses.replace(model, hf={**config, "mtp_mask_token_id": mask})


@pytest.mark.parametrize("mask", [0, 7, 319])
def test_the_mask_token_of_the_model_is_never_emitted(model_path: Path, mask: int) -> None:
    config = resolved(with_mask(model_path, mask))
    assert config.mtp is not None
    assert config.mtp.mask_token_id == mask
    assert config.execution.max_decode_rows == 15


def test_a_mask_token_that_is_the_only_end_of_text_id_is_refused(model_path: Path) -> None:
    model = with_mask(model_path, 1)
    message = refusal(model)
    assert "mtp_mask_token_id" in message
    assert "end-of-text" in message
    assert resolved(dataclasses.replace(model, eos_token_ids=(1, 2))).mtp is not None
    assert resolved(dataclasses.replace(model, eos_token_ids=())).mtp is not None


@pytest.mark.parametrize("mask", [-1, 320, "mask", 1.5, [3]], ids=str)
def test_a_mask_token_outside_the_vocabulary_is_refused(model_path: Path, mask: Any) -> None:
    message = refusal(with_mask(model_path, mask))
    assert "mtp_mask_token_id" in message
    assert "320" in message


class NeedyDrafter:
    """Its options are what it needs."""

    @staticmethod
    def needs(options: DrafterNeeds) -> DrafterNeeds:
        return options


NEEDS = DrafterNeeds(
    max_drafts=7, max_rows=8, extra_slots=5, has_trees=True, capture=HiddenCapture((1,))
)


@pytest.mark.parametrize(
    ("needs", "flags", "graphs"),
    [
        (NEEDS, {}, (8, MAX_GRAPH_ROWS)),
        (replace(NEEDS, bypasses_graphs=True), {}, (1, 0)),
        (NEEDS, {"disable_cuda_graph": True}, (0, 0)),
        (replace(NEEDS, bypasses_graphs=True), {"disable_cuda_graph": True}, (0, 0)),
    ],
)
def test_what_a_drafter_needs_decides_the_sizes_of_steps(
    model: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
    needs: DrafterNeeds,
    flags: dict[str, Any],
    graphs: tuple[int, int],
) -> None:
    place = f"{NeedyDrafter.__module__}:{NeedyDrafter.__name__}"
    monkeypatch.setitem(DRAFTERS.entries, "needy", place)
    plain = resolved(model, on_a_gpu(), page_size=16, **flags)
    assert plain.needs == NO_DRAFTS
    config = with_drafter(plain, DrafterConfig("needy", needs))
    changes: dict[str, Any] = {
        "row_width": row_width(model.context_len, 8 + 5, 16),
        "max_decode_rows": 8,
        "max_graph_width": graphs[0],
        "max_graph_rows": graphs[1],
        "capture": needs.capture,
        "captures_trees": True,
    }
    assert config.execution == replace(plain.execution, **changes)
    assert config.needs == needs
    assert config.mtp is None


def test_a_pool_without_a_page_is_refused_with_the_flags(model: ModelConfig) -> None:
    platform = dataclasses.replace(PLATFORM, available_host_bytes=100_000)
    flags = {"page_size": 64, "max_running_requests": 1}
    config = resolved(model, platform, load_format="dummy", **flags)
    with pytest.raises(ValueError, match="--max-total-tokens"):
        make_runners(config.execution)


@pytest.mark.parametrize("page_size", [1, 16, 100])
@pytest.mark.parametrize("num_running", [1, 3])
def test_with_enough_memory_all_running_requests_fit_at_full_context(
    model: ModelConfig, page_size: int, num_running: int
) -> None:
    """Rows beyond the context and half-used last pages included, and no page more."""
    config = resolved(
        model,
        load_format="dummy",
        context_length=50,
        page_size=page_size,
        max_running_requests=num_running,
    )
    memory = make_runners(config.execution).memory
    assert memory.num_pages * page_size == num_running * config.execution.row_width


@pytest.mark.parametrize("registry", [ATTENTION_BACKENDS, MODELS])
def test_everything_registered_can_be_imported(registry: Registry) -> None:
    assert all(isinstance(registry.load(name), type) for name in registry.names)


@pytest.mark.parametrize("operations", OPERATIONS.values(), ids=OPERATIONS)
def test_every_operation_of_a_set_can_be_imported(operations: Operations) -> None:
    values = dataclasses.astuple(operations)
    assert all(callable(load(value)) for value in values if value and isinstance(value, str))


def test_an_unknown_name_is_refused_with_kind_and_known_names() -> None:
    registry = Registry("colour", {"b": "x:y", "a": "x:y"})
    with pytest.raises(ValueError, match="Unknown colour 'c'; known: a, b"):
        registry.load("c")


def test_a_rank_that_a_launcher_sets_later_is_refused(model: ModelConfig) -> None:
    args = ServerArgs(model_path=str(model.path))
    args.dp_size = 2
    with pytest.raises(ConfigError, match="--dp-size 2 must be a whole number from 1 to 1"):
        resolve(args, PLATFORM, model, Environ())
