"""Builds the answers of `/model_info`, `/server_info` and `Engine.get_server_info()`."""

from __future__ import annotations

from typing import Any

from sglang import __version__
from sglang.srt.entrypoints.openai.sampling_defaults import describe_sampling
from sglang.srt.flag_values import public_fields
from sglang.srt.frontend.errors import ServiceError
from sglang.srt.messages.requests import SchedulerInfo
from sglang.srt.model_config import ModelConfig
from sglang.srt.processes.speculation_flags import adaptive_strategy
from sglang.srt.registry import TRANSFORMERS
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import Tokenizer

# What trainers and routers read of SGLang's flags, where there is no such choice here.
AS_BUILT = {
    "gpu_id_step": 1,
    "dist_init_addr": None,
    "nccl_port": None,
    "disaggregation_mode": "null",
    "enable_memory_saver": True,  # memory can always be released,
    "enable_weights_cpu_backup": True,  # and weights come back with their values
    "enable_metrics": True,
    "enable_dp_attention": False,
    "enable_lora": False,
    "is_embedding": False,
    "trust_remote_code": False,
    "kv_cache_dtype": "auto",
}


def describe_model(
    server_args: ServerArgs, model_config: ModelConfig, weight_version: str
) -> dict[str, Any]:
    """The answer of `/model_info`."""
    return {
        "model_path": model_config.folder,
        "served_model_name": server_args.served_model_name or server_args.model_path,
        "tokenizer_path": server_args.tokenizer_path or model_config.folder,
        "is_generation": True,
        "preferred_sampling_params": server_args.preferred_sampling_params,
        "weight_version": weight_version,
        "load_format": server_args.load_format,
        "reasoning_parser": server_args.reasoning_parser,
        "tool_call_parser": server_args.tool_call_parser,
        "has_image_understanding": False,
        "model_type": model_config.model_type,
        "architectures": [model_config.architecture],
        "vocab_size": model_config.vocab_size,
    }


def describe_server(
    server_args: ServerArgs, scheduler: SchedulerInfo | None, internal_state: dict[str, Any]
) -> dict[str, Any]:
    """The answer of `/server_info` and `Engine.get_server_info()`: flags, then resolved values."""
    if scheduler is None:
        raise ServiceError("The server is starting.", 503)
    folder = scheduler.resolved["path"]
    return {
        **public_fields(server_args),
        "model_path": folder,
        "served_model_name": server_args.served_model_name or server_args.model_path,
        "tokenizer_path": server_args.tokenizer_path or folder,
        **AS_BUILT,
        "chunked_prefill_size": scheduler.resolved["schedule"]["chunked_prefill_size"],
        **_drafts(server_args, scheduler.resolved),
        "vocab_size": scheduler.vocab_size,
        "context_length": scheduler.context_len,
        "max_total_num_tokens": scheduler.max_total_num_tokens,
        "max_req_len": scheduler.max_req_len,
        "max_running_requests": scheduler.max_running_requests,
        "resolved": scheduler.resolved,
        "status": "ready" if internal_state.get("stopped_process") is None else "stopped",
        "version": __version__,
        "internal_states": [internal_state],
    }


def describe_tokenizer(
    tokenizer_path: str,
    tokenizer: Tokenizer,
    scheduler: SchedulerInfo | None,
    chat_template: str | None,
) -> dict[str, Any]:
    """The answer of `/tokenizer_info`: ids and texts of the tokens that begin and end a text, and
    the template of chats without tools."""
    eos_ids = [] if scheduler is None else scheduler.eos_token_ids
    bos_id = tokenizer.bos_token_id

    def text(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.decode([token_id], False) or None

    return {
        "tokenizer_path": tokenizer_path,
        "vocab_size": None if scheduler is None else scheduler.vocab_size,
        "model_max_length": None if scheduler is None else scheduler.context_len,
        "bos_token_id": bos_id,
        "bos_token": text(bos_id),
        "eos_token_id": eos_ids[0] if eos_ids else None,
        "eos_token_ids": eos_ids,
        "eos_token": text(eos_ids[0]) if eos_ids else None,
        "pad_token": None,
        "adds_bos": bos_id is not None,
        "chat_template": chat_template,
    }


def _drafts(args: ServerArgs, resolved: dict[str, Any]) -> dict[str, Any]:
    """Gives what became of the flags for drafts; nothing without them."""
    num_steps = resolved["num_draft_steps"]
    if num_steps == 0:
        return {}
    topk, num_tokens = resolved["draft_topk"], resolved["num_draft_tokens"]
    strategy = _strategy(args, resolved) or args.speculative_adaptive_strategy
    return {
        "speculative_adaptive_strategy": strategy,
        "speculative_num_steps": num_steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": num_tokens if topk > 1 else num_steps + 1,
    }


def describe_start(
    server_args: ServerArgs, scheduler: SchedulerInfo, sampling_defaults: dict[str, Any]
) -> str:
    """The start-up summary: what was resolved, not what was wished."""
    found = scheduler.resolved
    pool_mib = found["max_total_num_tokens"] * found["kv_bytes_per_token"] >> 20
    rows = (
        ("model", _describe_model(found)),
        *_describe_weights(found),
        *(("draft model", _describe_model(model)) for model in found["draft_models"]),
        *(("", each["remark"]) for each in found["draft_models"] if each["remark"]),
        *(row for model in found["draft_models"] for row in _describe_weights(model)),
        *_describe_drafters(scheduler.drafters),
        *_describe_drafts(server_args, found),
        ("runs on", f"{found['device']}, {found['dtype']}, {found['num_threads']} threads"),
        ("attention", found["attention_backend"]),
        (
            "KV pool",
            f"{found['max_total_num_tokens']} tokens, {pool_mib} MiB,"
            f" pages of {found['page_size']}: {found['kv_size_reason']}",
        ),
        ("context", f"{found['context_len']} tokens; a request up to {scheduler.max_req_len}"),
        (
            "requests",
            f"{scheduler.max_running_requests} running,"
            f" {found['max_queued_requests'] or 'any number'} waiting",
        ),
        ("prompts", _describe_chunks(found["schedule"])),
        ("sampling", describe_sampling(server_args.sampling_defaults, sampling_defaults)),
        ("overlap", "on" if found["enable_overlap"] else "off"),
        ("radix cache", "on" if found["use_radix_cache"] else "off"),
    )
    return "Start-up summary\n" + "\n".join(f"    {name:<12} {value}" for name, value in rows)


def _strategy(args: ServerArgs, resolved: dict[str, Any]) -> str | None:
    """Names the strategy of `--speculative-adaptive`; None where all steps draft as many."""
    return adaptive_strategy(args) if len(resolved["draft_tiers"]) > 1 else None


def _describe_drafters(drafters: dict[str, str]) -> list[tuple[str, str]]:
    """Says how a request names the drafters (`speculative.drafter`); nothing without one."""
    names = dict.fromkeys(drafters.values())
    pronoun = "it" if len(names) == 1 else "them"
    return [("drafters", f"{' or '.join(names)}, as requests name {pronoun}")] if names else []


def _describe_drafts(args: ServerArgs, found: dict[str, Any]) -> list[tuple[str, str]]:
    """Says how many drafts a request gets, and what chooses; nothing without a head."""
    tiers = found["draft_tiers"]
    if found["draft_topk"] > 1:
        return [("drafts", f"trees of {found['num_draft_tokens'] - 1}, up to {tiers[-1]} deep")]
    if len(tiers) <= 1:
        return [("drafts", f"{steps} in each step") for steps in tiers]
    numbers = f"{', '.join(map(str, tiers[:-1]))} or {tiers[-1]}"
    strategy = _strategy(args, found)
    by = "" if strategy is None else f", by strategy {strategy}"
    return [("drafts", f"{numbers} in a step{by}")]


def _describe_model(model: dict[str, Any]) -> str:
    parameters = f"{model['num_parameters'] / 1e6:,.1f} M parameters"
    code = ", by transformers' code" if model["model_impl"] == TRANSFORMERS else ""
    return f"{model['path']} ({model['architecture']}{code}, {parameters})"


def _describe_weights(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Says how the weights of a model are held; nothing where all have the model's type."""
    return [("weights", model["weights"])] if model["weights"] else []


def _describe_chunks(schedule: dict[str, Any]) -> str:
    if not schedule["splits_prompts"]:
        return "whole, each in one step"
    tokens = f"up to {schedule['chunked_prefill_size']} tokens in a step"
    if schedule["max_step_ms"] == 0:
        return tokens
    decodes = "beside a stream" if schedule["bounds_streams_alone"] else "where requests decode"
    return f"{tokens}; {decodes}, as many as fit into {schedule['max_step_ms']:g} ms"
