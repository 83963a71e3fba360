"""Attention of prompts on Hopper GPUs: one Gluon kernel over K and V that lie side by side.

The algorithm is FlashAttention 3's (arXiv 2407.08608, sections 3.1 and 3.2). One warp copies tiles
of K and V into a ring in shared memory by the tensor memory accelerator (TMA). Two warp groups each
attend 64 packed rows: while the tensor cores multiply the scores of tile j and the weighted V of
tile j - 1, the softmax of tile j is computed. Tiles are gone over from the last to the first, so
those that need masks come first.

An item is five int32: the four of `items.py`, and the row of the gathered KV where the request's
first position lies, a multiple of BLOCK_N. Packed rows are laid out as there, but those of the
second warp group follow its first row. The device knows among how many programs the KV of each item
is split; if there are several, `add_up_splits` adds up what they leave.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang.srt.layers.attention.triton_ops.items import ITEM_SIZE
from sglang.srt.layers.attention.triton_ops.kernels import (
    Paged,
    stats_and_sums,
)

try:
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load
except ImportError:  # its name before Triton 3.8
    from triton.experimental.gluon.language.nvidia.hopper.tma import (
        async_copy_global_to_shared as async_load,
    )

LOG2_E = 1.4426950408889634
PROMPT_ITEM_SIZE = ITEM_SIZE + 1
BLOCK_M = 64  # packed rows of a warp group
PACKED_ROWS = 2 * BLOCK_M  # of an item
BLOCK_N = 128  # KV positions of a tile
RING = 4  # tiles of K and V in shared memory
HEAD_DIMS = (64, 128)  # larger ones need more registers than there are
DTYPES = (torch.bfloat16, torch.float16)
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)


def rows_per_item(group: int) -> int:
    """Query rows of an item at most, where `group` query heads share a KV head."""
    return 2 * (BLOCK_M // group)


@gluon.jit
def _produce(
    kv_desc, ring, filled, emptied, kv_start, last_tile, num_tiles, k_column, v_column,
    BLOCK_N: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of K and V in the order in which they are read: K0 K1 V0 K2 V1 ... Vn."""
    for index in range(2 * num_tiles):
        is_v = ((index > 0) & (index % 2 == 0)) | (index == 2 * num_tiles - 1)
        tile = (index + 1) // 2 - is_v.to(gl.int32)
        column = gl.where(is_v, v_column, k_column)
        place = index % RING
        mbarrier.wait(emptied.index(place), ((index // RING) & 1) ^ 1)
        mbarrier.expect(filled.index(place), BLOCK_N * kv_desc.block_type.shape[1] * 2)
        row = kv_start + (last_tile - tile) * BLOCK_N
        async_load(kv_desc, [row, column], filled.index(place), ring.index(place))


@gluon.jit
def _next_weights(
    scores, top, total, positions, tile_start, window, scale,
    MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The running softmax over one more tile: weights, top, total, and what the sums so far have to
    be multiplied with."""
    if MASKED:
        place = tile_start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        seen = place[None, :] <= positions[:, None]
        if HAS_WINDOW:
            seen = seen & (place[None, :] > positions[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_top[:, None])
    decay = gl.exp2(top - new_top)
    return weights, new_top, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def _attend_tile(
    index, q_tile, ring, filled, emptied, weights, acc, top, total, positions, last_tile, window,
    scale, MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Scores of tile `index`, and V of the tile before it by `weights`. These are float32 between
    tiles: of 16-bit values that a loop carries the compiler swaps the halves, twice."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    k_index = 2 * index - 1
    v_index = 2 * index
    nothing = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=SCORES)
    mbarrier.wait(filled.index(k_index % RING), (k_index // RING) & 1)
    k = ring.index(k_index % RING).permute((1, 0))
    scores = warpgroup_mma(q_tile, k, nothing, use_acc=False, is_async=True)
    mbarrier.wait(filled.index(v_index % RING), (v_index // RING) & 1)
    weights = gl.convert_layout(weights.to(ring.dtype), gl.DotOperandLayout(0, SUMS, 2))
    acc = warpgroup_mma(weights, ring.index(v_index % RING), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(emptied.index(k_index % RING), count=1)
    weights, top, total, decay = _next_weights(
        scores, top, total, positions, (last_tile - index) * BLOCK_N, window, scale,
        MASKED, HAS_WINDOW, BLOCK_N, SCORES,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(emptied.index(v_index % RING), count=1)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
    return weights, acc, top, total


@gluon.jit
def _load_rows(
    q_ptr, q_tile, first_token, num_rows, head, q_token, q_head,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Packed rows to shared memory, where the tensor cores read them; zeros for those that are not
    there."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    token = (first_token + row // GROUP).to(gl.int64)
    offsets = (token * q_token + (head * GROUP + row % GROUP) * q_head)[:, None] + dim[None, :]
    q_tile.store(gl.load(q_ptr + offsets, mask=(row // GROUP < num_rows)[:, None], other=0.0))
    fence_async_shared()  # the compiler adds the barrier


@gluon.jit
def _leave_sums(
    first, num_rows, acc, top, total, sums_ptr, stats_ptr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    SUMS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Packed rows to the workspace from its row `first` on, for `add_up_splits`."""
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SUMS))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, SUMS))
    place = sums_ptr + (first + row)[:, None] * HEAD_DIM + dim[None, :]
    gl.store(place, acc, mask=(row // GROUP < num_rows)[:, None])
    stat = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
    exists = stat // GROUP < num_rows
    gl.store(stats_ptr + (first + stat) * 2, top, mask=exists)
    gl.store(stats_ptr + (first + stat) * 2 + 1, total, mask=exists)


@gluon.jit
def _write_rows(
    out, out_ptr, first_token, num_rows, head,
    GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """The results of packed rows, to where they belong."""
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SUMS))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, SUMS))
    packed = (first_token + row // GROUP).to(gl.int64) * (NUM_KV_HEADS * GROUP)
    packed += head * GROUP + row % GROUP
    place = out_ptr + packed[:, None] * HEAD_DIM + dim[None, :]
    gl.store(place, out, mask=(row // GROUP < num_rows)[:, None])


@gluon.jit
def _end_rows(
    WARP_GROUP: gl.constexpr, acc, top, total, out_ptr, sums_ptr, stats_ptr, first_token, num_rows,
    head, num_splits, DTYPE: gl.constexpr, GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, SUMS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Writes the result of a warp group or, if the KV is split, what it has found in its share."""
    if num_splits > 1:
        share = gl.program_id(0) // NUM_KV_HEADS
        part = share // num_splits * NUM_KV_HEADS + head
        part = part * num_splits + share % num_splits
        _leave_sums(
            part * (2 * BLOCK_M) + WARP_GROUP * (BLOCK_M // GROUP * GROUP), num_rows,
            acc, top, total, sums_ptr, stats_ptr, GROUP, HEAD_DIM, BLOCK_M, SUMS, SCORES,
        )  # fmt: skip
    else:
        out = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))[:, None]
        _write_rows(
            out.to(DTYPE), out_ptr, first_token, num_rows, head,
            GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_M, SUMS,
        )  # fmt: skip


@gluon.jit
def _consume(
    WARP_GROUP: gl.constexpr, q_ptr, out_ptr, sums_ptr, stats_ptr, q_tile, ring, filled, emptied,
    first_token, num_rows, position, head, q_token, q_head, last_tile, num_tiles, num_splits,
    window, scale,
    GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_WINDOW: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """One of two warp groups: attends its BLOCK_M packed rows of the item, and writes their result
    or, if the KV is split, acc, top and total. If the item has no rows for it, it only takes part
    in emptying the ring."""
    ROWS: gl.constexpr = BLOCK_M // GROUP
    first_token += WARP_GROUP * ROWS
    position += WARP_GROUP * ROWS
    num_rows = gl.minimum(num_rows - WARP_GROUP * ROWS, ROWS)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    _load_rows(
        q_ptr, q_tile, first_token, num_rows, head, q_token, q_head, GROUP, HEAD_DIM, BLOCK_M
    )  # fmt: skip
    positions = position + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES)) // GROUP
    # Finite, so that a row that has seen nothing yet is scaled by exp2(0), never by exp2(nan).
    top = gl.full([BLOCK_M], -1e30, gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.full([BLOCK_M], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    acc = gl.full([BLOCK_M, HEAD_DIM], 0.0, gl.float32, layout=SUMS)
    nothing = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=SCORES)
    mbarrier.wait(filled.index(0), 0)
    k = ring.index(0).permute((1, 0))
    scores = warpgroup_mma(q_tile, k, nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(emptied.index(0), count=1)
    weights, top, total, _ = _next_weights(
        scores, top, total, positions, last_tile * BLOCK_N, window, scale,
        True, HAS_WINDOW, BLOCK_N, SCORES,
    )  # fmt: skip
    if HAS_WINDOW:
        num_masked = num_tiles
    else:  # tiles before this one are seen whole by the first row, so by all
        num_masked = gl.minimum(num_tiles, last_tile + 1 - (position + 1) // BLOCK_N)
    for index in range(1, num_masked):
        weights, acc, top, total = _attend_tile(
            index, q_tile, ring, filled, emptied, weights, acc, top, total, positions, last_tile,
            window, scale, True, HAS_WINDOW, HEAD_DIM, BLOCK_M, BLOCK_N, RING,
        )  # fmt: skip
    for index in range(gl.maximum(num_masked, 1), num_tiles):
        weights, acc, top, total = _attend_tile(
            index, q_tile, ring, filled, emptied, weights, acc, top, total, positions, last_tile,
            window, scale, False, False, HEAD_DIM, BLOCK_M, BLOCK_N, RING,
        )  # fmt: skip
    v_index = 2 * num_tiles - 1
    mbarrier.wait(filled.index(v_index % RING), (v_index // RING) & 1)
    weights = gl.convert_layout(weights.to(ring.dtype), gl.DotOperandLayout(0, SUMS, 2))
    acc = warpgroup_mma(weights, ring.index(v_index % RING), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    _end_rows(
        WARP_GROUP, acc, top, total, out_ptr, sums_ptr, stats_ptr, first_token, num_rows, head,
        num_splits, ring.dtype, GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_M, SUMS, SCORES,
    )  # fmt: skip


@gluon.jit
def _position(item, rows_ptr, kv_lens_ptr, kv_starts_ptr):
    """Returns the position of an item's first row among the KV that is seen; `kv_starts_ptr` may be
    None."""
    request = gl.load(item)
    position = gl.load(kv_lens_ptr + request).to(gl.int32) - gl.load(item + 3)
    if kv_starts_ptr is not None:
        position -= gl.load(kv_starts_ptr + gl.load(rows_ptr + request)).to(gl.int32)
    return position


@gluon.jit
def _share(
    position, num_rows, window, split, num_splits, HAS_WINDOW: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """The first tile of a split of the KV that an item sees, and the number of its tiles, as
    `split_len` divides them; 0 or less of a split without a share."""
    first_tile = position * 0
    if HAS_WINDOW:
        first_tile = gl.maximum(position - window + 1, 0) // BLOCK_N
    end_tile = gl.cdiv(position + num_rows, BLOCK_N)
    length = gl.maximum(gl.cdiv(end_tile - first_tile, num_splits), 1)
    first_tile += split * length
    return first_tile, gl.minimum(end_tile - first_tile, length)


@gluon.jit(do_not_specialize=["splits_ptr", "window", "num_items"])
def _prompt_kernel(
    q_ptr, kv_desc, out_ptr, sums_ptr, stats_ptr, items_ptr, splits_ptr, rows_ptr, kv_lens_ptr,
    kv_starts_ptr, q_token, q_head, window, scale, num_items,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_WINDOW: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Grid (items x splits x KV heads, or more): the heads of a split are next to each other, and
    so are the splits of an item."""
    head = gl.program_id(0) % NUM_KV_HEADS
    num_splits = gl.load(splits_ptr)
    index = gl.program_id(0) // NUM_KV_HEADS // num_splits
    item = items_ptr + gl.minimum(index, num_items - 1) * 5
    num_rows = gl.where(index < num_items, gl.load(item + 2) & 255, 0)
    first_token = gl.load(item + 1)
    position = _position(item, rows_ptr, kv_lens_ptr, kv_starts_ptr)
    split = gl.program_id(0) // NUM_KV_HEADS % num_splits
    first_tile, num_tiles = _share(
        position, num_rows, window, split, num_splits, HAS_WINDOW, BLOCK_N
    )
    if (num_rows > 0) & (position >= 0) & (num_tiles > 0):
        kv_start = gl.load(item + 4)
        last_tile = first_tile + num_tiles - 1

        dtype: gl.constexpr = kv_desc.dtype
        Q_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype)
        q_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_M, HEAD_DIM], Q_TILE)
        ring = gl.allocate_shared_memory(dtype, [RING, BLOCK_N, HEAD_DIM], kv_desc.layout)
        filled = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        emptied = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        for place in gl.static_range(RING):
            mbarrier.init(filled.index(place), count=1)
            mbarrier.init(emptied.index(place), count=2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consume, (
                    0, q_ptr, out_ptr, sums_ptr, stats_ptr, q_tiles.index(0), ring,
                    filled, emptied, first_token, num_rows, position, head, q_token, q_head,
                    last_tile, num_tiles, num_splits, window, scale,
                    GROUP, NUM_KV_HEADS, HEAD_DIM, HAS_WINDOW, BLOCK_M, BLOCK_N, RING,
                )),
                (_consume, (
                    1, q_ptr, out_ptr, sums_ptr, stats_ptr, q_tiles.index(1), ring,
                    filled, emptied, first_token, num_rows, position, head, q_token, q_head,
                    last_tile, num_tiles, num_splits, window, scale,
                    GROUP, NUM_KV_HEADS, HEAD_DIM, HAS_WINDOW, BLOCK_M, BLOCK_N, RING,
                )),
                (_produce, (
                    kv_desc, ring, filled, emptied, kv_start, last_tile, num_tiles,
                    head * HEAD_DIM, (NUM_KV_HEADS + head) * HEAD_DIM, BLOCK_N, RING,
                )),
            ],
            [4, 1],
            [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
        )  # fmt: skip


@cache
def tile_layout(head_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Returns the layout of a tile of K or V in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([BLOCK_N, head_dim], _GLUON_TYPES[dtype])


_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def describe_gathered(gathered: torch.Tensor) -> TensorDescriptor:
    """Returns the descriptor by which `attend_prompts` reads tiles.

    Args:
        gathered: [rows, 2 * num_kv_heads, head_dim] contiguous, of one of `DTYPES`.
    """
    head_dim = gathered.shape[2]
    return TensorDescriptor.from_tensor(
        gathered.flatten(1), [BLOCK_N, head_dim], tile_layout(head_dim, gathered.dtype)
    )


def attend_prompts(
    q: torch.Tensor, kv: TensorDescriptor, out: torch.Tensor, items: torch.Tensor, paged: Paged,
    window: int | None, num_splits: torch.Tensor, workspace: torch.Tensor, num_shares: int,
) -> None:  # fmt: skip
    """Causal attention of `items` [I, 5] int32 (see above), those of most KV first. With several
    splits, `add_up_splits` makes the result of what they leave in the workspace.

    Args:
        q: [T, num_heads, head_dim], any strides but the last.
        kv: of the gathered K and V; rows past a request's end, up to a whole tile, are finite.
        out: [T, num_heads * head_dim] contiguous; the items' rows are written.
        window: as in `AttentionBackend`.
        num_splits: [1] int32, of the KV of each item.
        workspace: float32, `workspace_size` elements of PACKED_ROWS packed rows.
        num_shares: items times splits, or more.
    """
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads = kv.shape[1] // (2 * head_dim)
    stats, sums = stats_and_sums(workspace, PACKED_ROWS, head_dim)
    _prompt_kernel[(num_shares * num_kv_heads,)](
        q, kv, out, sums, stats, items, num_splits, paged.rows, paged.kv_lens, paged.kv_starts,
        q.stride(0), q.stride(1), window or 0, paged.scores.scale_of(head_dim) * LOG2_E, len(items),
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        HAS_WINDOW=window is not None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, RING=RING, num_warps=4,
    )  # fmt: skip
