"""Attention of blocks of rows that see each other, against the same written out."""

from __future__ import annotations

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.layer_runtime import Computed, LayerRuntime
from sglang.srt.layers.ops.torch_ops import TorchOps
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.registry import ATTENTION_BACKENDS

CONTEXTS = (13, 40, 1, 0, 70)  # tokens with KV before each block
STARTS = (0, 7, 0, 0, 65)  # the first of these that is seen
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 16, 16
# Rows of a block, and the most of them that are given as one. The last case needs a larger tile
# than other steps do.
BLOCKS = {"of one row": (6, 1), "shared by rows": (6, 2), "whole": (6, 8), "a large tile": (20, 20)}


@torch.inference_mode()
def block_error(name: str, device: str, size: int, max_folded: int) -> float:
    """The largest error of backend `name`."""
    generator = torch.Generator().manual_seed(size)

    def values(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, HEAD_DIM, generator=generator).to(device)

    width, count = max(CONTEXTS) + size, len(CONTEXTS)
    width += -width % PAGE_SIZE
    table = ReqToTokenPool(count, width, device)
    num_slots = count * width
    shape = (NUM_KV_HEADS, HEAD_DIM, torch.float32, device)
    pool = MHATokenToKVPool(num_slots, PAGE_SIZE, 1, *shape)
    pool.track_starts(count + 1)
    [kv] = pool.kv
    kv[PAGE_SIZE:] = float("nan")
    pages = torch.randperm(num_slots // PAGE_SIZE, generator=generator) + 1
    slots = pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)
    table.req_to_token[:count] = slots.view(count, width)
    assert pool.kv_starts is not None
    pool.kv_starts[:count] = torch.tensor(STARTS, device=device)
    for row, context in enumerate(CONTEXTS):
        kv[table.req_to_token[row, :context].long()] = values(context, 2 * NUM_KV_HEADS)
    backend = ATTENTION_BACKENDS.load(name)(table, pool, NUM_HEADS, (None,))
    runtime = LayerRuntime(
        Computed(TorchOps(torch.device(device)), backend), pool, None, max_folded
    )
    rows = torch.arange(count, device=device)
    positions = torch.tensor(CONTEXTS, device=device)[:, None] + torch.arange(size, device=device)
    lens = [context + size for context in CONTEXTS]
    batch = ForwardBatch(
        input_ids=torch.zeros(count * size, dtype=torch.int64, device=device),
        positions=positions.flatten(),
        slots=table.req_to_token[rows[:, None], positions].long().flatten(),
        rows=rows,
        q_lens=[size] * count,
        kv_lens=torch.tensor(lens, device=device),
        kv_len_upper_bounds=lens,
        is_block=True,
    )
    runtime.plan(batch)
    heads = values(count * size, NUM_HEADS + 2 * NUM_KV_HEADS)
    turned = torch.stack((torch.ones(width, HEAD_DIM), torch.zeros(width, HEAD_DIM)), 1).to(device)
    out = runtime.attend(0, heads, runtime.rotation(turned)).view(count, size, -1)
    worst = 0.0
    for row, (start, end) in enumerate(zip(STARTS, lens, strict=True)):
        k, v = kv[table.req_to_token[row, start:end].long()].double().chunk(2, dim=1)
        q = heads.view(count, size, -1, HEAD_DIM)[row, :, :NUM_HEADS].double()
        grouped = q.unflatten(1, (NUM_KV_HEADS, -1))
        weights = (torch.einsum("bhgd,nhd->bhgn", grouped, k) / HEAD_DIM**0.5).softmax(-1)
        right = torch.einsum("bhgn,nhd->bhgd", weights, v).flatten(1)
        worst = max(worst, (out[row] - right).abs().nan_to_num(nan=torch.inf).max().item())
    return worst
