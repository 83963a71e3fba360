"""Reads the flags that say how many tokens are drafted and verified, in chains or in trees.

Numbers are within their bounds here (`check_numbers`). What cannot be had is a `Refusal`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from sglang.srt.environ import Environ
from sglang.srt.flag_values import as_flag
from sglang.srt.lookahead.adaptive_config import DEFAULT_PRESET, read_adaptive_config
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.model_config import ModelConfig
from sglang.srt.processes.config_error import Refusal
from sglang.srt.server_args import ServerArgs
from sglang.srt.step.draft_shapes import MAX_ROWS, TreeShape
from sglang.srt.step.step_sizes import MAX_REQUESTS

logger = logging.getLogger(__name__)

STEPS, TOKENS = "speculative_num_steps", "speculative_num_draft_tokens"
TOPK, LOAD_AWARE = "speculative_eagle_topk", "speculative_load_aware"
ADAPTIVE, CONFIG = "speculative_adaptive", "speculative_adaptive_config"
TILE_SPEC = "tile_spec"
CHAIN_STEPS, TREE_STEPS, TREE_TOKENS = 3, 5, 8  # those of trees are SGLang's for Llama
EMA, THROUGHPUT = "ema", "throughput"
THROUGHPUT_STEPS = 7  # drafts at most, where no configuration says which
DEFAULT_TILE_SPEC_CACHE = "tile_spec/cache"
OR_CHAINS = f"or use {as_flag(TOPK, 1)}, which drafts chains"
CHANGE = "change it or leave it out"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Holds the inputs from which a drafter is made.

    Attributes:
        model: the target.
        suppressed_token_ids: ids that the target never emits.
        only_checks: nothing will be served by this drafter: give no warnings, and look only whether
            the corpus of NGRAM begins as one.
    """

    args: ServerArgs
    model: ModelConfig
    suppressed_token_ids: tuple[int, ...]
    environ: Environ
    only_checks: bool = False

    @property
    def is_fixed(self) -> bool:
        """Tells whether every step verifies as many drafts, as where acceptance is simulated."""
        simulates = self.environ.simulated_accept_len is not None
        return simulates or self.args.speculative_load_aware == "off"

    def warn(self, text: str, *values: object) -> None:
        """Logs a warning; `values` fill the places of `text`."""
        if not self.only_checks:
            logger.warning(text, *values)


def fixed_rounds(asked: Asked, num_steps: int, num_free: int) -> RoundOptions:
    """Makes options with a fixed number of drafts; `RoundOptions` has the arguments."""
    args, cache = asked.args, None
    if args.tile_spec:
        cache = Path(args.tile_spec_cache_dir or DEFAULT_TILE_SPEC_CACHE)
        if args.max_running_requests > MAX_REQUESTS:
            problem = f"divides rows among {MAX_REQUESTS} requests at most"
            remedy = f"lower {as_flag('max_running_requests', args.max_running_requests)}"
            raise Refusal(as_flag(TILE_SPEC), problem, remedy)
    return RoundOptions(
        num_steps=num_steps,
        num_free=num_free,
        tile_spec_cache=cache,
        tile_spec_drafts=asked.environ.tile_spec_drafts,
    )


def model_rounds(asked: Asked, num_free: int, block_size: int | None = None) -> RoundOptions:
    """Makes the options of a head or a model that drafts; `RoundOptions` has the arguments."""
    args, tree = asked.args, _tree(asked.args)
    if tree is not None:
        return replace(fixed_rounds(asked, tree.depth, num_free), tree=tree)
    most = CHAIN_STEPS if block_size is None else block_size - 1
    num_steps = num_drafts(asked, STEPS, most)
    if block_size is not None:
        _check_block(args, num_steps, block_size)
    rounds = replace(fixed_rounds(asked, num_steps, num_free), block_size=block_size)
    if not args.speculative_adaptive:
        return rounds if asked.is_fixed else replace(rounds, tier_policy="load_aware")
    if args.speculative_load_aware is not None:
        problem = f"decides how many tokens are drafted, as {as_flag(LOAD_AWARE)} does"
        raise Refusal(as_flag(ADAPTIVE), problem, "leave out one of them")
    return _adaptive(asked, rounds)


def _check_block(args: ServerArgs, num_steps: int, block_size: int) -> None:
    if num_steps >= block_size:
        [name, *_] = [name for name in (STEPS, TOKENS) if vars(args)[name] is not None]
        problem = f"drafts {num_steps} tokens, but the head's blocks have {block_size - 1}"
        raise Refusal(as_flag(name, vars(args)[name]), problem, "lower it or leave it out")


def num_drafts(asked: Asked, leading: str, default: int) -> int:
    """Counts the drafts of a chain.

    Args:
        leading: STEPS or TOKENS: the flag that counts where both are given and disagree.
        default: drafts where neither is given.
    """
    values = vars(asked.args)
    other = STEPS if leading == TOKENS else TOKENS
    counts = [values[name] - (name == TOKENS) for name in (leading, other) if values[name]]
    if len({*counts}) > 1:
        asked.warn(
            "%s has no effect beside %s: a chain of %d drafts has %d tokens, the certain one"
            " counted.",
            as_flag(other, values[other]),
            as_flag(leading, values[leading]),
            counts[0],
            counts[0] + 1,
        )
    return counts[0] if counts else default


def strategy_of(args: ServerArgs) -> str:
    """Names the strategy of `--speculative-adaptive`: without a wish `ema` if there is a
    configuration, since that is written for this rule."""
    wish = args.speculative_adaptive_strategy
    if wish not in (None, "auto"):
        return wish
    return THROUGHPUT if args.speculative_adaptive_config is None else EMA


def _adaptive(asked: Asked, rounds: RoundOptions) -> RoundOptions:
    """Gives chains of fixed length the tiers that the flags `--speculative-adaptive...` ask for."""
    args = asked.args
    strategy, initial = strategy_of(args), rounds.num_steps
    if args.speculative_adaptive_config is None and strategy == THROUGHPUT:
        most, config = max(initial, THROUGHPUT_STEPS), None
        if rounds.block_size is not None:
            most = min(most, rounds.block_size - 1)
    else:
        config = read_adaptive_config(args.speculative_adaptive_config)
        place = as_flag(CONFIG, args.speculative_adaptive_config or DEFAULT_PRESET)
        for warning in config.warnings():
            asked.warn("%s: %s", place, warning)
        candidates = config.candidate_steps
        most = candidates[-1]
        if most == 0:
            problem = "drafts nothing: no slot has candidate_steps above 0"
            raise Refusal(place, problem, f"give one, or leave out {as_flag(ADAPTIVE)}")
        if rounds.block_size is not None and most >= rounds.block_size:
            problem = f"drafts {most} tokens, but the head's blocks have {rounds.block_size - 1}"
            raise Refusal(place, problem, "write a configuration of fewer")
        wishes = [name for name in (STEPS, TOKENS) if vars(args)[name] is not None]
        if not wishes:
            initial = candidates[len(candidates) // 2]
        elif initial not in candidates:
            numbers = ", ".join(map(str, candidates))
            problem = f"drafts {initial} tokens, but the candidate_steps of {place} are {numbers}"
            raise Refusal(as_flag(wishes[0], vars(args)[wishes[0]]), problem, CHANGE)
    policy = "adaptive" if strategy == EMA else "load_aware"
    return replace(
        rounds, num_steps=most, tier_policy=policy, initial_steps=initial, adaptive=config
    )


def _tree(args: ServerArgs) -> TreeShape | None:
    """Gives the shape of the trees that are drafted; None where drafts are chains."""
    topk, depth = args.speculative_eagle_topk, args.speculative_num_steps or TREE_STEPS
    if topk in (None, 1):
        return None
    wide = as_flag(TOPK, topk)
    if args.speculative_load_aware == "on":
        problem = f"chooses how long chains are, and {wide} drafts trees, which are of one size"
        raise Refusal(as_flag(LOAD_AWARE, "on"), problem, f"leave it out, {OR_CHAINS}")
    if topk * (depth - 1) > MAX_ROWS:
        problem = f"has {topk} rows in each draft step but the first, and a request {MAX_ROWS}"
        lower = f"lower {as_flag(STEPS, depth)} to {1 + MAX_ROWS // topk}"
        raise Refusal(wide, f"{problem} at most", f"{lower}, {OR_CHAINS}")
    most = min(MAX_ROWS, 1 + topk + (depth - 1) * topk**2)
    num_tokens = args.speculative_num_draft_tokens or min(TREE_TOKENS, most)
    if num_tokens > most:
        problem = f"must be 2 to {most} with {wide} and {as_flag(STEPS, depth)}"
        raise Refusal(as_flag(TOKENS, num_tokens), problem, CHANGE)
    return TreeShape(topk, depth, num_tokens - 1)
