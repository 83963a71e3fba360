"""Ways to attend the rows of a prompt over a prefix that is there already.

Each takes `PromptInputs` and returns a `Way`: a call that attends one layer. Those that are for KV
side by side get it so, gathered before: what that takes is a way of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from benchmark.attention_inputs import Heads, PromptInputs
from sglang.srt.device_copies import to_device
from sglang.srt.layers.attention.flashinfer_backend import load_flashinfer, why_not_here
from sglang.srt.layers.attention.prompt_attention import (
    Prompt,
    PromptAttention,
    make_places,
)
from sglang.srt.layers.attention.triton_ops.gather_kernel import PLACE_SIZE, gather_kv
from sglang.srt.layers.attention.triton_ops.item_groups import ItemGroups, RowLimits
from sglang.srt.layers.attention.triton_ops.items import ITEM_SIZE
from sglang.srt.layers.attention.triton_ops.kernels import attend_items
from sglang.srt.layers.attention.triton_ops.prompt_kernel import (
    BLOCK_N,
    describe_gathered,
)
from sglang.srt.layers.attention.triton_tuning import Tuning
from sglang.srt.layers.triton_launch import ParallelLaunch
from sglang.srt.platform import has_warp_group_mma, num_multiprocessors

# Takes a layer and returns [num_rows, num_heads, head_dim], or for the gathering alone the K and V
# of the prompt [kv_len, 2 * num_kv_heads, head_dim].
Way = Callable[[int], torch.Tensor]
# Takes q [1, num_heads, T, head_dim], k and v [1, num_kv_heads, L, head_dim] and whether row i sees
# no more than the first i + 1; returns what q has the shape of, and the log-sum-exp.
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]
]
FLASHINFER_WORKSPACE_BYTES = 256 << 20
TRIED_TOKENS = 64  # that show whether a library can be used here


class NotHere(Exception):
    """A way that this machine, its packages or these inputs do not allow, and why."""


def ours(inputs: PromptInputs) -> Way:
    """`PromptAttention` as a step uses it: K and V are gathered, then attended."""
    _require_hopper_kernel(inputs)
    shape, q = inputs.shape, inputs.q
    attention = _prompt_attention(inputs)
    if not attention.plan([shape.num_rows], [shape.kv_len]):
        raise NotHere("too few rows, or too much KV to be gathered")
    out = _rows_of(inputs)

    def call(layer: int) -> torch.Tensor:
        attention.forward(layer, q, out, inputs.paged, None)
        return out.view_as(q)

    return call


def our_gathering(inputs: PromptInputs) -> Way:
    """The first kernel of `ours` alone."""
    shape, kv = inputs.shape, inputs.pool.kv
    gathered = kv[0].new_empty((_whole_tiles(shape.kv_len), *kv[0].shape[1:]))
    prompt = Prompt(0, 0, shape.num_rows, shape.kv_len)
    places = to_device(make_places([prompt], [0]), inputs.heads.device, torch.int32).view(
        -1, PLACE_SIZE
    )

    def call(layer: int) -> torch.Tensor:
        gather_kv(kv[layer], gathered, places, inputs.paged, shape.kv_len, BLOCK_N)
        return gathered[: shape.kv_len]

    return call


def our_attention(inputs: PromptInputs) -> Way:
    """The second kernel of `ours` alone, and what adds up splits."""
    _require_hopper_kernel(inputs)
    shape, q = inputs.shape, inputs.q
    attention, gathered = _prompt_attention(inputs), _gathered(inputs, _whole_tiles(shape.kv_len))
    layers = [
        (kv, describe_gathered(side_by_side))
        for kv, side_by_side in zip(inputs.pool.kv, gathered, strict=True)
    ]
    attention.plan([shape.num_rows], [shape.kv_len])
    out = _rows_of(inputs)

    def call(layer: int) -> torch.Tensor:
        kv, descriptor = layers[layer]
        attention.attend(q, kv, descriptor, out, inputs.paged, None)
        return out.view_as(q)

    return call


def triton(inputs: PromptInputs) -> Way:
    """The kernel for other GPUs, over the paged pool."""
    heads, q = inputs.heads, inputs.q
    tiles = Tuning.choose(heads.device, heads.dtype, heads.head_dim, heads.group).extend
    rows = tiles.block_m // heads.group
    limits = RowLimits(narrow=0, few=0, wide_item=rows, many_item=rows)
    numbers = ItemGroups.of([inputs.shape.num_rows], limits).many
    items = to_device(numbers, heads.device, torch.int32).view(-1, ITEM_SIZE)
    out, kv = _rows_of(inputs), inputs.pool.kv

    def call(layer: int) -> torch.Tensor:
        attend_items(q, kv[layer], out, items, inputs.paged, None, tiles, ParallelLaunch())
        return out.view_as(q)

    return call


def cudnn(inputs: PromptInputs) -> Way:
    """torch's cuDNN attention over gathered KV."""
    _try_cudnn(inputs.heads)
    q = inputs.q.transpose(0, 1)[None]
    layers = [
        [side.transpose(0, 1)[None] for side in kv.chunk(2, dim=1)]
        for kv in _gathered(inputs, inputs.shape.kv_len)
    ]
    prefix = inputs.shape.prefix

    def call(layer: int) -> torch.Tensor:
        k, v = layers[layer]
        return over_prefix(attend_by_cudnn, q, k, v, prefix)

    return call


def flashinfer(inputs: PromptInputs) -> Way:
    """FlashInfer's attention of ragged prompts over gathered KV, by its kernels for Hopper."""
    heads, shape = inputs.heads, inputs.shape
    wrapper = _flashinfer_wrapper(heads.device)
    ends = (
        torch.tensor([0, size], dtype=torch.int32, device=heads.device)
        for size in (shape.num_rows, shape.kv_len)
    )
    numbers = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
    wrapper.plan(*ends, *numbers, causal=True, q_data_type=heads.dtype, kv_data_type=heads.dtype)
    sides = [
        [side.contiguous() for side in kv.chunk(2, dim=1)] for kv in _gathered(inputs, shape.kv_len)
    ]

    def call(layer: int) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(inputs.q, *sides[layer])
        return out

    return call


WAYS: dict[str, Callable[[PromptInputs], Way]] = {
    "ours": ours,
    "ours, gathering": our_gathering,
    "ours, attention": our_attention,
    "triton": triton,
    "cudnn": cudnn,
    "flashinfer": flashinfer,
}
GATHERING = "ours, gathering"


def over_prefix(
    attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: int
) -> torch.Tensor:
    """Causal attention of the rows that follow a prefix, by a kernel whose causal mask begins with
    the first key: the prefix without a mask and the rows to each other, merged.

    Args:
        q: [1, num_heads, T, head_dim].
        k, v: [1, num_kv_heads, prefix + T, head_dim].

    Returns:
        [T, num_heads, head_dim].
    """
    out, lse = attend(q, k[:, :, prefix:], v[:, :, prefix:], True)
    if prefix:
        before, lse_before = attend(q, k[:, :, :prefix], v[:, :, :prefix], False)
        share = torch.sigmoid(lse_before - lse).reshape(*q.shape[:3], 1)
        out = torch.lerp(out, before, share.to(out.dtype))
    return out[0].transpose(0, 1)


def attend_by_cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Attend`."""
    operation = torch.ops.aten._scaled_dot_product_cudnn_attention
    found = operation(q, k, v, None, True, 0.0, is_causal, False)
    return found[0], found[1]


def _try_cudnn(heads: Heads) -> None:
    """Sets cuDNN up, so that the first call of a shape has its own plan alone to make."""
    q = heads.queries(TRIED_TOKENS).transpose(0, 1)[None]
    k = heads.pool(TRIED_TOKENS, 1).k[0].transpose(0, 1)[None]
    try:
        attend_by_cudnn(q, k, k, False)
    except RuntimeError as error:
        raise NotHere(f"refused: {str(error).splitlines()[0]}") from error


@cache
def _flashinfer_wrapper(device: torch.device) -> Any:
    if reason := why_not_here():
        raise NotHere("not installed" if "not installed" in reason else reason)
    if not has_warp_group_mma(device):
        raise NotHere("these kernels are for Hopper")
    workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    kind = load_flashinfer().BatchPrefillWithRaggedKVCacheWrapper
    return kind(workspace, "NHD", backend="fa3")


def _require_hopper_kernel(inputs: PromptInputs) -> None:
    if not PromptAttention.can_serve(inputs.pool.kv[0], inputs.heads.num_heads):
        raise NotHere("not for this GPU or these heads")


def _prompt_attention(inputs: PromptInputs) -> PromptAttention:
    device, num_heads = inputs.heads.device, inputs.heads.num_heads
    return PromptAttention(inputs.pool, num_heads, inputs.shape.kv_len, num_multiprocessors(device))


def _rows_of(inputs: PromptInputs) -> torch.Tensor:
    """[num_rows, num_heads * head_dim] for a result."""
    return torch.empty_like(inputs.q).flatten(1)


def _gathered(inputs: PromptInputs, num_rows: int) -> list[torch.Tensor]:
    """Of each layer [num_rows, 2 * num_kv_heads, head_dim]: the prompt's K and V, then zeros."""
    found = []
    for kv in inputs.pool.kv:
        rows = kv.new_zeros((num_rows, *kv.shape[1:]))
        rows[: inputs.shape.kv_len] = kv[inputs.slots]
        found.append(rows)
    return found


def _whole_tiles(num_positions: int) -> int:
    return -(-num_positions // BLOCK_N) * BLOCK_N
