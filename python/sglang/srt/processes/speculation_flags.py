"""The flags `--speculative-...` and `--tile-spec...`: what drafts, and which of them it takes.

`ALGORITHMS` has an entry for each name of `--speculative-algorithm`. Defaults of flags are in
`speculation_args.py`, bounds of numbers in `flag_bounds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from sglang.srt.draft_model_config import load_draft_config
from sglang.srt.flag_values import as_flag
from sglang.srt.head_config import load_head_config
from sglang.srt.head_layouts import DFLASH, EAGLE, EAGLE3, NEXTN
from sglang.srt.hub_models import MAIN
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.processes.config_error import ConfigError, Refusal
from sglang.srt.processes.ngram_corpus import corpus_from_flags
from sglang.srt.processes.round_flags import (
    ADAPTIVE,
    CONFIG,
    LOAD_AWARE,
    STEPS,
    TILE_SPEC,
    TOKENS,
    TOPK,
    Asked,
    fixed_rounds,
    model_rounds,
    num_drafts,
    strategy_of,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculation_args import SpeculationArgs
from sglang.srt.speculative.drafter_configs import (
    EagleConfig,
    NgramConfig,
    NgramLimits,
    PairConfig,
    StandaloneConfig,
)
from sglang.srt.speculative.drafter_options import AcceptThresholds, DrafterConfig
from sglang.srt.speculative.spec_info import NGRAM, SpeculativeAlgorithm

ALGORITHM, DRAFT_PATH = "speculative_algorithm", "speculative_draft_model_path"
DRAFT_REVISION = "speculative_draft_model_revision"
MAX_BREADTH = "speculative_ngram_max_bfs_breadth"
BLOCK_SIZE = "speculative_dflash_block_size"
BREADTHS = (MAX_BREADTH, "speculative_ngram_min_bfs_breadth")
CORPUS = "speculative_ngram_external_corpus_path"
NGRAM_NUM_DRAFTS = 11  # SGLang's
SHORTEST_MATCH = 1

SWITCHES = (ADAPTIVE, TILE_SPEC)
# The values of each flag that ask for nothing.
NOTHING = {entry.name: (entry.default,) for entry in fields(SpeculationArgs)} | {
    TOPK: (None, 1),
    DRAFT_REVISION: (None, MAIN),
}
# Flags that mean nothing without another one.
NEEDS = {
    DRAFT_REVISION: DRAFT_PATH,
    CONFIG: ADAPTIVE,
    "speculative_adaptive_strategy": ADAPTIVE,
    "tile_spec_cache_dir": TILE_SPEC,
    "speculative_ngram_external_corpus_max_tokens": CORPUS,
    "speculative_ngram_external_sam_budget": CORPUS,
}
OF_MODELS = frozenset({DRAFT_PATH, DRAFT_REVISION, ADAPTIVE})
OF_HEADS = OF_MODELS | {TOPK, "speculative_token_map"}
OF_NGRAM = frozenset(name for name in NOTHING if name.startswith("speculative_ngram_"))
OF_ALL = frozenset(NOTHING) - OF_HEADS - OF_NGRAM - {BLOCK_SIZE}


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Describes what a name of `--speculative-algorithm` stands for.

    Attributes:
        drafter: a name in `DRAFTERS` (registry.py).
        flags: those that it takes; others are refused if they are given.
        options: makes the drafter's options, or raises ValueError; the text names the flag.
        draft_model: says what `--speculative-draft-model-path` must name; None: it may be
            left out, or it takes none.
        instead: for flags that it does not take, what to do, or what happens.
    """

    drafter: str
    flags: frozenset[str]
    options: Callable[[Asked], Any]
    draft_model: str | None = None
    instead: Mapping[str, str] = field(default_factory=dict)


def drafter_from_flags(asked: Asked) -> DrafterConfig | None:
    """Makes the drafter that `--speculative-algorithm` names; None without it.

    Raises:
        ConfigError: for flags or a draft model that cannot be had; the text names the flag and the
            remedy.
    """
    try:
        algorithm = _algorithm(asked.args)
        _check_given(asked.args, algorithm)
        args = _without_idle_switches(asked, algorithm)
        if algorithm is None:
            return None
        options = algorithm.options(replace(asked, args=args))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    single, acc = args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc
    thresholds = AcceptThresholds(single, acc)
    return DrafterConfig(algorithm.drafter, options, thresholds, _asked_as(_chosen(args)))


def adaptive_strategy(args: ServerArgs) -> str | None:
    """Names the strategy that numbers of drafts follow; None where they follow none."""
    algorithm = _algorithm(args)
    follows = args.speculative_adaptive and algorithm is not None and ADAPTIVE in algorithm.flags
    return strategy_of(args) if follows else None


def _chosen(args: ServerArgs) -> list[SpeculativeAlgorithm]:
    """Reads `--speculative-algorithm`: none, one, or one with a model and NGRAM."""
    names = args.speculative_algorithm
    if names is None:
        return []
    words = [name.strip() for name in names.split(",")]
    if "" in words:
        remedy = "name one drafter, or one with a model and NGRAM"
        raise Refusal(as_flag(ALGORITHM, names), "lacks a name beside a comma", remedy)
    chosen = {SpeculativeAlgorithm.from_string(word) for word in words}
    if len(chosen) < len(words):
        raise Refusal(as_flag(ALGORITHM, names), "names one drafter twice", "name it once")
    models = sorted(chosen - {NGRAM})
    if len(models) > 1:
        remedy = "name one of them, or one and NGRAM"
        raise Refusal(as_flag(ALGORITHM, names), "has two drafters with models", remedy)
    return models + [NGRAM] * (NGRAM in chosen)


def _algorithm(args: ServerArgs) -> Algorithm | None:
    chosen = _chosen(args)
    if not chosen:
        return None
    algorithm = ALGORITHMS[chosen[0]]
    return algorithm if len(chosen) == 1 else _beside_ngrams(algorithm)


def _asked_as(chosen: list[SpeculativeAlgorithm]) -> dict[str, str]:
    """Returns `DrafterConfig.asked_as`: a request may name the algorithm or what drafts for it."""
    return {
        name: each.lower() for each in chosen for name in (each.lower(), ALGORITHMS[each].drafter)
    }


def _check_given(args: ServerArgs, algorithm: Algorithm | None) -> None:
    """Looks whether flags that are given have what they need: an algorithm, and another flag."""
    flags, instead = ((), {}) if algorithm is None else (algorithm.flags, algorithm.instead)
    given = [name for name, nothing in NOTHING.items() if vars(args)[name] not in nothing]
    for name in given:
        if name not in flags and name not in SWITCHES:
            first = NEEDS.get(name, name)
            takers = [key for key, each in ALGORITHMS.items() if first in each.flags]
            need = as_flag(ALGORITHM, " or ".join(", ".join(takers).rsplit(", ", 1)))
        elif NEEDS.get(name, name) not in given:
            need = as_flag(NEEDS[name])
        else:
            continue
        if len(_chosen(args)) > 1 and name not in flags:
            both = as_flag(ALGORITHM, args.speculative_algorithm)
            remedy = instead.get(name, "leave it out")
            raise Refusal(both, f"does not take {as_flag(name)}", remedy)
        remedy = instead.get(name, "use that, or leave it out")
        raise Refusal(as_flag(name), f"needs {need}", remedy)
    if algorithm is not None and algorithm.draft_model and DRAFT_PATH not in given:
        flag, remedy = as_flag(ALGORITHM, args.speculative_algorithm), algorithm.draft_model
        raise Refusal(flag, f"needs {as_flag(DRAFT_PATH)}", f"name the folder of {remedy}")


def _without_idle_switches(asked: Asked, algorithm: Algorithm | None) -> ServerArgs:
    """Turns switches off that change nothing here, with a warning that says why."""
    args, reasons = asked.args, dict[str, str]()
    if algorithm is None:
        reasons = dict.fromkeys(SWITCHES, f"nothing is drafted without {as_flag(ALGORITHM)}")
    elif asked.environ.simulated_accept_len is not None:
        reason = "SGLANG_SIMULATE_ACC_LEN says how many drafts are right, so all are verified"
        reasons = dict.fromkeys(SWITCHES, reason)
    elif ADAPTIVE not in algorithm.flags:
        reasons = {ADAPTIVE: algorithm.instead[ADAPTIVE]}
    elif args.speculative_eagle_topk not in NOTHING[TOPK]:
        flag = as_flag(TOPK, args.speculative_eagle_topk)
        reasons = {ADAPTIVE: f"with {flag} every step drafts trees of the same size"}
    idle: dict[str, Any] = {name: False for name in reasons if vars(args)[name]}
    for name in idle:
        asked.warn("%s has no effect here: %s.", as_flag(name), reasons[name])
    return replace(args, **idle) if idle else args


def _eagle(architecture: str, asked: Asked) -> EagleConfig:
    """Makes the options of a head with this name in `HEADS` (registry.py)."""
    args, target, rounds = asked.args, asked.model, model_rounds(asked, num_free=1)
    flag, path = as_flag(DRAFT_PATH), str(args.speculative_draft_model_path or target.path)
    head = load_head_config(path, architecture, target, args.speculative_token_map, flag)
    most = None if head.mask is None else head.mask.depths
    if most is not None and rounds.num_steps > most:
        asked.warn(
            "%s %s: the head was trained for %d drafts, and of %d those behind them are seldom"
            " right; %s would keep to them.",
            flag,
            path,
            most,
            rounds.num_steps,
            as_flag(STEPS, most),
        )
    return EagleConfig(head, rounds, asked.suppressed_token_ids)


def _dflash(asked: Asked) -> EagleConfig:
    args, path = asked.args, str(asked.args.speculative_draft_model_path)
    more = args.speculative_token_map, as_flag(DRAFT_PATH)
    head = load_head_config(path, DFLASH, asked.model, *more)
    assert head.mask is not None, "A head of DFlash has a block."
    size = args.speculative_dflash_block_size
    if size not in (None, head.mask.block_size):
        problem = (
            f"is not {head.mask.block_size}, the rows of a block that the head was trained for"
        )
        remedy = f"leave it out; {as_flag(TOKENS)} says how many are verified"
        raise Refusal(as_flag(BLOCK_SIZE, size), problem, remedy)
    rounds = model_rounds(asked, num_free=0, block_size=head.mask.block_size)
    return EagleConfig(head, rounds, asked.suppressed_token_ids)


def _standalone(asked: Asked) -> StandaloneConfig:
    args, target, rounds = asked.args, asked.model, model_rounds(asked, num_free=0)
    path, flag = str(args.speculative_draft_model_path), as_flag(DRAFT_PATH)
    tokenizer = Path(args.tokenizer_path or target.path)
    draft = load_draft_config(path, target, tokenizer, flag, asked.warn)
    if draft.context_len < (args.context_length or target.context_len):
        asked.warn(
            "%s %s: the draft model was made for %d tokens, so its drafts are seldom right behind"
            " them; --context-length %d would keep requests within.",
            flag,
            path,
            draft.context_len,
            draft.context_len,
        )
    return StandaloneConfig(draft, rounds, asked.suppressed_token_ids)


def _ngram(asked: Asked) -> NgramConfig:
    args = asked.args
    least, most = args.speculative_ngram_min_bfs_breadth, args.speculative_ngram_max_bfs_breadth
    if least > most:
        flag = as_flag("speculative_ngram_min_bfs_breadth", least)
        problem = f"is more than {as_flag(MAX_BREADTH, most)}"
        raise Refusal(flag, problem, "lower it, or raise the other")
    count = num_drafts(asked, TOKENS, NGRAM_NUM_DRAFTS)
    policy = "fixed" if asked.is_fixed else "matched"
    rounds = fixed_rounds(asked, count, num_free=count)
    return _ngrams(asked, replace(rounds, tier_policy=policy, trees_of_any_size=most > 1))


def _ngrams(asked: Asked, rounds: RoundOptions) -> NgramConfig:
    args = asked.args
    by_frequency = args.speculative_ngram_match_type == "PROB"
    return NgramConfig(
        rounds=rounds,
        limits=NgramLimits(SHORTEST_MATCH, args.speculative_ngram_max_trie_depth, by_frequency),
        capacity=args.speculative_ngram_capacity,
        breadth=args.speculative_ngram_max_bfs_breadth,
        suppressed_token_ids=asked.suppressed_token_ids,
        min_breadth=args.speculative_ngram_min_bfs_breadth,
        corpus_budget=args.speculative_ngram_external_sam_budget or None,
        corpus=corpus_from_flags(args, asked.model, not asked.only_checks),
    )


def _beside_ngrams(model: Algorithm) -> Algorithm:
    """Describes an algorithm with a model of its own and NGRAM on one server."""

    def pair(asked: Asked) -> PairConfig:
        options = model.options(asked)
        count = options.rounds.num_steps
        ngrams = _ngrams(asked, RoundOptions(count, num_free=count))
        names = _asked_as(_chosen(asked.args)[:1])
        drafter = DrafterConfig(model.drafter, options, asked_as=names)
        return PairConfig(drafter=drafter, ngrams=ngrams)

    chains = "leave it out: two drafters on one server draft chains"
    return replace(
        model,
        drafter="pair",
        flags=(model.flags | OF_NGRAM) - {TOPK, *BREADTHS},
        options=pair,
        instead=dict.fromkeys((TOPK, *BREADTHS), chains),
    )


a_head = partial(
    Algorithm,
    drafter="eagle",
    flags=OF_ALL | OF_HEADS,
    draft_model="a head that was trained for this model",
)
ALGORITHMS = {
    SpeculativeAlgorithm.EAGLE: a_head(options=partial(_eagle, EAGLE)),
    SpeculativeAlgorithm.EAGLE3: a_head(options=partial(_eagle, EAGLE3)),
    SpeculativeAlgorithm.NEXTN: a_head(options=partial(_eagle, NEXTN), draft_model=None),
    SpeculativeAlgorithm.DFLASH: Algorithm(
        drafter="dflash",
        flags=(OF_ALL | OF_HEADS | {BLOCK_SIZE}) - {TOPK},
        options=_dflash,
        draft_model="a head of DFlash that was trained for this model",
        instead={TOPK: "leave it out: a block is a chain"},
    ),
    SpeculativeAlgorithm.STANDALONE: Algorithm(
        drafter="standalone",
        flags=OF_ALL | OF_MODELS,
        options=_standalone,
        draft_model="a smaller model with the same tokenizer",
    ),
    NGRAM: Algorithm(
        drafter="ngram",
        flags=OF_ALL | OF_NGRAM,
        options=_ngram,
        instead={
            TOPK: f"leave it out: NGRAM drafts trees by {as_flag(MAX_BREADTH)}",
            ADAPTIVE: f"with NGRAM the number of drafts follows {as_flag(LOAD_AWARE)}",
            CONFIG: f"leave it out: NGRAM follows {as_flag(LOAD_AWARE)}",
            "speculative_adaptive_strategy": f"leave it out: NGRAM follows {as_flag(LOAD_AWARE)}",
        },
    ),
}
