"""Refuses what --enable-deterministic-inference and --enable-deterministic-requests do not
cover."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.flag_values import as_flag
from sglang.srt.model_config import ModelConfig
from sglang.srt.processes.config_error import Refusal
from sglang.srt.registry import TRANSFORMERS
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter_options import AcceptThresholds, DrafterConfig
from sglang.srt.weight_format import said_of_weights

ALL, ASKING = "enable_deterministic_inference", "enable_deterministic_requests"
THRESHOLDS = "accept thresholds below 1, by which drafts change tokens"
NO_THRESHOLDS = (
    "leave --speculative-accept-threshold-acc and --speculative-accept-threshold-single out"
)
NO_REQUESTS = f"start the server with {as_flag(ASKING)}, or with {as_flag(ALL)} for all requests"


def check_determinism(
    args: ServerArgs,
    model: ModelConfig,
    devices: Sequence[str],
    drafter: DrafterConfig | None = None,
) -> None:
    """Looks whether all results of the target model can be independent of what shares their step.
    What only drafts may compute in any way.

    Args:
        devices: those that there may be.

    Raises:
        ConfigError: naming what is not covered.
    """
    if not (args.enable_deterministic_inference or args.enable_deterministic_requests):
        return
    flag = as_flag(ALL if args.enable_deterministic_inference else ASKING)
    if "cuda" not in devices:
        reason = "needs a GPU: products of torch on a CPU may round by their number of rows"
        raise Refusal(flag, reason, "leave it out: --dtype float32 makes other tokens unlikely")
    if args.attention_backend not in (None, "triton"):
        backend = as_flag("attention_backend", args.attention_backend)
        raise Refusal(backend, f"adds up in an order that {flag} excludes", "leave it out")
    if args.tp_size > 1:
        reason = f"adds up over ranks in an order of its own for each size, which {flag} excludes"
        raise Refusal(as_flag("tp_size", args.tp_size), reason, f"use 1, or leave {flag} out")
    if model.impl == TRANSFORMERS:
        reason = f"does not cover {model.architecture}, which transformers' code computes"
        raise Refusal(flag, reason, "leave it out")
    if args.quantization is not None or said_of_weights(model.hf) is not None:
        raise Refusal(flag, "does not cover weights in fp8", "use weights of 16 bits")
    if drafter is not None and drafter.options.rounds.has_trees:
        remedy = (
            "draft chains (--speculative-eagle-topk 1, with NGRAM"
            " --speculative-ngram-max-bfs-breadth 1)"
        )
        raise Refusal(flag, "does not cover trees of drafts", remedy)
    if has_both_orders(args) and drafter is not None and not drafter.thresholds.is_exact:
        raise Refusal(flag, f"does not cover {THRESHOLDS}", NO_THRESHOLDS)


def has_both_orders(args: ServerArgs) -> bool:
    """Tells whether steps with deterministic requests alone add up in fixed orders."""
    return args.enable_deterministic_requests and not args.enable_deterministic_inference


def refusal_of_requests(args: ServerArgs) -> str | None:
    """Tells why no request may ask to be deterministic, and the remedy; None: requests may."""
    if not (args.enable_deterministic_requests or args.enable_deterministic_inference):
        return NO_REQUESTS
    single, acc = args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc
    if AcceptThresholds(single, acc).is_exact:
        return None
    return f"the server has {THRESHOLDS}; {NO_THRESHOLDS}"
