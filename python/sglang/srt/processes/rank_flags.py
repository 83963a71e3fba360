"""Refuses what several ranks cannot hold or do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sglang.srt.model_config import ModelConfig
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.registry import TRANSFORMERS
from sglang.srt.server_args import ServerArgs

WITH_RANKS = (None, "NGRAM")  # values of --speculative-algorithm


def check_ranks(args: ServerArgs, model: ModelConfig, devices: Sequence[str]) -> None:
    """Looks whether --tp-size ranks can hold the model, and do what other flags ask for.

    Args:
        devices: that there may be.

    Raises:
        ConfigError: with the numbers, or the name of what is not built yet.
    """
    if args.tp_size == 1:
        return
    if model.impl == TRANSFORMERS:
        raise ConfigError(
            f"--tp-size {args.tp_size} with transformers' modelling code, which computes"
            f" {model.architecture}, is not built yet; leave --tp-size out."
        )
    sizes = {
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": model.intermediate_size,
    }
    wrong = [f"{name} {size}" for name, size in sizes.items() if size % args.tp_size]
    if wrong:
        raise ConfigError(
            f"--tp-size {args.tp_size} does not divide the model's {' and '.join(wrong)}; each rank"
            f" gets the same number. Ranks may be {_ranks_of(sizes.values())}."
        )
    algorithm = args.speculative_algorithm
    if algorithm not in WITH_RANKS:
        raise ConfigError(
            f"--tp-size {args.tp_size} with --speculative-algorithm {algorithm} is not built yet;"
            " start without one of them, or use NGRAM."
        )
    if "cpu" not in devices:
        raise ConfigError(
            f"--tp-size {args.tp_size} on GPUs is not built yet; start one server per GPU behind a"
            " router, or use --device cpu."
        )


def _ranks_of(sizes: Iterable[int]) -> str:
    """Names the numbers that divide all sizes."""
    common = math.gcd(*sizes)
    return ", ".join(str(each) for each in range(1, common + 1) if common % each == 0)
