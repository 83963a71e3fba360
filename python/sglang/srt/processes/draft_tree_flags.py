"""The flags of trees of drafts: `--speculative-eagle-topk` above 1 and what goes with it."""

from __future__ import annotations

import logging

from sglang.srt.model_executor.draft_shapes import MAX_ROWS, TreeShape
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# SGLang's own for Llama.
DEFAULT_NUM_STEPS, DEFAULT_NUM_TOKENS = 5, 8
TOPK, STEPS = "--speculative-eagle-topk", "--speculative-num-steps"
TOKENS = "--speculative-num-draft-tokens"
CHAINS = f"or use {TOPK} 1, which drafts chains"


def tree_from_flags(args: ServerArgs) -> TreeShape | None:
    """The trees that are drafted; None where drafts are chains.

    Raises:
        ConfigError: for trees that cannot be had; the text names the flag and the remedy.
    """
    topk, depth = args.speculative_eagle_topk, args.speculative_num_steps
    if topk in (None, 1):
        return None
    if topk < 1:
        raise ConfigError(f"{TOPK} {topk} must be at least 1.")
    _check_others(args, topk)
    depth = DEFAULT_NUM_STEPS if depth is None else depth
    if depth < 1:
        raise ConfigError(f"{STEPS} {depth} must be at least 1.")
    if topk > MAX_ROWS or topk * (depth - 1) > MAX_ROWS:
        most = 1 + MAX_ROWS // topk
        lower = f"lower {STEPS} {depth} to {most}" if most > 1 else f"lower it to {MAX_ROWS}"
        raise ConfigError(
            f"{TOPK} {topk}: a request has up to {MAX_ROWS} rows of draft steps, {topk} in"
            f" each step but the first; {lower}, {CHAINS}."
        )
    most = min(MAX_ROWS, 1 + topk + (depth - 1) * topk**2)
    num_tokens = args.speculative_num_draft_tokens
    if num_tokens is None:
        num_tokens = min(DEFAULT_NUM_TOKENS, most)
    if not 2 <= num_tokens <= most:
        raise ConfigError(
            f"{TOKENS} {num_tokens} must be 2 to {most}, the certain token counted, with {TOPK}"
            f" {topk} and {STEPS} {depth}."
        )
    return TreeShape(topk, depth, num_tokens - 1)


def _check_others(args: ServerArgs, topk: int) -> None:
    """Refuses what is of chains alone, or says that nothing becomes of it."""
    if args.speculative_load_aware == "on":
        raise ConfigError(
            f"--speculative-load-aware on chooses how long chains are, and {TOPK} {topk} drafts"
            f" trees, which are of one size; leave it out, {CHAINS}."
        )
    if args.speculative_adaptive:
        logger.warning(
            "--speculative-adaptive changes the number of steps of chains alone: with %s %d every"
            " step drafts trees of the same size.",
            TOPK,
            topk,
        )
