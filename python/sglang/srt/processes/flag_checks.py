"""Refuses flags that cannot be met before any process starts, by what flags, the model's files and
the machine say without torch. `runtime_config.resolve` goes by the same functions."""

from __future__ import annotations

import importlib.util
import os

from sglang.srt.environ import Environ
from sglang.srt.host import Host
from sglang.srt.mem_cache.kv_sizing import KVSizing, row_width
from sglang.srt.messages.requests import SchedulerInfo
from sglang.srt.model_config import DTYPE_ALIASES, ModelConfig
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.determinism import check_determinism
from sglang.srt.processes.flag_bounds import UNSPLIT, check_numbers
from sglang.srt.processes.hidden_flags import check_hidden_flags
from sglang.srt.processes.rank_flags import check_ranks
from sglang.srt.processes.round_flags import Asked
from sglang.srt.processes.speculation_flags import drafter_from_flags
from sglang.srt.registry import (
    ATTENTION_LIMITS,
    DEFAULT_ATTENTION_BACKENDS,
    HEADS,
    ROW_INDEPENDENT,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter_options import DrafterConfig

CPU_KV_SHARE = 0.1  # of the available host memory, without --mem-fraction-static
CPU_KV_MAX_BYTES = 1 << 30  # likewise
GPU_STATIC_SHARE = 0.88  # of the GPU's memory for weights and KV, without --mem-fraction-static
SECOND_GRAPHS_SHARE = 0.02  # of it for graphs in both orders of sums
MAX_CPU_THREADS = 16  # without --num-threads
MAX_THREADS_PER_CORE = 4
# The most prompt tokens of a step under AUTO: with more a GPU's products get no faster, and what a
# step needs of memory grows.
MAX_CHUNKS = {"cpu": 2048, "cuda": 8192}
CONTEXT_LIMIT = "the model's context length"
POOL_LIMIT = "the KV pool; raise --max-total-tokens or --mem-fraction-static"
MTP_IS_OFF = (
    "the server has another drafter (--speculative-algorithm), so multi-token prediction is off:"
    " leave mtp_enabled out, or start the server without that flag"
)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_flags(
    args: ServerArgs, model: ModelConfig, environ: Environ, host: Host
) -> SchedulerInfo:
    """Looks at all flags. What depends on a GPU, or on how much memory models take, is left to the
    scheduler, and so are warnings.

    Args:
        model: with the tokenizer's ids that end outputs.

    Returns:
        What the scheduler will say, but for the memory of a GPU and of models that draft.

    Raises:
        ConfigError: for what cannot be met; the text names the flag and the remedy.
    """
    check_numbers(args)
    devices = _devices(args, host)
    context_len = context_len_of(args, model)
    num_threads_of(args, host.num_cores)
    check_hidden_flags(args, model)
    check_ranks(args, model)
    problems = [attention_problem(args, model, device) for device in devices]
    if all(problems):
        raise ConfigError(str(problems[-1]))
    mask, drafter = drafter_of(args, model, environ, only_checks=True)
    check_determinism(args, model, devices, drafter)
    in_pool = context_len
    if devices == ["cpu"]:
        width = row_width(context_len, 1, args.page_size)
        check_tables(args.max_running_requests, width, host.available_bytes)
        in_pool = _cpu_pool_tokens(args, model, width, host.available_bytes)
        in_pool -= 1  # of a step, at least
    elif devices == ["cuda"] and drafter is not None and drafter.options.rounds.has_trees:
        rows = args.max_running_requests * (1 + drafter.options.rounds.max_drafts)
        _check_masks_of(args, context_len, rows)
    has_mtp = drafter is None and mask is not None
    return SchedulerInfo(
        vocab_size=model.vocab_size,
        context_len=context_len,
        max_total_num_tokens=in_pool,
        max_req_len=min(context_len, in_pool),
        max_req_len_reason=CONTEXT_LIMIT if context_len <= in_pool else POOL_LIMIT,
        max_running_requests=args.max_running_requests,
        eos_token_ids=list(model.eos_token_ids),
        mtp_max_k=args.mtp_max_k if has_mtp else 0,
        mtp_refusal=None if drafter is None else MTP_IS_OFF,
        drafters={} if drafter is None else dict(drafter.names),
        resolved={},
    )


def check_is_no_head(model: ModelConfig) -> None:
    """Looks whether the model can be served by itself.

    Raises:
        ModelPathError: if the model only drafts for another one.
    """
    if model.architecture in HEADS.names:
        raise model.refusal(f"{model.architecture} only drafts for another model; serve that one")


def _devices(args: ServerArgs, host: Host) -> list[str]:
    """Names the devices that there may be: one, or `cpu` and `cuda` where only torch can tell."""
    if args.device == "cuda" and "cuda" not in host.devices:
        raise no_gpu()
    if args.base_gpu_id and "cuda" not in host.devices:
        raise ConfigError(f"--base-gpu-id {args.base_gpu_id}: there is no GPU here; leave it out.")
    return sorted(host.devices) if args.device == "auto" else [args.device]


def no_gpu() -> ConfigError:
    return ConfigError(
        "--device cuda: torch finds no GPU here; install a torch with CUDA and check"
        " `nvidia-smi`, or use --device cpu."
    )


def context_len_of(args: ServerArgs, model: ModelConfig) -> int:
    """Gives the tokens of a request at most."""
    wished = args.context_length
    if wished is None:
        return model.context_len
    if not 1 <= wished <= model.context_len:
        raise ConfigError(
            f"--context-length {wished} must be between 1 and the model's {model.context_len}."
        )
    return wished


def num_threads_of(args: ServerArgs, num_cores: int) -> int:
    """Gives the number of torch threads of each rank on a CPU."""
    default = max(1, min(num_cores // args.tp_size, MAX_CPU_THREADS))
    most = MAX_THREADS_PER_CORE * num_cores
    if args.num_threads is not None and args.num_threads > most:
        raise ConfigError(
            f"--num-threads {args.num_threads} must be {most} at most, {MAX_THREADS_PER_CORE} for"
            f" each of the {num_cores} cores that this process may use; without it there are"
            f" {default}."
        )
    return args.num_threads or default


def dtype_of(args: ServerArgs, model: ModelConfig, device: str) -> str:
    """Gives the type of weights and KV, by its name in torch."""
    if args.dtype != "auto":
        return DTYPE_ALIASES.get(args.dtype, args.dtype)
    return "float32" if device == "cpu" else model.dtype


def attention_backend_of(args: ServerArgs, device: str) -> str:
    """Gives the attention backend's name."""
    if args.enable_deterministic_inference:
        return ROW_INDEPENDENT
    return args.attention_backend or DEFAULT_ATTENTION_BACKENDS[device]


def attention_problem(args: ServerArgs, model: ModelConfig, device: str) -> str | None:
    """Says why a device cannot have the attention backend, and the remedy; None if it may."""
    name, dtype = attention_backend_of(args, device), dtype_of(args, model, device)
    place = f"--attention-backend {name}"
    limits = ATTENTION_LIMITS.get(name)
    if limits is None or (name == "triton" and "TRITON_INTERPRET" in os.environ):
        return None
    if device not in limits.devices:
        default = DEFAULT_ATTENTION_BACKENDS[device]
        devices = " and ".join(sorted(limits.devices))
        return f"{place} runs on {devices}, not on {device}; leave it out, or use {default}."
    if dtype not in limits.dtypes:
        return f"{place} has no {dtype}; use --dtype {' or '.join(sorted(limits.dtypes))}."
    if limits.package and importlib.util.find_spec(limits.package) is None:
        default = DEFAULT_ATTENTION_BACKENDS[device]
        return f"{place}: {limits.package} is not installed; install it, or use {default}."
    return None


def drafter_of(
    args: ServerArgs, model: ModelConfig, environ: Environ, only_checks: bool = False
) -> tuple[int | None, DrafterConfig | None]:
    """Gives the mask token of multi-token prediction, and the drafter of --speculative-algorithm;
    None without them. The mask token is never emitted in either case.

    Args:
        only_checks: see `Asked`.
    """
    mask = _mask_token(args, model)
    suppressed = () if mask is None else (mask,)
    asked = Asked(
        args=args,
        model=model,
        suppressed_token_ids=suppressed,
        environ=environ,
        only_checks=only_checks,
    )
    return mask, drafter_from_flags(asked)


def _mask_token(args: ServerArgs, model: ModelConfig) -> int | None:
    mask, source = args.mtp_mask_token_id, "--mtp-mask-token-id"
    if mask is None:
        mask = model.hf.get("mtp_mask_token_id")
        source = f"mtp_mask_token_id in {model.path / 'config.json'}"
    if mask is None:
        return None
    if type(mask) is not int or not 0 <= mask < model.vocab_size:
        raise ConfigError(
            f"{source}: {mask!r} must be a token id below vocab_size {model.vocab_size}."
        )
    if set(model.eos_token_ids) == {mask}:
        raise ConfigError(
            f"{source}: {mask} is the model's only end-of-text id too, and a mask token is never"
            " drawn, so no output would end; name another mask token."
        )
    return mask


def check_tables(max_running_requests: int, row_width: int, available_bytes: int) -> None:
    """Refuses a page table and a token table that the host has no memory for.

    Args:
        row_width: tokens of a request in each.
    """
    num_bytes = 2 * 4 * max_running_requests * row_width
    if num_bytes > available_bytes:
        raise ConfigError(
            f"--max-running-requests {max_running_requests} needs {num_bytes >> 30} GiB"
            f" for tables of {row_width} tokens per request, and this host has"
            f" {available_bytes >> 30} GiB; lower it or --context-length."
        )


def cpu_kv_budget(args: ServerArgs, available_bytes: int) -> int:
    """Gives the bytes for the KV pool of each rank on a CPU."""
    num_bytes = min(int(available_bytes * CPU_KV_SHARE), CPU_KV_MAX_BYTES)
    if args.mem_fraction_static is not None:
        num_bytes = int(available_bytes * args.mem_fraction_static)
    elif args.max_total_tokens is not None:
        num_bytes = available_bytes
    return num_bytes // args.tp_size


def _cpu_pool_tokens(args: ServerArgs, model: ModelConfig, width: int, available_bytes: int) -> int:
    """Counts the tokens of the KV pool at most, a draft model's left out."""
    values = model.num_layers * model.num_kv_heads // args.tp_size * model.head_dim
    sizing = KVSizing(
        available_bytes=cpu_kv_budget(args, available_bytes),
        bytes_per_token=2 * values * DTYPE_BYTES[dtype_of(args, model, "cpu")],
        page_size=args.page_size,
        wished_tokens=args.max_total_tokens,
        max_useful_tokens=args.max_running_requests * width,
    )
    try:
        return sizing.num_pages() * args.page_size
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_masks_of(args: ServerArgs, context_len: int, decode_rows: int) -> None:
    backend = attention_backend_of(args, "cuda")
    chunk = args.chunked_prefill_size
    if not isinstance(chunk, int):
        chunk = MAX_CHUNKS["cuda"]
    prompt_rows = context_len if chunk == UNSPLIT else chunk
    if limits := ATTENTION_LIMITS.get(backend):
        check_masks(backend, limits.max_mask_entries, prompt_rows + decode_rows, context_len)


def check_masks(backend: str, most: int | None, num_rows: int, context_len: int) -> None:
    """Refuses trees whose masks are too large for an attention backend: prompts that share a step
    of trees are in its masks too.

    Args:
        most: entries of its masks; None for any number.
    """
    if most is not None and num_rows * context_len > most:
        raise ConfigError(
            f"--attention-backend {backend}: masks of trees of {num_rows} rows over"
            f" {context_len} tokens have more than {most} entries; lower"
            " --chunked-prefill-size, --max-running-requests or --context-length, or use"
            " --attention-backend triton."
        )
