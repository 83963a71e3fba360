"""The flags `--speculative-...`: which drafter a server has, and how many tokens it drafts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from sglang.srt.model_config import ModelConfig
from sglang.srt.model_executor.draft_shapes import TreeShape
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.draft_algorithms import Asked, find_algorithm
from sglang.srt.processes.draft_tree_flags import tree_from_flags
from sglang.srt.processes.ngram_flags import is_ngram, ngram_from_flags, refuse_ngram_options
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.adaptive_config import (
    CONFIG_FLAG,
    DEFAULT_PRESET,
    read_adaptive_config,
)
from sglang.srt.speculative.drafter_options import AcceptThresholds, DrafterConfig
from sglang.srt.speculative.round_options import RoundOptions, TierOptions
from sglang.srt.speculative.spec_info import MAX_NUM_STEPS
from sglang.srt.step.step_sizes import MAX_REQUESTS

logger = logging.getLogger(__name__)

DEFAULT_NUM_STEPS = 3
# Flags that mean something only with `--speculative-algorithm`.
OPTIONS = (
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_token_map",
    "speculative_load_aware",
    "speculative_adaptive_config",
    "speculative_adaptive_strategy",
)
ADAPTIVE = "speculative_adaptive"
AUTO, EMA, THROUGHPUT = "auto", "ema", "throughput"
THROUGHPUT_STEPS = 7  # drafts at most, where no configuration says which
TILE_SPEC, TILE_SPEC_CACHE = "tile_spec", "tile_spec_cache_dir"
DEFAULT_TILE_SPEC_CACHE = "tile_spec/cache"
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def drafter_from_flags(
    args: ServerArgs,
    model: ModelConfig,
    suppressed_token_ids: tuple[int, ...],
    simulates_acceptance: bool = False,
    tile_spec_drafts: float | None = None,
    reads_corpus: bool = True,
) -> DrafterConfig | None:
    """The drafter that `--speculative-algorithm` names; None without it.

    Args:
        model: the target.
        suppressed_token_ids: ids that it never emits.
        simulates_acceptance: a benchmark says how many drafts are accepted, so all are verified.
        tile_spec_drafts: a benchmark says how many `--tile-spec` verifies (`RoundOptions`).
        reads_corpus: see `ngram_from_flags`.

    Raises:
        ConfigError: for flags or a draft model that cannot be had; the text names the flag.
    """
    values = vars(args)
    for name in THRESHOLDS:
        if not 0 <= values[name] <= 1:
            raise ConfigError(f"{_flag(name)} {values[name]:g} must be between 0 and 1.")
    refuse_ngram_options(args)
    if args.speculative_algorithm is None:
        _refuse_all(args)
        return None
    thresholds = AcceptThresholds(*(values[name] for name in THRESHOLDS))
    if is_ngram(args):
        cache = _tile_spec_cache(args, simulates_acceptance)
        switches = simulates_acceptance, cache, tile_spec_drafts, reads_corpus
        return ngram_from_flags(args, model, suppressed_token_ids, thresholds, *switches)
    try:
        algorithm = find_algorithm(args.speculative_algorithm)
        tree = tree_from_flags(args)
        tiers = _tiers(args, simulates_acceptance, tree)
        rounds = RoundOptions(
            tiers.options.max_drafts,
            tiers.policy,
            tiers.options.initial,
            tiers.options.adaptive,
            _tile_spec_cache(args, simulates_acceptance),
            algorithm.num_free,
            tile_spec_drafts,
            tree,
        )
        options = algorithm.options(Asked(args, model, suppressed_token_ids, rounds))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return DrafterConfig(algorithm.drafter, options, thresholds)


def _refuse_all(args: ServerArgs) -> None:
    """Refuses flags that mean nothing without an algorithm, and warns of switches that would change
    the speed alone.

    Raises:
        ConfigError: if one is given.
    """
    values = vars(args)
    for name in (ADAPTIVE, TILE_SPEC):
        if values[name]:
            logger.warning(
                "%s has no effect here: nothing is drafted without --speculative-algorithm.",
                _flag(name),
            )
    given = [name for name in OPTIONS if values[name] is not None]
    given += [name for name in THRESHOLDS if values[name] != 1]
    given += [TILE_SPEC_CACHE] * (args.tile_spec_cache_dir is not None)
    if given:
        raise ConfigError(f"{_flag(given[0])} needs --speculative-algorithm.")


class Tiers(NamedTuple):
    """A name in `TIER_POLICIES`, and what it chooses from."""

    policy: str
    options: TierOptions


def _tiers(args: ServerArgs, simulates_acceptance: bool, tree: TreeShape | None) -> Tiers:
    """Returns the numbers of drafts that requests may get; of a tree, the drafts along one path."""
    if tree is not None:
        return Tiers("fixed", TierOptions(tree.depth, tree.depth))
    num_steps = _num_steps(args)
    is_fixed = simulates_acceptance or args.speculative_load_aware == "off"
    if not args.speculative_adaptive:
        for name in ("speculative_adaptive_config", "speculative_adaptive_strategy"):
            if vars(args)[name] is not None:
                raise ConfigError(f"{_flag(name)} needs {_flag(ADAPTIVE)}.")
        policy = "fixed" if is_fixed else "load_aware"
        return Tiers(policy, TierOptions(num_steps, num_steps))
    if args.speculative_load_aware is not None:
        raise ConfigError(
            f"{_flag(ADAPTIVE)} decides how many tokens are drafted; leave out"
            " --speculative-load-aware."
        )
    if simulates_acceptance:
        logger.warning(
            "%s: SGLANG_SIMULATE_ACC_LEN says how many drafts are right, so every step verifies"
            " %d drafts.",
            _flag(ADAPTIVE),
            num_steps,
        )
        return Tiers("fixed", TierOptions(num_steps, num_steps))
    return _adaptive_tiers(args, num_steps)


def _adaptive_tiers(args: ServerArgs, num_steps: int) -> Tiers:
    """Returns the tiers that `--speculative-adaptive` and its flags ask for.

    Args:
        num_steps: of `--speculative-num-steps`, or what is taken without it.
    """
    strategy = adaptive_strategy(args)
    if args.speculative_adaptive_config is None and strategy == THROUGHPUT:
        deepest = max(num_steps, THROUGHPUT_STEPS)
        return Tiers("load_aware", TierOptions(deepest, num_steps))
    config = read_adaptive_config(args.speculative_adaptive_config)
    place = f"{CONFIG_FLAG} {args.speculative_adaptive_config or DEFAULT_PRESET}"
    for warning in config.warnings():
        logger.warning("%s: %s", place, warning)
    candidates = config.candidate_steps
    if candidates == (0,):
        raise ConfigError(f"{place}: no slot has candidate_steps above 0, so nothing drafts.")
    if args.speculative_num_steps is None and args.speculative_num_draft_tokens is None:
        num_steps = candidates[len(candidates) // 2]
    elif num_steps not in candidates:
        one = "one of"
        given = f"--speculative-num-steps {num_steps}"
        if args.speculative_num_steps is None:
            one = "one more than one of"
            given = f"--speculative-num-draft-tokens {num_steps + 1}"
        raise ConfigError(
            f"{given}: with {_flag(ADAPTIVE)} it must be {one} the candidate_steps,"
            f" {', '.join(map(str, candidates))}; or leave it out."
        )
    policy = "adaptive" if strategy == EMA else "load_aware"
    return Tiers(policy, TierOptions(candidates[-1], num_steps, config))


def adaptive_strategy(args: ServerArgs) -> str | None:
    """Names the strategy that numbers of drafts follow; None where they follow none.

    `auto` is `ema` where a configuration is given, since that is written for this rule, and
    `throughput` elsewhere.
    """
    if not args.speculative_adaptive or args.speculative_algorithm is None or is_ngram(args):
        return None
    strategy = args.speculative_adaptive_strategy or AUTO
    if strategy != AUTO:
        return strategy
    return THROUGHPUT if args.speculative_adaptive_config is None else EMA


def _tile_spec_cache(args: ServerArgs, simulates_acceptance: bool) -> Path | None:
    """Returns the path where `--tile-spec` keeps prices; None without it."""
    if not args.tile_spec:
        if args.tile_spec_cache_dir is not None:
            raise ConfigError("--tile-spec-cache-dir needs --tile-spec.")
        return None
    if args.max_running_requests > MAX_REQUESTS:
        raise ConfigError(
            f"--tile-spec divides rows among {MAX_REQUESTS} requests at most; lower"
            f" --max-running-requests {args.max_running_requests}."
        )
    if simulates_acceptance:
        logger.warning(
            "--tile-spec: SGLANG_SIMULATE_ACC_LEN says how many drafts are right, so all are"
            " verified."
        )
        return None
    if args.tile_spec_cache_dir == "":
        raise ConfigError("--tile-spec-cache-dir must name a folder.")
    return Path(args.tile_spec_cache_dir or DEFAULT_TILE_SPEC_CACHE)


def _num_steps(args: ServerArgs) -> int:
    """Drafts of a chain."""
    num_steps, num_draft_tokens = args.speculative_num_steps, args.speculative_num_draft_tokens
    if num_steps is None:
        num_steps = DEFAULT_NUM_STEPS if num_draft_tokens is None else num_draft_tokens - 1
    if not 1 <= num_steps <= MAX_NUM_STEPS:
        source = "steps" if args.speculative_num_steps is not None else "draft-tokens"
        least = 1 if source == "steps" else 2
        raise ConfigError(
            f"--speculative-num-{source} must be {least} to {MAX_NUM_STEPS + least - 1}."
        )
    if num_draft_tokens not in (None, num_steps + 1):
        logger.warning(
            "--speculative-num-draft-tokens %d: a chain of %d steps has %d tokens, the certain one"
            " counted; that is used.",
            num_draft_tokens,
            num_steps,
            num_steps + 1,
        )
    return num_steps


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
