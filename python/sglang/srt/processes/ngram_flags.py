"""The flags of `--speculative-algorithm NGRAM`."""

from __future__ import annotations

import logging
from pathlib import Path

from sglang.srt.model_config import ModelConfig
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.ngram_corpus import PATH_FLAG, check_corpus, corpus_from_flags
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter_configs import NgramConfig, NgramLimits
from sglang.srt.speculative.drafter_options import AcceptThresholds, DrafterConfig
from sglang.srt.speculative.round_options import RoundOptions
from sglang.srt.speculative.spec_info import MAX_NUM_STEPS, NGRAM

logger = logging.getLogger(__name__)

# Flags that mean something only with NGRAM, and their defaults.
NGRAM_OPTIONS = {
    "speculative_ngram_max_trie_depth": 18,
    "speculative_ngram_min_bfs_breadth": 1,
    "speculative_ngram_max_bfs_breadth": 1,
    "speculative_ngram_match_type": "BFS",
    "speculative_ngram_capacity": None,
    "speculative_ngram_external_corpus_path": None,
    "speculative_ngram_external_corpus_max_tokens": 10_000_000,
    "speculative_ngram_external_sam_budget": 0,
}
# Those of them that mean something only with a corpus.
CORPUS_OPTIONS = (
    "speculative_ngram_external_corpus_max_tokens",
    "speculative_ngram_external_sam_budget",
)
BY_FREQUENCY = {"BFS": False, "PROB": True}  # by match type
HEAD_OPTIONS = ("speculative_draft_model_path", "speculative_token_map")
DEFAULT_NUM_DRAFT_TOKENS = 12  # SGLang's
MAX_DEPTH = 64
MAX_CAPACITY = 1 << 28
SHORTEST_MATCH = 1


def is_ngram(args: ServerArgs) -> bool:
    algorithm = args.speculative_algorithm
    return algorithm is not None and algorithm.upper() == NGRAM


def refuse_ngram_options(args: ServerArgs) -> None:
    """Those of other algorithms, or of none.

    Raises:
        ConfigError: the text names the flag.
    """
    for name, default in NGRAM_OPTIONS.items():
        if vars(args)[name] != default and not is_ngram(args):
            raise ConfigError(f"{_flag(name)} needs --speculative-algorithm {NGRAM}.")


def ngram_from_flags(
    args: ServerArgs,
    model: ModelConfig,
    suppressed_token_ids: tuple[int, ...],
    thresholds: AcceptThresholds,
    simulates_acceptance: bool,
    tile_spec_cache: Path | None,
    tile_spec_drafts: float | None = None,
    reads_corpus: bool = True,
) -> DrafterConfig:
    """The drafter.

    Args:
        model: the target.
        suppressed_token_ids, simulates_acceptance: as for `drafter_from_flags`.
        tile_spec_cache, tile_spec_drafts: see `RoundOptions`.
        reads_corpus: False only looks whether the corpus begins as one.

    Raises:
        ConfigError: for flags that cannot be had; the text names the flag and the remedy.
    """
    _refuse_head_options(args)
    num_drafts = _num_draft_tokens(args) - 1
    breadth = _within(args, "speculative_ngram_max_bfs_breadth", 1, MAX_NUM_STEPS)
    min_breadth = _min_breadth(args, breadth)
    limits = _limits(args)
    capacity = args.speculative_ngram_capacity
    if capacity is not None:
        capacity = _within(args, "speculative_ngram_capacity", 2, MAX_CAPACITY)
    _check_adaptive(args)
    corpus, corpus_budget = None, _corpus_budget(args)
    if reads_corpus:
        corpus = corpus_from_flags(args, model)
    else:
        check_corpus(args)
    is_fixed = simulates_acceptance or args.speculative_load_aware == "off"
    policy = "fixed" if is_fixed else "matched"
    rounds = RoundOptions(
        num_drafts,
        policy,
        tile_spec_cache=tile_spec_cache,
        num_free=num_drafts,
        tile_spec_drafts=tile_spec_drafts,
        trees_of_any_size=breadth > 1,
    )
    config = NgramConfig(
        rounds,
        limits,
        capacity,
        breadth,
        suppressed_token_ids,
        min_breadth,
        corpus_budget,
        corpus,
    )
    return DrafterConfig("ngram", config, thresholds)


def _min_breadth(args: ServerArgs, breadth: int) -> int:
    least = _within(args, "speculative_ngram_min_bfs_breadth", 1, MAX_NUM_STEPS)
    if least > breadth:
        raise ConfigError(
            f"--speculative-ngram-min-bfs-breadth {least} is more than"
            f" --speculative-ngram-max-bfs-breadth {breadth}; lower it, or raise the other."
        )
    return least


def _limits(args: ServerArgs) -> NgramLimits:
    depth = _within(args, "speculative_ngram_max_trie_depth", 1, MAX_DEPTH)
    by_frequency = BY_FREQUENCY[args.speculative_ngram_match_type]
    return NgramLimits(SHORTEST_MATCH, depth, by_frequency)


def _corpus_budget(args: ServerArgs) -> int | None:
    """Drafts of a request in a step that may come from the corpus; None: all.

    Raises:
        ConfigError: also for what says something of a corpus where there is none.
    """
    has_corpus = args.speculative_ngram_external_corpus_path is not None
    for name in CORPUS_OPTIONS:
        if not has_corpus and vars(args)[name] != NGRAM_OPTIONS[name]:
            raise ConfigError(f"{_flag(name)} needs {PATH_FLAG}.")
    _within(args, "speculative_ngram_external_corpus_max_tokens", 2, MAX_CAPACITY)
    return _within(args, "speculative_ngram_external_sam_budget", 0, MAX_NUM_STEPS) or None


def _refuse_head_options(args: ServerArgs) -> None:
    for name in HEAD_OPTIONS:
        if vars(args)[name] is not None:
            raise ConfigError(
                f"--speculative-algorithm {NGRAM} drafts from text and has no draft model; leave"
                f" out {_flag(name)}."
            )
    if args.speculative_eagle_topk not in (None, 1):
        raise ConfigError(
            f"--speculative-eagle-topk {args.speculative_eagle_topk} is of heads; leave it out:"
            f" {NGRAM} drafts trees by --speculative-ngram-max-bfs-breadth."
        )


def _check_adaptive(args: ServerArgs) -> None:
    """Warns that NGRAM does not follow it.

    Raises:
        ConfigError: for its options without it.
    """
    for name in ("speculative_adaptive_config", "speculative_adaptive_strategy"):
        if vars(args)[name] is not None and not args.speculative_adaptive:
            raise ConfigError(f"{_flag(name)} needs --speculative-adaptive.")
    if args.speculative_adaptive:
        logger.warning(
            "--speculative-adaptive is of algorithms with a draft model; with %s the number of"
            " drafts follows --speculative-load-aware.",
            NGRAM,
        )


def _num_draft_tokens(args: ServerArgs) -> int:
    """Tokens of a request in a step, the certain one counted."""
    steps, count = args.speculative_num_steps, args.speculative_num_draft_tokens
    if steps is not None and count is not None and count != steps + 1:
        logger.warning(
            "--speculative-num-steps %d: %s goes by --speculative-num-draft-tokens %d.",
            steps,
            NGRAM,
            count,
        )
    if count is not None:
        return _within(args, "speculative_num_draft_tokens", 2, 1 + MAX_NUM_STEPS)
    if steps is not None:
        return 1 + _within(args, "speculative_num_steps", 1, MAX_NUM_STEPS)
    return DEFAULT_NUM_DRAFT_TOKENS


def _within(args: ServerArgs, name: str, least: int, most: int) -> int:
    value = vars(args)[name]
    if not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{_flag(name)} {value} must be {least} to {most}, a whole number.")
    return value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
