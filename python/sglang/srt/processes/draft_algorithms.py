"""The values of `--speculative-algorithm`: an entry of `ALGORITHMS` for each that has a draft
model. NGRAM, which has none, has flags of its own (`ngram_flags.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.draft_model_config import load_draft_config
from sglang.srt.head_config import EAGLE, EAGLE3, TOKEN_MAP, load_head_config
from sglang.srt.model_config import ModelConfig
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter_configs import EagleConfig, StandaloneConfig
from sglang.srt.speculative.round_options import RoundOptions
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

logger = logging.getLogger(__name__)

DRAFT_PATH_FLAG = "--speculative-draft-model-path"
A_HEAD = "a head that was trained for this model"
A_MODEL = "a smaller model with the same tokenizer"


class Asked(NamedTuple):
    """The inputs from which a drafter's options are made.

    Attributes:
        args: of the server.
        model: the target.
        suppressed_token_ids: ids that the target never emits.
        rounds: how many tokens are drafted and verified.
    """

    args: ServerArgs
    model: ModelConfig
    suppressed_token_ids: tuple[int, ...]
    rounds: RoundOptions


class Algorithm(NamedTuple):
    """One that `--speculative-algorithm` may name.

    Attributes:
        drafter: in `DRAFTERS` (registry.py).
        options: makes the drafter's options, or raises ValueError; the text names the flag.
        num_free: see `RoundOptions`.
    """

    drafter: str
    options: Callable[[Asked], Any]
    num_free: int = 1


def find_algorithm(name: str) -> Algorithm:
    """Finds the entry of a name, in any case, of an algorithm with a draft model.

    Raises:
        ValueError: for an algorithm that this runtime does not have; the text says which it has.
    """
    return ALGORITHMS[SpeculativeAlgorithm.from_string(name)]


def draft_path(args: ServerArgs, what: str) -> str:
    """The folder of the draft model.

    Args:
        what: what it holds, for people.

    Raises:
        ConfigError: if no flag names it.
    """
    path = args.speculative_draft_model_path
    if path is None:
        raise ConfigError(
            f"--speculative-algorithm {args.speculative_algorithm} needs {DRAFT_PATH_FLAG}, the"
            f" folder of {what}."
        )
    return path


def _eagle(architecture: str, asked: Asked) -> EagleConfig:
    """Makes the options of a head with this name in `HEADS` (registry.py)."""
    args, model = asked.args, asked.model
    path = draft_path(args, A_HEAD)
    head = load_head_config(path, architecture, model, args.speculative_token_map, DRAFT_PATH_FLAG)
    return EagleConfig(head, model.num_layers, asked.rounds, asked.suppressed_token_ids)


def _standalone(asked: Asked) -> StandaloneConfig:
    args, target = asked.args, asked.model
    path = draft_path(args, A_MODEL)
    if asked.rounds.tree is not None:
        raise ConfigError(
            f"--speculative-eagle-topk {asked.rounds.tree.topk} is of heads; a draft model drafts"
            " chains. Leave it out."
        )
    if args.speculative_token_map is not None:
        raise ConfigError(
            f"{TOKEN_MAP} is for heads; a draft model has all tokens of its own. Leave it out."
        )
    target_tokens = Path(args.tokenizer_path or target.path)
    draft = load_draft_config(path, target, target_tokens, DRAFT_PATH_FLAG)
    context_len = args.context_length or target.context_len
    if draft.context_len < context_len:
        logger.warning(
            "%s %s: the draft model was made for %d tokens, so its drafts are seldom right behind"
            " them; --context-length %d would keep requests within.",
            DRAFT_PATH_FLAG,
            path,
            draft.context_len,
            draft.context_len,
        )
    return StandaloneConfig(draft, asked.rounds, asked.suppressed_token_ids)


ALGORITHMS = {
    SpeculativeAlgorithm.EAGLE: Algorithm("eagle", partial(_eagle, EAGLE)),
    SpeculativeAlgorithm.EAGLE3: Algorithm("eagle", partial(_eagle, EAGLE3)),
    SpeculativeAlgorithm.STANDALONE: Algorithm("standalone", _standalone, num_free=0),
}
