"""Triton kernels compile for GPUs that are not there: CI then sees what the interpreter does not,
types and shapes that only the compiler refuses. Each is compiled in few of its variants, and each
of these for one GPU; test/gpu runs the others, which are compiled at their first call."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

if sys.platform != "linux" or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from sglang.srt import platform
from sglang.srt.layers.attention import triton_tuning
from sglang.srt.layers.attention.triton_ops import (
    gather_kernel,
    parts_kernel,
    prompt_kernel,
    shared_kernel,
    sums_kernel,
)
from sglang.srt.layers.attention.triton_ops import kernels as attention
from sglang.srt.layers.ops import experts_kernels as experts
from sglang.srt.layers.ops import few_rows as few
from sglang.srt.layers.ops import ordered_products, rank_exchange
from sglang.srt.layers.ops import triton_ops as ops
from sglang.srt.layers.ops.expert_products import ExpertTiles
from sglang.srt.model_executor import triton_tree_search as trees
from sglang.srt.speculative import triton_kept_paths as paths
from sglang.srt.speculative import triton_mask_ops as masks
from sglang.srt.speculative import triton_ngram_ops as ngrams
from sglang.srt.step import triton_row_division as rows
from sglang.srt.step import triton_row_packing as packing
from sglang.srt.step import triton_step_ops as steps
from sglang.srt.step.triton_commit_run import commit_kernel, commit_run_kernel
from sglang.srt.step.triton_layout import lay_out_kernel
from sglang.srt.step.triton_write_drafts import _write_drafts_kernel

TARGETS = ((80, "fp16"), (90, "bf16"))
GPUS = (86, 90)  # with the least shared memory, and with the tiles that need most
NEVER_ALIGNED = (
    "num_rows",
    "num_pairs",
    "num_blocks",
    "num_items",
    "window",
    "early",
    "beside",
    "eps",
    "scale",
)
# Of int64.
INTEGERS = (
    *("slots_ptr", "positions_ptr", "rows_ptr", "kv_lens_ptr", "outside_ptr"),
    *("ancestors_ptr", "q_starts_ptr", "tree_starts_ptr", "kv_starts_ptr"),
)
SHORT_INTEGERS = ("items_ptr", "splits_ptr", "table_ptr", "token_table_ptr")  # of int32
FLOATS = ("sums_ptr", "stats_ptr", "rope_table_ptr")
STEP_INTEGERS = {
    f"{name}_ptr": "*i64"
    for name in (
        *("packed", "per_request", "committed", "num_tokens", "pending_lens", "tokens", "reads"),
        *("out", "spread", "input_ids", "requests", "outside", "q_starts", "num_pending"),
        *("targets", "num_confirmed", "num_unconfirmed", "accept_lens", "depths", "ancestors"),
        *("row_ancestors", "q_starts_out", "ancestors_out", "tree_starts_out", "tree_starts"),
        "num_masks_kept",
    )
} | {f"{name}_ptr": "*i32" for name in ("path", "out_path", "parents", "row_parents")}
NGRAM_INTEGERS = {
    f"{name}_ptr": "*i64"
    for name in (
        *("rows", "num_tokens", "row_tags", "tags", "head", "taken", "best", "out"),
        *("match_lens", "in_corpus", "found"),
    )
} | {f"{name}_ptr": "*i32" for name in ("sequences", "tokens", "corpus", "counts")}
TREE_SEARCH = (
    {
        f"{name}_ptr": "*i64"
        for name in ("token_ids", "target_ids", "starts", "found_ids", "fed", "ids")
    }
    | {f"{name}_ptr": "*fp32" for name in ("logprobs", "found_scores", "beam_scores", "scores")}
    | {f"{name}_ptr": "*i32" for name in ("found_parents", "parents")}
)
TREES = ("parents", "depths", "ancestors", "row_parents", "row_ancestors")
NO_TREES = {f"{name}_ptr": None for name in TREES}
NO_LOOKAHEAD = {"q_starts_ptr": None, "num_pending_ptr": None}
LAYOUTS = {
    "plain": {"HAS_LOOKAHEAD": False, "HAS_TREE": False, **NO_TREES, **NO_LOOKAHEAD},
    "chains": {"HAS_LOOKAHEAD": True, "HAS_TREE": False, **NO_TREES},
    "trees": {"HAS_LOOKAHEAD": True, "HAS_TREE": True},
}
TREE_INPUTS = ("ancestors_ptr", "tree_starts_ptr", "ancestors_out_ptr", "tree_starts_out_ptr")
HIDDEN_INPUTS = ("hidden_ptr", "hidden_out_ptr")
HEADS = {"NUM_KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_D": 128}

EXPERT_INTEGERS = {f"{name}_ptr": "*i32" for name in ("experts", "order", "blocks")}
SHARED = {f"{name}_ptr": "*i32" for name in ("counts", "tiles", "members", "places", "starts")} | {
    "own_sums_ptr": "*fp32",
    "own_stats_ptr": "*fp32",
}
UNPACKED = {"tree_starts_ptr": None, "q_starts_ptr": None}
# As launched without trees of drafts, with them, with those of earlier steps in a packed one and KV
# that is not there, and with the latter alone; all but the first with a guarded page table.
MASKS: dict[str, dict[str, Any]] = {
    "plain": {
        "HAS_TREE": False,
        "ancestors_ptr": None,
        "outside_ptr": None,
        "kv_starts_ptr": None,
        **UNPACKED,
    },
    "trees": {"HAS_TREE": True, **UNPACKED, "kv_starts_ptr": None},
    "packed, earlier trees, holes": {"HAS_TREE": True},
    "holes": {"HAS_TREE": False, "ancestors_ptr": None, "tree_starts_ptr": None},
}


@dataclass(frozen=True)
class Kernel:
    """A kernel and how it is launched."""

    function: Any
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    types: dict[str, str] = field(default_factory=dict)

    def signature(self, dtype: str) -> dict[str, str]:
        """Types of all arguments."""
        found = {}
        for name in self.function.arg_names:
            if name in self.constants:
                found[name] = "constexpr"
            elif name in self.types:
                found[name] = self.types[name]
            elif name.endswith("_ptr"):
                found[name] = f"*{dtype}"
                found[name] = "*i64" if name in INTEGERS else found[name]
                found[name] = "*i32" if name in SHORT_INTEGERS else found[name]
                found[name] = "*fp32" if name in FLOATS else found[name]
            else:
                found[name] = "fp32" if name in ("eps", "scale") else "i32"
        return found


def attention_constants(block_m: int, block_n: int, window: bool, **more: float) -> dict[str, Any]:
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    return {**HEADS, "HAS_WINDOW": window, "SOFTCAP": 0.0, **blocks, **more}


def tree_kernels(
    name: str, function: Any, variants: tuple[str, ...], num_warps: int = 4, **constants: Any
) -> dict[str, Any]:
    """Makes those of MASKS that are named: for each function all of them, for each tile some."""
    return {
        f"{name}, {variant}": Kernel(
            function,
            {
                argument: value
                for argument, value in {**constants, **MASKS[variant]}.items()
                if argument in function.arg_names
            },
            num_warps=num_warps,
            num_stages=2,
        )
        for variant in variants
    }


def few_rows(shape: few.FewRows, is_gated: bool, is_scaled: bool) -> Kernel:
    """The product of few rows with a weight of 16 bits, or of 8 bits with scales."""
    constants = {
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "BLOCK_K": shape.block_k,
        "GATED": is_gated,
        "EXACT_K": min(few.EXACT_COLUMNS, shape.block_k),
    }
    scales = {"row_scales_ptr": "*fp32", "scales_ptr": "*fp32"}
    if not is_scaled:
        constants, scales = {**constants, **dict.fromkeys(scales)}, {}
    types = scales | {"x_ptr": "*fp8e4nv", "weight_ptr": "*fp8e4nv"} if is_scaled else {}
    function = few._few_rows_kernel
    return Kernel(function, constants, shape.num_warps, shape.num_stages, types)


def experts_product(
    num_rows: int, is_gated: bool, is_even: bool = True, limit: int = 227 << 10
) -> Kernel:
    """The product that so many rows of Qwen3-30B-A3B launch."""
    tiles = ExpertTiles.choose(8 * num_rows, 128, 2, limit)
    tile = tiles.gate_up if is_gated else tiles.down
    return Kernel(
        experts.product_kernel,
        {
            "NUM_CHOSEN": 8,
            "GATED": is_gated,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "IS_EVEN": is_even,
        },
        tile.num_warps,
        tile.num_stages,
        EXPERT_INTEGERS,
    )


def route(num_experts: int, num_chosen: int, is_alone: bool) -> Kernel:
    constants = {
        "NUM_CHOSEN": num_chosen,
        "NORMALIZES": is_alone,
        "IS_ALONE": is_alone,
        "BLOCK_E": num_experts,
        "BLOCK_C": triton.next_power_of_2(num_chosen),
    }
    return Kernel(experts.route_kernel, constants, 1, types=EXPERT_INTEGERS)


def row_division(num_reqs: int, num_drafts: int, num_masks: int, own_rows: bool) -> Kernel:
    options = rows.tile_and_warps(num_reqs)
    num_warps = options.pop("num_warps")
    return Kernel(
        rows._divide_kernel,
        {
            "MAX_DRAFTS": num_drafts,
            "MAX_MASKS": num_masks,
            **options,
            **({"rows_ptr": None} if own_rows else {}),
        },
        num_warps=num_warps,
        types={
            **STEP_INTEGERS,
            **{f"{name}_ptr": "*i64" for name in ("least", "num_drafts", "num_masks")},
            **{f"{name}_confidence_ptr": "*fp32" for name in ("draft", "mask")},
            "values_ptr": "*i32",
        },
    )


def beams(topk: int, is_first: bool, has_next: bool, has_own_ids: bool) -> Kernel:
    block = max(2, triton.next_power_of_2(topk if is_first else topk**2))
    constants = {
        "TOPK": topk,
        "IS_FIRST": is_first,
        "HAS_NEXT": has_next,
        "BLOCK": block,
        "BLOCK_ROWS": max(2, triton.next_power_of_2(topk)),
        "BLOCK_HIDDEN": 1024,
        **({"target_ids_ptr": None} if has_own_ids else {}),
        **({} if has_next else {"hidden_out_ptr": None}),
    }
    return Kernel(trees.grow_kernel, constants, trees.warps_of_beams(block), types=TREE_SEARCH)


KERNELS = {
    "norm of a sum": Kernel(
        ops._add_rms_norm_kernel, {"HAS_RESIDUAL": True, "BLOCK": 4096}, num_warps=8
    ),
    "activation": Kernel(ops._silu_and_mul_kernel, {"BLOCK": 1024}),
    "rotation of normalized heads": Kernel(
        ops._rotate_and_store_kernel,
        {"NUM_KV_HEADS": 8, "GROUP": 4, "HALF": 64, "BLOCK_G": 8, "BLOCK_H": 64},
        num_warps=1,
        types={"table_ptr": "*fp32"},
    ),
    "rotation by token": Kernel(
        ops._rotate_and_store_kernel,
        {
            "NUM_KV_HEADS": 8,
            "GROUP": 4,
            "HALF": 64,
            "BLOCK_G": 8,
            "BLOCK_H": 64,
            **dict.fromkeys(("positions_ptr", "q_norm_ptr", "k_norm_ptr")),
        },
        num_warps=1,
    ),
    "16 rows": few_rows(few.FewRows(16, 32, 256, 6, 4), False, False),
    "64 rows": few_rows(few.FewRows(64, 128, 128, 3, 4), False, False),
    "16 rows, gated": few_rows(few.FewRows(16, 64, 128, 3, 4), True, False),
    "64 rows, gated": few_rows(few.FewRows(64, 64, 128, 3, 4), True, False),
    **{
        f"a tile of a product{', gated' * gated}{', not even' * (not is_even)}": Kernel(
            ordered_products.tile_kernel,
            {
                "BLOCK_M": 128,
                "BLOCK_N": 128,
                "BLOCK_K": 64,
                "GATED": gated,
                "IS_EVEN": is_even,
                "BAND": ordered_products.BAND,
                **({"bias_ptr": None} if is_even else {}),
            },
            num_warps=8,
        )
        for gated in (False, True)
        for is_even in (False, True)
    },
    "experts of one row": route(128, 8, True),
    "experts of rows": route(512, 32, False),
    "rows by expert": Kernel(
        experts.group_kernel,
        {"BLOCK_M": 16, "BLOCK_E": 128, "CHUNK": 4096},
        num_warps=8,
        types=EXPERT_INTEGERS,
    ),
    "gated products of experts": experts_product(1, True),
    "products of experts, not even": experts_product(32, False, is_even=False),
    **{
        f"exchange of ranks, {type_name}": Kernel(
            rank_exchange._exchange_kernel,
            {
                "RANK": 1,
                "NUM_RANKS": 3,
                "TYPE": rank_exchange.TYPES[dtype],
                "IS_WORD": dtype == torch.float32,
                "BLOCK": rank_exchange.BLOCK,
            },
            types={"x_ptr": "*i32", "epochs_ptr": "*i32", "buffers_ptr": "*i64"},
        )
        for type_name, dtype in (("words", torch.float32), ("pairs", torch.bfloat16))
    },
    "blocks of ranks": Kernel(
        rank_exchange._exchange_blocks_kernel,
        {
            "RANK": 1,
            "NUM_RANKS": 2,
            "TYPE": rank_exchange.TYPES[torch.bfloat16],
            "VECTOR": 8,
            "BLOCK": rank_exchange.BLOCK_BYTES // 2,
            "NUM_BLOCKS": rank_exchange.PIECE_BYTES // rank_exchange.BLOCK_BYTES,
        },
        num_warps=8,
        types={"x_ptr": "*bf16", "epochs_ptr": "*i32", "buffers_ptr": "*i64"},
    ),
    "sum of experts": Kernel(experts.sum_kernel, {"NUM_CHOSEN": 8, "BLOCK": 512}),
    **tree_kernels(
        "prompts",
        attention._extend_kernel,
        ("packed, earlier trees, holes", "plain"),
        num_warps=4,
        **attention_constants(64, 64, False),
    ),
    **tree_kernels(
        "decodes in a window",
        attention._extend_kernel,
        ("trees", "holes"),
        num_warps=1,
        splits_ptr=None,
        **attention_constants(16, 32, True, SOFTCAP=50.0),
    ),
    **tree_kernels(
        "decodes",
        attention._extend_kernel,
        ("plain", "packed, earlier trees, holes"),
        num_warps=2,
        splits_ptr=None,
        **attention_constants(16, 64, False),
    ),
    **tree_kernels(
        "splits",
        attention._split_kernel,
        ("packed, earlier trees, holes", "plain"),
        **attention_constants(16, 32, False),
    ),
    **tree_kernels(
        "splits in a window",
        attention._split_kernel,
        ("trees", "holes"),
        **attention_constants(64, 64, True),
    ),
    **tree_kernels(
        "sum of splits",
        sums_kernel._combine_kernel,
        ("holes", "trees"),
        splits_ptr=None,
        **attention_constants(16, 32, True, ITEM_SIZE=4, BLOCK_S=64),
    ),
    **tree_kernels(
        "sum of prompts' splits",
        sums_kernel._combine_kernel,
        ("plain",),
        num_warps=1,
        **attention_constants(128, 128, False, ITEM_SIZE=5, BLOCK_S=8),
    ),
    **tree_kernels(
        "parts of KV",
        parts_kernel._parts_kernel,
        ("plain",),
        **attention_constants(64, 64, False, FIRST_LEN=128, LEAVES=False),
    ),
    **tree_kernels(
        "parts of KV that are left",
        parts_kernel._parts_kernel,
        ("holes",),
        **attention_constants(64, 64, True, FIRST_LEN=128, LEAVES=True),
    ),
    "sum of parts": Kernel(
        parts_kernel._add_up_kernel,
        {**HEADS, "HAS_WINDOW": True, "BLOCK_N": 64, "FIRST_LEN": 128, "ROWS": 4, "AT_ONCE": 8},
    ),
    "shared prefixes": Kernel(
        shared_kernel._prefix_kernel,
        {**HEADS, "BLOCK_M": 64, "BLOCK_N": 64, "SOFTCAP": 0.0, "TILE_SIZE": 4},
        types=SHARED,
    ),
    "sum with shared prefixes": Kernel(
        shared_kernel._add_up_kernel,
        {
            **HEADS,
            "BLOCK_M": 16,
            "BLOCK_N": 32,
            "TILE_M": 64,
            "TILE_N": 128,
            "TILE_SIZE": 4,
            "BLOCK_S": 1,
            "MAX_SPLITS": 16,
        },
        num_warps=1,
        types=SHARED,
    ),
    **{
        f"gathered KV, {'not ' if guard else ''}guarded": Kernel(
            gather_kernel._gather_kv_kernel,
            {"COLUMNS": 2048, "ALIGNMENT": 128, "BLOCK_ROWS": 32, "BLOCK_COLUMNS": 512, **guard},
            types={"places_ptr": "*i32"},
        )
        for guard in ({}, {"outside_ptr": None, "kv_starts_ptr": None})
    },
    **{
        f"{name}, {'not ' if guard else ''}guarded": Kernel(
            function, {"BLOCK": 128, **guard}, types=STEP_INTEGERS
        )
        for name, function in (
            ("page table", steps._write_table_kernel),
            ("end of a plain step", commit_kernel),
        )
        for guard in ({}, {"outside_ptr": None})
    },
    **{
        f"inputs of a graph{', packed' * is_packed}{', trees' * has_tree}"
        f"{', hidden states' * has_hidden}": Kernel(
            steps._fill_kernel,
            {
                "BLOCK": 128,
                "BLOCK_HIDDEN": 1024,
                "IS_PACKED": is_packed,
                "HAS_TREE": has_tree,
                "HAS_HIDDEN": has_hidden,
                **({} if has_hidden else dict.fromkeys(HIDDEN_INPUTS)),
                **({} if is_packed else {"q_starts_ptr": None, "q_starts_out_ptr": None}),
                **({} if has_tree else dict.fromkeys(TREE_INPUTS)),
            },
            types=STEP_INTEGERS,
        )
        for is_packed in (False, True)
        for has_tree in (False, True)
        for has_hidden in (False, True)
    },
    **{
        f"rows of a step, {kind}, {'not ' if guard else ''}guarded": Kernel(
            lay_out_kernel, {"BLOCK": 128, **constants, **guard}, types=STEP_INTEGERS
        )
        for kind, constants in LAYOUTS.items()
        for guard in ({}, {"outside_ptr": None})
    },
    **{
        f"end of a step with look-ahead, {'' if unconfirmed else 'all '}confirmed": Kernel(
            commit_run_kernel,
            {"BLOCK": 8, "HAS_UNCONFIRMED": unconfirmed}
            | ({} if unconfirmed else {"num_unconfirmed_ptr": None}),
            num_warps=1,
            types=STEP_INTEGERS,
        )
        for unconfirmed in (True, False)
    },
    **{
        f"drafts{', no confidence' * (not is_asked)}": Kernel(
            _write_drafts_kernel,
            {"BLOCK": 8} | ({} if is_asked else {"confidence_ptr": None, "told_ptr": None}),
            num_warps=1,
            types=STEP_INTEGERS
            | {"rows_ptr": "*i64", "num_drafts_ptr": "*i64"}
            | {"confidence_ptr": "*fp32", "told_ptr": "*fp32"},
        )
        for is_asked in (True, False)
    },
    **{
        name: Kernel(kernel, {"BLOCK": 64}, types=STEP_INTEGERS)
        for name, kernel in (
            ("rows wanted of a packed step", packing._wanted_kernel),
            ("counts of a packed step", packing._packed_counts_kernel),
        )
    },
    **{
        f"{name}, probabilities: {has_probs}": Kernel(
            kernel,
            {"BLOCK": 8, "HAS_PROBS": has_probs} | ({} if has_probs else {"probs_ptr": None}),
            num_warps=1,
            types=STEP_INTEGERS
            | {f"{name}_ptr": "*fp32" for name in ("probs", "thresholds", "confidence")},
        )
        for name, kernel in (
            ("confident predictions", masks._num_confident_kernel),
            ("proposed drafts", masks._propose_kernel),
        )
        for has_probs in (True, False)
    },
    **{
        f"beams of {topk}, {'first' if is_first else 'later'}, {'not ' * has_next}last": beams(
            topk, is_first, has_next, has_own_ids=topk == 4
        )
        for topk in (1, 4, 8, trees.MOST_TOPK)
        for is_first in (True, False)
        for has_next in (True, False)
    },
    "trees of what beams found": Kernel(
        trees.best_kernel, {"BLOCK": trees.BEST_BLOCK, "CHUNK": 64}, types=TREE_SEARCH
    ),
    **{
        f"rows of confirmed paths, {'not ' if known else ''}packed": Kernel(
            paths.path_rows_kernel,
            {"BLOCK": paths.BLOCK, **known},
            num_warps=2,
            types=STEP_INTEGERS
            | {f"{name}_ptr": "*i64" for name in ("kept", "ends", "rows", "positions")},
        )
        for known in ({}, {"kept_ptr": None})
    },
    **{
        f"places of n-grams, {does}": Kernel(
            ngrams._search_kernel,
            {"SHORTEST": 1, "LONGEST": 17, "NUM_PARTS": 64, "BLOCK": 1024, "DOES": number},
            types=NGRAM_INTEGERS,
        )
        for number, does in enumerate(("by length", "counted", "by counts"))
    },
    "what follows n-grams": Kernel(
        ngrams._continue_kernel,
        {"NUM_PARTS": 64, "BLOCK": 16},
        num_warps=1,
        types=NGRAM_INTEGERS,
    ),
    **{
        f"rows of {num_reqs} requests, {num_drafts} drafts, {num_masks} masks": row_division(
            num_reqs, num_drafts, num_masks, own_rows
        )
        for num_reqs, num_drafts, num_masks, own_rows in (
            (1, 7, 8, False),
            (64, 7, 8, True),
            (256, 15, 16, False),
            (512, 64, 16, False),
            (33, 0, 0, False),
        )
    },
}


def compiled(kernel: Kernel, capability: int, dtype: str, aligned: bool = False) -> Any:
    """For a GPU of that compute capability; `aligned`: pointers and sizes are multiples of 16, as
    they are of real weights, so that the compiler loads ahead."""
    constants = {**kernel.constants, "PDL": capability >= 90}
    source = ASTSource(
        fn=kernel.function,
        signature=Kernel(kernel.function, constants, types=kernel.types).signature(dtype),
        constexprs=constants,
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(kernel.function.arg_names)
            if aligned and name not in constants and name not in NEVER_ALIGNED
        },
    )
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def variants_of_kernels() -> tuple[list[Any], list[Any]]:
    """Gives each variant one of TARGETS, in turn; the kernels' first variants, and the others."""
    variants: dict[Any, list[str]] = {}
    for name, kernel in KERNELS.items():
        variants.setdefault(kernel.function, []).append(name)
    first, others = [], []
    for place, names in enumerate(variants.values()):
        for number, name in enumerate(names):
            target = TARGETS[(place + number) % len(TARGETS)]
            (others if number else first).append((name, *target))
    return first, others


FIRST, OTHERS = variants_of_kernels()


@pytest.mark.long_matrix
@pytest.mark.parametrize(("name", "capability", "dtype"), FIRST)
def test_a_kernel_compiles(name: str, capability: int, dtype: str) -> None:
    assert compiled(KERNELS[name], capability, dtype).asm["cubin"]


@pytest.mark.long_matrix
@pytest.mark.parametrize(("name", "capability", "dtype"), OTHERS)
def test_another_variant_compiles(name: str, capability: int, dtype: str) -> None:
    assert compiled(KERNELS[name], capability, dtype).asm["cubin"]


def test_rounding_to_8_bits_compiles_where_gpus_multiply_so_and_keeps_nan() -> None:
    codes = {"codes_ptr": "*fp8e4nv", "weight_ptr": "*fp8e4nv"}
    types = {**codes, "scales_ptr": "*fp32", "largest": "fp32"}
    for capability, ahead in ((89, 0), (90, 0), (90, 8)):
        constants = {"BLOCK": 4096, "AHEAD": ahead}
        kernel = Kernel(few._round_rows_kernel, constants, num_warps=8, types=types)
        ptx = compiled(kernel, capability, "bf16").asm["ptx"]
        assert "min.NaN" in ptx
        assert ("prefetch" in ptx) == bool(ahead)


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("head_dim", "group", "dtype", "has_window", "has_holes"),
    [
        (*heads, dtype, (place + number) % 2 == 1, (place + number // 2) % 2 == 0)
        for place, heads in enumerate([(128, 4), (128, 7), (64, 1)])
        for number, dtype in enumerate(prompt_kernel.DTYPES)
    ],
)
def test_attention_of_prompts_compiles_for_hopper_and_fits(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    has_window: bool,
    has_holes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every pair of heads, type and window, not all three together."""
    layout = prompt_kernel.tile_layout(head_dim, dtype)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    block_n = prompt_kernel.BLOCK_N
    constants = {
        "NUM_KV_HEADS": 2,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HAS_WINDOW": has_window,
        "BLOCK_M": prompt_kernel.BLOCK_M,
        "BLOCK_N": block_n,
        "RING": prompt_kernel.RING,
    }
    types = {
        "kv_desc": f"tensordesc<{name}[{block_n}, {head_dim}],{layout!r}>",
    }
    if not has_holes:
        constants["kv_starts_ptr"] = None
    function = prompt_kernel._prompt_kernel
    source = GluonASTSource(
        fn=function,
        signature={**Kernel(function, constants).signature(name), **types},
        constexprs={
            (place,): constants[argument]
            for place, argument in enumerate(function.arg_names)
            if argument in constants
        },
        attrs={},
    )
    target = GPUTarget("cuda", 90, 32)
    made = triton.compile(source, target=target, options={"num_warps": 4})
    assert made.asm["cubin"]
    assert made.metadata.shared <= shared_bytes(90, monkeypatch)


def shared_bytes(capability: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the bytes of shared memory of a GPU of that compute capability."""
    pair = divmod(capability, 10)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pair)
    found: int = platform.shared_memory_bytes.__wrapped__(torch.device("cuda"))
    return found


FEW_ROWS_ON = (*((capability, 2) for capability in GPUS), (89, 1), (90, 1))


def heights_of_tiles(item_bytes: int) -> tuple[int, ...]:
    return (16, 32, 64, 128) if item_bytes == 1 else (16, 32, 64)


def staged(gated: bool, shape: few.FewRows) -> int:
    """Counts the numbers of which the products of all stages are made."""
    return (shape.block_m + (1 + gated) * shape.block_n) * shape.block_k * shape.num_stages


def largest_few_rows(
    capability: int, item_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[bool, int], few.FewRows]:
    """Finds, of gated products and others and for each height of tiles, the shape of those chosen
    for Llama 8B that keeps most in shared memory."""
    limit = shared_bytes(capability, monkeypatch)
    most = few.MAX_SCALED_ROWS if item_bytes == 1 else few.MAX_FEW_ROWS
    weights = [(6144, 4096), (4096, 4096), (4096, 14336), (28672, 4096), (128256, 4096)]
    cases = [(*weight, False) for weight in weights] + [(28672, 4096, True)]
    shapes = {
        (gated, few.FewRows.choose(rows, *weight, limit, gated, item_bytes))
        for rows in (1, 17, 64, most)
        for *weight, gated in cases
    }
    assert len(shapes) >= 8

    largest = {}
    for gated, shape in sorted(shapes, key=lambda found: staged(*found)):
        assert shape is not None
        assert shape.num_stages >= 2, "Nothing would be loaded ahead."
        largest[gated, shape.block_m] = shape
    return largest


@pytest.mark.parametrize(("capability", "item_bytes"), FEW_ROWS_ON)
def test_products_of_few_rows_load_ahead_in_tiles_of_all_heights(
    capability: int, item_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler keeps num_stages - 1 stages in shared memory at least; those must fit."""
    found = largest_few_rows(capability, item_bytes, monkeypatch)
    heights = heights_of_tiles(item_bytes)
    assert found.keys() == {(gated, height) for gated in (False, True) for height in heights}
    limit = shared_bytes(capability, monkeypatch)
    for (gated, _), shape in found.items():
        in_all_but_one = staged(gated, shape) * (shape.num_stages - 1) // shape.num_stages
        assert in_all_but_one * item_bytes <= limit


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("capability", "item_bytes", "gated", "block_m"),
    [
        (capability, item_bytes, gated, block_m)
        for capability, item_bytes in FEW_ROWS_ON
        for gated in (False, True)
        for block_m in heights_of_tiles(item_bytes)
    ],
)
def test_products_of_few_rows_fit_into_the_shared_memory(
    capability: int, item_bytes: int, gated: bool, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = largest_few_rows(capability, item_bytes, monkeypatch)[gated, block_m]
    kernel = few_rows(shape, gated, item_bytes == 1)
    dtype = "bf16" if capability >= 90 else "fp16"
    limit = shared_bytes(capability, monkeypatch)
    assert 0 < compiled(kernel, capability, dtype, aligned=True).metadata.shared <= limit


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_blocks_of_8_bits_divide_the_parts_that_ranks_have(num_ranks: int) -> None:
    """Takes the shapes of Llama 8B."""
    parts = [
        *((6144 // num_ranks, 4096, False), (4096, 4096 // num_ranks, False)),
        *((28672 // num_ranks, 4096, True), (4096, 14336 // num_ranks, False)),
    ]
    for num_rows in (1, 17, 33, 65):
        for out_features, in_features, is_gated in parts:
            tiles = few.FewRows.choose(num_rows, out_features, in_features, 227 << 10, is_gated, 1)
            assert tiles is not None, (num_rows, out_features, in_features)
            assert out_features % tiles.block_n == in_features % tiles.block_k == 0


@pytest.mark.long_matrix
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(("num_rows", "is_gated"), [(32, True), (512, True), (4096, False)])
def test_products_of_experts_fit_into_the_shared_memory(
    capability: int, num_rows: int, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = shared_bytes(capability, monkeypatch)
    kernel = experts_product(num_rows, is_gated, limit=limit)
    dtype = "bf16" if capability >= 90 else "fp16"
    assert 0 < compiled(kernel, capability, dtype, aligned=True).metadata.shared <= limit


@pytest.mark.long_matrix
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_attention_fits_into_the_shared_memory(
    capability: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = shared_bytes(capability, monkeypatch)
    monkeypatch.setattr(triton_tuning, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(triton_tuning, "shared_memory_bytes", lambda device: limit)
    tuning = triton_tuning.Tuning.choose(torch.device("cuda"), torch.bfloat16, head_dim, 4)
    heads = {"HEAD_DIM": head_dim, "BLOCK_D": head_dim}
    all_tiles = {tuning.extend, tuning.few, tuning.split, tuning.whole, tuning.crowded}
    # What it loads ahead, and the queries.
    largest = sorted(
        all_tiles, key=lambda tiles: tiles.block_m + 2 * tiles.block_n * tiles.num_stages
    )
    for tiles in largest[-2:]:
        constants = attention_constants(tiles.block_m, tiles.block_n, True)
        constants |= {"splits_ptr": None}
        constants |= {**heads, "HAS_TREE": False, "ancestors_ptr": None, "outside_ptr": None}
        constants |= {"tree_starts_ptr": None, "kv_starts_ptr": None}
        kernel = Kernel(attention._extend_kernel, constants, tiles.num_warps, tiles.num_stages)
        assert 0 < compiled(kernel, capability, "bf16", aligned=True).metadata.shared <= limit
    constants = {**HEADS, **heads, "SOFTCAP": 0.0, "TILE_SIZE": 4}
    constants |= {"BLOCK_M": tuning.shared.block_m, "BLOCK_N": tuning.shared.block_n}
    more = tuning.shared.num_warps, tuning.shared.num_stages, SHARED
    kernel = Kernel(shared_kernel._prefix_kernel, constants, *more)
    assert 0 < compiled(kernel, capability, "bf16", aligned=True).metadata.shared <= limit
