"""The flags of speculative decoding, a part of `ServerArgs`."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.flag_values import flag


@dataclass(kw_only=True)
class SpeculationArgs:
    """Holds what the user asked for of drafts. `None` lets `speculation_flags.py` decide."""

    speculative_algorithm: str | None = flag(
        None,
        "What drafts, instead of multi-token prediction: a head (`EAGLE`, `EAGLE3` or `DFLASH`),"
        " the model's own layer for it (`NEXTN`), a smaller model (`STANDALONE`) or earlier text"
        " (`NGRAM`). A head or a model and NGRAM, such as `EAGLE3,NGRAM`: for each request the"
        " likelier drafts. Default: none.",
        section="Speculative decoding",
    )
    speculative_draft_model_path: str | None = flag(
        None,
        "Directory, or name on the hub, of the head, which was trained for this model, or of the"
        " smaller model with the same tokenizer.",
        aliases=("--speculative-draft-model",),
    )
    speculative_draft_model_revision: str | None = flag(
        None, "Branch, tag or commit of a --speculative-draft-model-path on the hub; default: main."
    )
    speculative_num_steps: int | None = flag(
        None,
        "Tokens drafted one behind the other per step of the model; default: 3, of trees 5, of"
        " DFLASH all of a block.",
    )
    speculative_eagle_topk: int | None = flag(
        None, "Drafts that follow each draft; 1, the default, drafts chains, more trees."
    )
    speculative_num_draft_tokens: int | None = flag(
        None,
        "Tokens that a step verifies; of chains --speculative-num-steps + 1, of trees 8, NGRAM 12.",
    )
    speculative_token_map: str | None = flag(
        None,
        "File with the only token ids that the head drafts: a list in .json, or .safetensors with"
        " one tensor.",
    )
    speculative_load_aware: str | None = flag(
        None,
        "Draft fewer tokens, or none, where more would cost more time than they save; outputs are"
        " the same. `off` always drafts --speculative-num-steps. Default: on.",
        choices=("on", "off"),
    )
    speculative_adaptive: bool = flag(
        False,
        "Draft more or fewer tokens as drafts are right or wrong and as they pay; instead of"
        " --speculative-load-aware.",
    )
    speculative_adaptive_config: str | None = flag(
        None,
        "How many drafts --speculative-adaptive chooses from, and when: `conservative`,"
        " `aggressive`, or a JSON file of your own (docs/adaptive.md). Default: none, or"
        " `conservative` with `ema`.",
    )
    speculative_adaptive_strategy: str | None = flag(
        None,
        "`auto`, the default: `ema` with a configuration, `throughput` without. `ema`: by an"
        " average of right drafts. `throughput`: by what rounds were measured to cost too; without"
        " a configuration, from 0 to 7 drafts, or to --speculative-num-steps if that is more.",
        choices=("auto", "ema", "throughput"),
    )
    tile_spec: bool = flag(
        False,
        "Verify only as many drafts of a step as pay by the measured times of its rows, the"
        " likeliest of all requests; outputs are the same (docs/tilespec.md).",
    )
    tile_spec_cache_dir: str | None = flag(
        None, "Where --tile-spec keeps measured times; default: tile_spec/cache."
    )
    speculative_accept_threshold_single: float = flag(
        1.0,
        "0 to 1: a draft of a sampled request is accepted if the model gives it this probability;"
        " below 1 outputs no longer follow the model's distribution.",
    )
    speculative_accept_threshold_acc: float = flag(
        1.0,
        "0 to 1: a draft of a sampled request is accepted with its probability divided by this;"
        " likewise.",
    )
    speculative_ngram_max_trie_depth: int = flag(18, "NGRAM: tokens of a match at most.")
    speculative_ngram_max_bfs_breadth: int = flag(
        1, "NGRAM: branches behind the shortest matches; 1: chains, more: trees."
    )
    speculative_ngram_min_bfs_breadth: int = flag(
        1, "NGRAM: branches behind matches of --speculative-ngram-max-trie-depth."
    )
    speculative_ngram_match_type: str = flag(
        "BFS",
        "NGRAM: of equally long matches the latest (`BFS`), or the most frequent token (`PROB`).",
        choices=("BFS", "PROB"),
    )
    speculative_ngram_capacity: int | None = flag(
        None, "NGRAM: tokens of ended requests, searched."
    )
    speculative_ngram_external_corpus_path: str | None = flag(
        None,
        "NGRAM: file of texts that all requests may draft from; each line is a JSON string, or an"
        ' object with a "text".',
    )
    speculative_ngram_external_corpus_max_tokens: int = flag(
        10_000_000, "NGRAM: tokens of that file at most; with more the server does not start."
    )
    speculative_ngram_external_sam_budget: int = flag(
        0, "NGRAM: drafts of a request and step that come from that file at most; 0: no bound."
    )
