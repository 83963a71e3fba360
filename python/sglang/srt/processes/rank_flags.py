"""Refuses what several ranks cannot hold or do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sglang.srt.model_config import ModelConfig
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.server_args import ServerArgs


def check_ranks(args: ServerArgs, model: ModelConfig) -> None:
    """Looks whether --tp-size ranks can hold the model, and do what other flags ask for.

    Raises:
        ConfigError: with the numbers, or the name of what is not built yet.
    """
    if args.tp_size == 1:
        return
    sizes = {
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": model.intermediate_size,
    }
    if size := model.integer("moe_intermediate_size", None, minimum=1):
        sizes["moe_intermediate_size"] = size
    wrong = [f"{name} {size}" for name, size in sizes.items() if size % args.tp_size]
    if wrong:
        raise ConfigError(
            f"--tp-size {args.tp_size} does not divide the model's {' and '.join(wrong)}; each rank"
            f" gets the same number. Ranks may be {_ranks_of(sizes.values())}."
        )


def check_devices(args: ServerArgs, names: Sequence[str]) -> None:
    """Looks whether ranks have devices that compute alike, so that all draw the same tokens.

    Args:
        names: of the ranks' GPUs, `cpu` where a rank finds none.

    Raises:
        ConfigError: on all ranks, for the same reason.
    """
    if args.device == "cpu" or len({*names}) == 1:
        return
    lacking = [str(rank) for rank, name in enumerate(names) if name == "cpu"]
    if lacking:
        raise ConfigError(
            f"--tp-size {args.tp_size} needs a GPU for each rank, and torch finds none for rank"
            f" {' and '.join(lacking)}: see `nvidia-smi`, --base-gpu-id and CUDA_VISIBLE_DEVICES,"
            " or use --device cpu."
        )
    raise ConfigError(
        f"--tp-size {args.tp_size} needs equal GPUs, and the ranks have {', '.join(names)}: choose"
        " others by CUDA_VISIBLE_DEVICES."
    )


def _ranks_of(sizes: Iterable[int]) -> str:
    """Names the numbers that divide all sizes."""
    common = math.gcd(*sizes)
    return ", ".join(str(each) for each in range(1, common + 1) if common % each == 0)
