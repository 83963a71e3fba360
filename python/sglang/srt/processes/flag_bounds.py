"""Bounds of the numbers that flags may be, as far as they need no model and no machine."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args, get_type_hints

from sglang.srt.flag_values import as_flag
from sglang.srt.head_masks import MAX_BLOCK_SIZE
from sglang.srt.lookahead.adaptive_config import MAX_NUM_STEPS
from sglang.srt.processes.config_error import ConfigError, Refusal
from sglang.srt.server_args import ServerArgs
from sglang.srt.step.draft_shapes import MAX_ROWS

UNSPLIT = -1  # a --chunked-prefill-size: no prompt is split, as in SGLang
AUTO = "auto"  # a --chunked-prefill-size: as many prompt tokens as the load allows
LARGEST = 1 << 40  # of a number that nothing else bounds
LARGEST_INT64 = (1 << 63) - 1
MAX_LABEL_CHARS = 128  # of a label of weights
MAX_NGRAM_TOKENS = 1 << 28  # that are searched

ANY = (-LARGEST, LARGEST)  # of a flag that is checked where it is read, by what goes with it

# The least and the most that a number may be. Whole ones that are not here may be 0 to LARGEST;
# what need not be whole, ANY.
BOUNDS = {
    "context_length": ANY,
    "port": (0, 65_535),
    "max_total_tokens": (1, LARGEST),
    "page_size": (1, 65_536),
    "max_running_requests": (1, 65_536),
    "max_queued_requests": (1, LARGEST),
    "priority_scheduling_preemption_threshold": ANY,
    "stream_interval": (1, LARGEST),
    "num_threads": (1, LARGEST),
    "random_seed": (-LARGEST_INT64, LARGEST_INT64),
    "mtp_max_k": (1, 256),
    "mtp_mask_token_id": ANY,
    "shutdown_timeout_s": (0, LARGEST),
    "watchdog_timeout": (0, LARGEST),
    "max_grammar_time_s": (0.001, LARGEST),
    "max_connections": (1, LARGEST),
    "max_header_bytes": (1, LARGEST),
    "max_request_bytes": (1, LARGEST),
    "max_weight_bytes": (1, LARGEST),
    "max_hidden_states_bytes": (1, LARGEST),
    "max_batch_size_per_request": (1, LARGEST),
    "max_tokenize_tokens": (1, LARGEST),
    "max_n": (1, LARGEST),
    "speculative_num_steps": (1, MAX_NUM_STEPS),
    "speculative_eagle_topk": (1, MAX_ROWS),
    "speculative_num_draft_tokens": (2, 1 + MAX_NUM_STEPS),
    "speculative_dflash_block_size": (2, MAX_BLOCK_SIZE),
    "speculative_accept_threshold_single": (0, 1),
    "speculative_accept_threshold_acc": (0, 1),
    "speculative_ngram_max_trie_depth": (1, 64),
    "speculative_ngram_max_bfs_breadth": (1, MAX_NUM_STEPS),
    "speculative_ngram_min_bfs_breadth": (1, MAX_NUM_STEPS),
    "speculative_ngram_capacity": (2, MAX_NGRAM_TOKENS),
    "speculative_ngram_external_corpus_max_tokens": (2, MAX_NGRAM_TOKENS),
    "speculative_ngram_external_sam_budget": (0, MAX_NUM_STEPS),
    "tp_size": (1, 64),
    **dict.fromkeys(("dp_size", "pp_size", "ep_size", "nnodes"), (1, 1)),
    "node_rank": (0, 0),
}


def check_numbers(args: ServerArgs) -> None:
    """
    Raises:
        ConfigError: for a number that its flag cannot be; the text names the flag and the bounds.
    """
    values, hints = vars(args), get_type_hints(ServerArgs)
    for name in (field.name for field in fields(ServerArgs)):
        types = {*(get_args(hints[name]) or (hints[name],))}
        if not {int, float} & types or str in types or values[name] is None:
            continue
        value = values[name]
        is_open = float in types
        least, most = BOUNDS.get(name, ANY if is_open else (0, LARGEST))
        is_right = isinstance(value, int | float) if is_open else type(value) is int
        if is_right and least <= value <= most:
            continue
        kind = "a number" if is_open else "a whole number"
        raise Refusal(as_flag(name, value), f"must be {kind} from {least} to {most}", "change it")
    _check_chunks(args)
    if not (args.weight_version.isprintable() and 1 <= len(args.weight_version) <= MAX_LABEL_CHARS):
        raise ConfigError(
            f"--weight-version must have 1 to {MAX_LABEL_CHARS} printable characters."
        )
    if args.schedule_conservativeness <= 0:
        raise ConfigError("--schedule-conservativeness must be a number above 0.")
    fraction = args.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError("--mem-fraction-static must be between 0 and 1.")


def _check_chunks(args: ServerArgs) -> None:
    chunk, max_step_ms = args.chunked_prefill_size, args.max_step_ms
    is_number = isinstance(chunk, int) and (1 <= chunk <= LARGEST or chunk == UNSPLIT)
    if not is_number and chunk != AUTO:
        raise ConfigError(
            f"--chunked-prefill-size must be at least 1, or {UNSPLIT} for no chunks, or {AUTO}."
        )
    if max_step_ms is None:
        return
    if max_step_ms < 0:
        raise ConfigError("--max-step-ms must be milliseconds above 0, or 0 for no bound.")
    if max_step_ms > 0 and chunk != AUTO:
        raise ConfigError(
            f"--max-step-ms bounds what --chunked-prefill-size {AUTO} chooses; leave one of them"
            " out."
        )
