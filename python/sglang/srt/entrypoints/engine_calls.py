"""The Engine's control calls: arguments checked by the rules of the HTTP bodies, then sent.

Checks run in the caller's thread when a call is made; the work that is returned runs on the loop
of the Engine. Each raises `RequestError`, a ValueError, that names the argument.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from sglang.srt.control.bodies import make_body
from sglang.srt.control.client import ControlClient
from sglang.srt.control.validation import (
    AbortBody,
    check_abort,
    check_flush_timeout,
    check_group,
    check_label,
    check_pause,
    check_update_options,
    disk_source,
    distributed_source,
)
from sglang.srt.control.validation import check_tags as check_memory_tags
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages.control import (
    DestroyWeightsUpdateGroupReqInput,
    FlushCacheReqOutput,
    InitWeightsUpdateGroupReqInput,
    MemoryOccupationReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightVersionReqInput,
    WeightUpdateOptions,
)

DEFAULT_MODE = "retract"  # the HTTP route's is abort
Work = Coroutine[Any, Any, dict[str, Any]]


def pause(control: ControlClient, fields: dict[str, Any]) -> Work:
    """`pause_generation` with the fields of its body."""
    mode = DEFAULT_MODE if fields.get("mode") is None else fields["mode"]
    body = make_body(PauseGenerationReqInput, {**fields, "mode": mode})
    return control.pause(check_pause(body), body.lease_s, body.lease_end, body.drain_timeout_s)


def abort(
    manager: TokenizerManager, fields: dict[str, Any], max_label_chars: int
) -> Coroutine[Any, Any, int]:
    """`abort_request` with the fields of its body."""
    body = make_body(AbortBody, fields)
    check_abort(body, max_label_chars)

    async def work() -> int:
        return manager.abort_request(body.rid, body.abort_all, prefix=body.prefix)

    return work()


def flush(control: ControlClient, timeout_s: float) -> Coroutine[Any, Any, FlushCacheReqOutput]:
    """`flush_cache`."""
    return control.flush_cache(check_flush_timeout(timeout_s, "timeout_s"))


def update_options(**fields: Any) -> WeightUpdateOptions:
    """The options of a weight update."""
    options = make_body(WeightUpdateOptions, fields)
    check_update_options(options)
    return options


def update_from_disk(control: ControlClient, fields: dict[str, Any]) -> Work:
    """`update_weights_from_disk` with the fields of its body."""
    body = make_body(UpdateWeightFromDiskReqInput, fields)
    return control.update_weights(disk_source(body), body)


def update_from_group(control: ControlClient, fields: dict[str, Any]) -> Work:
    """`update_weights_from_distributed` with the fields of its body."""
    body = make_body(UpdateWeightsFromDistributedReqInput, fields)
    return control.update_weights(distributed_source(body), body)


def join_group(control: ControlClient, fields: dict[str, Any]) -> Work:
    """`init_weights_update_group` with the fields of its body."""
    body = make_body(InitWeightsUpdateGroupReqInput, fields)
    check_group(body)
    return control.init_weight_group(body)


def leave_group(control: ControlClient, group_name: str) -> Work:
    """`destroy_weights_update_group`."""
    body = make_body(DestroyWeightsUpdateGroupReqInput, {"group_name": group_name})
    check_label("group_name", body.group_name)
    return control.destroy_weight_group(body.group_name)


def relabel(control: ControlClient, new_version: str, abort_all_requests: bool) -> Work:
    """`update_weight_version`."""
    fields = {"new_version": new_version, "abort_all_requests": abort_all_requests}
    body = make_body(UpdateWeightVersionReqInput, fields)
    check_label("new_version", body.new_version)
    return control.update_weight_version(body.new_version, body.abort_all_requests)


def check_tags(tags: list[str] | None) -> None:
    """Checks the tags of a release or resume of memory."""
    check_memory_tags(make_body(MemoryOccupationReqInput, {"tags": tags}).tags)
