"""A table of experiments: ways to serve the same text, loads, and the ratios that are asked for.

`python -m benchmark.measure.experiment NAME` measures one (`paired.py`): the ways take turns at
each load until each ratio is certain. Prompts are held-out code, answered by the bundled model,
inflated into a real geometry.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark.engine_load import random_prompts
from benchmark.goals import (
    ADAPTIVE_OVER_BEST_FIXED,
    MIN_DETERMINISTIC_OVER_PLAIN,
    MIN_HIDDEN_OVER_OWN_KIND,
    MIN_HTTP_OVER_ENGINE,
    MIN_MAY_ASK_OVER_PLAIN,
    MIN_OPTED_OUT_OVER_PLAIN,
    MIN_PAIRED_MEDIAN,
    MIN_TRANSFORMERS_OVER_OWN,
    STATIONARY_OVER_BEST_FIXED,
)
from benchmark.paired import Pair
from benchmark.stream_ways import ROUTES
from benchmark.ways import EngineWay
from sglang.srt.model_config import load_model_config
from sglang.srt.sent_tensors import SHARED_MEMORY

PLAIN, VERIFIED, DRAFTED, NGRAM = "plain", "k=8 verified", "drafted", "ngram"
NO_GRAPHS, NGRAM_TREES = "k=8 verified, no graphs", "ngram, trees"
OPTED_OUT = "all opted out"
MAY_ASK, ONE_ASKS, ALL_ASK = "none asks", "one asks", "all ask"
LOAD_AWARE = "k=8 tau 0.9 load-aware"
SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")  # of drafts: TOPK x STEPS x TOKENS
REPLAY = re.compile(r"replay (\d+)(?::(0?\.\d+))?")  # replay DRAFTS, or replay DRAFTS:ERRORS
_STEPS = {"speculative_num_steps": 3, "speculative_load_aware": "off"}
HOT = 1.5  # temperature of answers that follow no text
NUM_COPIES = 4  # of the code in a prompt that repeats it


@dataclass(frozen=True, kw_only=True)
class Text:
    """A kind of text.

    Attributes:
        prompt: makes its prompts of prompts of code.
        params: sampling parameters.
        is_new: nothing is known of answers before it.
        is_known: each prompt was answered once before.
    """

    prompt: Callable[[list[int]], list[int]] = list
    params: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    is_new: bool = False
    is_known: bool = False


def ngram_flags(num_drafts: int) -> dict[str, Any]:
    """Flags for so many drafts of n-grams, in chains."""
    return {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1 + num_drafts}


def replay_way(num_drafts: int, error_rate: float) -> EngineWay:
    """So many drafts of what is known, of which a share is spoilt."""
    flags = ngram_flags(num_drafts) | {"speculative_load_aware": "off"}
    return EngineWay(flags=flags, replay_errors=error_rate)


def beside_first(names: Sequence[str]) -> list[Pair]:
    """Pairs each way with the first one."""
    return [(name, names[0]) for name in names[1:]]


def beside_others(chosen: Container[str]) -> Callable[[Sequence[str]], list[Pair]]:
    """Pairs each of the chosen ways with each other one."""

    def pairs(names: Sequence[str]) -> list[Pair]:
        others = [name for name in names if name not in chosen]
        return [(name, other) for name in names if name in chosen for other in others]

    return pairs


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Ways that take turns at the same loads.

    Attributes:
        question: that it answers, in one line.
        ways: by name.
        default: those that are measured if none are chosen; None: all.
        requests: at once, by default.
        texts: by name, each at each number of requests.
        pairs: whose ratios are to become certain, of the names of the ways that are measured.
        asked: of a way's ratios, at least.
        algorithm: of the drafter that is inflated for it, by default.
        tells_steps: figures have the number of drafts that each Engine has settled on.
        phase_tokens: new tokens of each load; the loads are one work, in their order, and what is
            compared is the speed over all of them.
    """

    question: str
    ways: Mapping[str, EngineWay]
    default: Sequence[str] | None = None
    requests: Sequence[int] = (1, 8, 32, 64, 128)
    texts: Mapping[str, Text] = field(default_factory=lambda: {"code": Text()})
    pairs: Callable[[Sequence[str]], list[Pair]] = beside_first
    asked: Mapping[str, float] = field(default_factory=dict)
    algorithm: str | None = None
    tells_steps: bool = False
    phase_tokens: int | None = None

    def way(self, name: str) -> EngineWay:
        """Gives a way; with a drafter `2x7x16` is one, a shape of drafts, with TOPK 1 a chain.
        `replay 3` is one always, three drafts of what is known, and `replay 3:0.2` with a fifth of
        them spoilt.

        Raises:
            ValueError: there is no such way.
        """
        if name in self.ways:
            return self.ways[name]
        if replay := REPLAY.fullmatch(name):
            return replay_way(int(replay[1]), float(replay[2] or 0))
        if self.algorithm is None or not (shape := SHAPE.fullmatch(name)):
            raise ValueError(f"There is no {name!r}; there are {', '.join(self.ways)}.")
        names = ("eagle_topk", "num_steps", "num_draft_tokens")
        flags = {f"speculative_{key}": int(n) for key, n in zip(names, shape.groups(), strict=True)}
        return EngineWay(is_drafted=True, flags=flags | {"speculative_load_aware": "off"})


# ---------------------------------------------------------------- multi-token prediction

_MTP = {"mtp_load_aware_k": True}
_AHEAD = {"mtp_enabled": True, "mtp_k": 8}
MTP_WAYS = {
    PLAIN: EngineWay(flags=_MTP, params={"temperature": 0}),
    LOAD_AWARE: EngineWay(flags=_MTP, params={**_AHEAD, "mtp_strategy": ["conf_adapt", 0.9]}),
    VERIFIED: EngineWay(flags=_MTP, params={**_AHEAD, "mtp_verify": True, "temperature": 0}),
}

# ---------------------------------------------------------------- TileSpec

MOST_STEPS = 7
STATIC = {
    f"static {steps}": {"speculative_num_steps": steps, "speculative_load_aware": "off"}
    for steps in range(1, MOST_STEPS + 1)
}
OTHERS: dict[str, dict[str, Any]] = {
    "load-aware 3": {"speculative_num_steps": 3},
    "load-aware 7": {"speculative_num_steps": 7},
    "adaptive": {"speculative_adaptive": True},
}
TILED = {
    f"TileSpec, {name}": {**flags, "tile_spec": True} for name, flags in (OTHERS | STATIC).items()
}
TILE_SPEC_WAYS = {
    PLAIN: EngineWay(),
    **{
        name: EngineWay(is_drafted=True, flags=flags)
        for name, flags in (STATIC | OTHERS | TILED).items()
    },
}

tiled_beside_others = beside_others(TILED)

# ---------------------------------------------------------------- adaptive numbers of drafts

FIXED = {f"fixed {number}": STATIC[f"static {number}"] for number in (1, 3, 7)}
_EMA = {"speculative_adaptive": True, "speculative_num_steps": 3}
ADAPTIVE: dict[str, dict[str, Any]] = {
    **{
        f"EMA, {preset}": {**_EMA, "speculative_adaptive_config": preset}
        for preset in ("conservative", "aggressive")
    },
    "auto": {"speculative_adaptive": True},
}
ADAPTIVE_WAYS = {
    PLAIN: EngineWay(),
    **{name: EngineWay(is_drafted=True, flags=flags) for name, flags in (FIXED | ADAPTIVE).items()},
}


adaptive_beside_others = beside_others(ADAPTIVE)


def noise(prompt: list[int]) -> list[int]:
    """Random tokens, as many and the same for the same prompt."""
    seed, vocab_size = zlib.crc32(repr(prompt).encode()), load_model_config("demo").vocab_size
    return random_prompts(1, len(prompt), vocab_size, seed)[0]


KINDS_OF_TEXT = {
    "predictable": Text(),
    "unpredictable": Text(prompt=noise, params={"temperature": HOT, "sampling_seed": 1}),
}

# ---------------------------------------------------------------- n-grams


def repeated(prompt: list[int]) -> list[int]:
    """The first tokens behind the first one, NUM_COPIES times; as long as the prompt or less."""
    first, *code = prompt
    return [first, *code[: len(code) // NUM_COPIES] * NUM_COPIES]


NGRAM_TEXTS = {
    "repeats": Text(prompt=repeated, is_new=True),
    "novel": Text(params={"temperature": HOT}, is_new=True),
    "known": Text(is_known=True),
}

# ---------------------------------------------------------------- transformers' code beside ours


OWN, BY_TRANSFORMERS = "own", "transformers"
IMPL_WAYS = {name: EngineWay(flags={"model_impl": name}) for name in (OWN, BY_TRANSFORMERS)}

# ---------------------------------------------------------------- drafters beside their bound

REPLAYED = "replay 3"
REPLAY_WAYS = {
    REPLAYED: replay_way(3, 0.0),
    PLAIN: MTP_WAYS[PLAIN],
    DRAFTED: EngineWay(is_drafted=True, flags=_STEPS),
    NGRAM: EngineWay(flags=ngram_flags(3) | {"speculative_load_aware": "off"}),
    # Up to 3 drafts: the policy of masks predicts fewer where that pays.
    "k=4 verified": EngineWay(flags=_MTP, params={**MTP_WAYS[VERIFIED].params, "mtp_k": 4}),
}


def beside_replay_and_plain(names: Sequence[str]) -> list[Pair]:
    """Pairs each drafter with the first way, and with plain decoding if that is measured."""
    drafters = [name for name in names if name != PLAIN]
    beside = beside_first(drafters)
    return beside + [(name, PLAIN) for name in drafters] if PLAIN in names else beside


# ---------------------------------------------------------------- what answers hold

_SAMPLED = {"temperature": 0.8, "top_p": 0.95}
_PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2}
_LOGPROBS = {"return_logprob": True}
ANSWER_WAYS = {
    "greedy": EngineWay(),
    "greedy, logprobs": EngineWay(fields=_LOGPROBS),
    "sampled": EngineWay(params=_SAMPLED),
    "sampled, logprobs": EngineWay(params=_SAMPLED, fields=_LOGPROBS),
    "sampled, top 5 logprobs": EngineWay(
        params=_SAMPLED, fields={**_LOGPROBS, "top_logprobs_num": 5}
    ),
    "sampled, penalties": EngineWay(params={**_SAMPLED, **_PENALTIES}),
}


def beside_own_kind(names: Sequence[str]) -> list[Pair]:
    """Pairs `KIND, more` with `KIND`."""
    return [(name, name.split(", ")[0]) for name in names if name.split(", ")[0] != name]


# ---------------------------------------------------------------- hidden states

_MOST_BYTES = 16 << 30  # of files that wait to be removed


def roomy_folder() -> str:
    """Names shared memory if it has room for the files, else the folder for temporary files."""
    is_usable = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > _MOST_BYTES
    return str(SHARED_MEMORY) if is_usable else tempfile.gettempdir()


_FOLDER = {"hidden_states_folder": roomy_folder(), "max_hidden_states_bytes": _MOST_BYTES}
_FILES = {"return_hidden_states": "file"}
HIDDEN_WAYS = {
    PLAIN: EngineWay(),
    f"{PLAIN}, not asked for": EngineWay(flags=_FOLDER),
    f"{PLAIN}, hidden states": EngineWay(flags=_FOLDER, fields=_FILES),
    DRAFTED: EngineWay(is_drafted=True, flags=_STEPS),
    f"{DRAFTED}, hidden states": EngineWay(
        is_drafted=True, flags={**_STEPS, **_FOLDER}, fields=_FILES
    ),
}

# ---------------------------------------------------------------- deterministic requests

_MAY_ASK = {"enable_deterministic_requests": True}
_PAIRS_OF_ASKING = ((ONE_ASKS, MAY_ASK), (ALL_ASK, MAY_ASK), (MAY_ASK, PLAIN))


def of_asking(names: Sequence[str]) -> list[Pair]:
    """Pairs requests that ask with those that may, and these with those of a server without."""
    return [pair for pair in _PAIRS_OF_ASKING if {*pair} <= {*names}]


EXPERIMENTS = {
    "mtp": Experiment(
        question="Is multi-token prediction that heeds the load ever slower than plain decoding?",
        ways={
            **MTP_WAYS,
            NO_GRAPHS: EngineWay(
                flags={**_MTP, "disable_mtp_cuda_graph": True}, params=MTP_WAYS[VERIFIED].params
            ),
        },
        default=(PLAIN, LOAD_AWARE, VERIFIED),
        requests=(1, 16, 64, 128),
        asked=dict.fromkeys((LOAD_AWARE, VERIFIED), MIN_PAIRED_MEDIAN),
    ),
    "speculation": Experiment(
        question="How much faster than plain decoding are chains and trees of drafts?",
        ways={
            PLAIN: EngineWay(),
            DRAFTED: EngineWay(is_drafted=True, flags={"speculative_num_steps": 3}),
        },
        algorithm="EAGLE3",
    ),
    "tile_spec": Experiment(
        question="Do drafts that are cut to the rows that pay beat every fixed number of drafts?",
        ways=TILE_SPEC_WAYS,
        default=(PLAIN, "static 1", "static 3", "static 7", "TileSpec, load-aware 7"),
        requests=(1, 8, 32, 48, 64, 96, 128),
        pairs=tiled_beside_others,
        algorithm="EAGLE3",
    ),
    "adaptive_steps": Experiment(
        question="Do adaptive steps beat every fixed number of steps on work that changes?",
        ways=ADAPTIVE_WAYS,
        requests=(1, 8, 32, 96, 8, 1),
        texts=KINDS_OF_TEXT,
        pairs=adaptive_beside_others,
        asked=dict.fromkeys(ADAPTIVE, ADAPTIVE_OVER_BEST_FIXED),
        algorithm="EAGLE3",
        tells_steps=True,
        phase_tokens=1536,
    ),
    "adaptive_stationary": Experiment(
        question="Are they as fast as the best fixed number on work that stays the same?",
        ways=ADAPTIVE_WAYS,
        default=(PLAIN, "fixed 1", "fixed 3", "EMA, conservative", "auto"),
        requests=(1, 8, 32, 64, 96, 128),
        texts=KINDS_OF_TEXT,
        pairs=adaptive_beside_others,
        asked=dict.fromkeys(ADAPTIVE, STATIONARY_OVER_BEST_FIXED),
        algorithm="EAGLE3",
        tells_steps=True,
    ),
    "ngram": Experiment(
        question="How much faster than plain decoding is NGRAM, and is it ever slower?",
        ways={
            PLAIN: EngineWay(),
            NGRAM: EngineWay(flags=ngram_flags(11)),
            NGRAM_TREES: EngineWay(
                flags=ngram_flags(11) | {"speculative_ngram_max_bfs_breadth": 10}
            ),
        },
        default=(PLAIN, NGRAM),
        requests=(1, 8, 32),
        texts=NGRAM_TEXTS,
        asked={NGRAM: MIN_PAIRED_MEDIAN},
    ),
    "replay": Experiment(
        question="Which share of the speed of drafts that are always right has each drafter?",
        ways=REPLAY_WAYS,
        default=(REPLAYED, DRAFTED, PLAIN),
        texts={"code": Text(is_new=True)},
        pairs=beside_replay_and_plain,
        algorithm="EAGLE3",
    ),
    "opted_out": Experiment(
        question="What does a head take of requests that want no drafts?",
        ways={
            PLAIN: EngineWay(),
            OPTED_OUT: EngineWay(
                is_drafted=True,
                flags={"speculative_num_steps": 3},
                params={"speculative": {"enabled": False}},
            ),
        },
        requests=(1, 8, 64),
        asked={OPTED_OUT: MIN_OPTED_OUT_OVER_PLAIN},
        algorithm="EAGLE3",
    ),
    "answers": Experiment(
        question="What do log-probabilities and penalties cost?",
        ways=ANSWER_WAYS,
        requests=(64, 128),
        pairs=beside_own_kind,
        asked={name: 0.95 for name in ANSWER_WAYS if "top" not in name},
    ),
    "deterministic_requests": Experiment(
        question="What does one request that asks to be deterministic cost beside 127?",
        ways={
            PLAIN: EngineWay(),
            MAY_ASK: EngineWay(flags=_MAY_ASK),
            ONE_ASKS: EngineWay(flags=_MAY_ASK, of_one={"deterministic": True}),
            ALL_ASK: EngineWay(flags=_MAY_ASK, params={"deterministic": True}),
        },
        requests=(128,),
        default=(MAY_ASK, ONE_ASKS),
        pairs=of_asking,
        asked={
            MAY_ASK: MIN_MAY_ASK_OVER_PLAIN,
            ONE_ASKS: MIN_DETERMINISTIC_OVER_PLAIN,
            ALL_ASK: MIN_DETERMINISTIC_OVER_PLAIN,
        },
    ),
    "hidden_states": Experiment(
        question="What do files of the hidden states that EAGLE-3 reads cost?",
        ways=HIDDEN_WAYS,
        requests=(64,),
        texts={"new": Text(is_new=True)},  # a cached prefix has no states, so none would be used
        pairs=beside_own_kind,
        asked=dict.fromkeys((n for n in HIDDEN_WAYS if "," in n), MIN_HIDDEN_OVER_OWN_KIND),
        algorithm="EAGLE3",
    ),
    "model_impl": Experiment(
        question="What does transformers' modelling code cost beside ours of the same model?",
        ways=IMPL_WAYS,
        requests=(1, 32, 128),
        texts={"code": Text(is_new=True)},
        asked={BY_TRANSFORMERS: MIN_TRANSFORMERS_OVER_OWN},
    ),
    "http": Experiment(
        question="What does HTTP take of an Engine's streams?",
        ways={
            "Engine": EngineWay(fields={"stream": True}),
            **{route: EngineWay(route=route) for route in ROUTES},
        },
        requests=(64,),
        asked=dict.fromkeys(ROUTES, MIN_HTTP_OVER_ENGINE),
    ),
}
