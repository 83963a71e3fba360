"""Paged attention by the kernels of the PyPI package flashinfer-python, planned on the host."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.attention.base_attn_backend import (
    PLAIN,
    AttentionCapabilities,
    GraphSupport,
    ScoreForm,
)
from sglang.srt.layers.attention.flashinfer_masks import tree_masks
from sglang.srt.layers.attention.flashinfer_plan import (
    Heads,
    StepLayout,
    lay_out,
    uses_tensor_cores,
    window_left,
)
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.platform import num_multiprocessors
from sglang.srt.registry import ATTENTION_LIMITS

VERSION = "0.6.14"
LIMITS = ATTENTION_LIMITS["flashinfer"]
GRAPH_INT_WORKSPACE_BYTES = 1 << 20  # FlashInfer's own 8 MiB would be taken for each key
# Both families of kernels honour the strides of K and V in the joint pool. fa2 alone splits the KV
# of few requests, packs the query heads of a KV head into a tile, and is one compiled module for
# every step and graph.
KERNELS = "fa2"


def load_flashinfer() -> ModuleType:
    """The package; its import asks torch for the GPUs.

    Raises:
        ValueError: if it is not installed, or lacks tools to compile its kernels.
    """
    try:
        package = importlib.import_module("flashinfer")
    except ImportError as error:
        raise ValueError(
            f"The attention backend flashinfer cannot be imported ({error})."
            f" Run `pip install flashinfer-python=={VERSION}`, or use --attention-backend triton."
        ) from error
    if missing := missing_tools():
        raise ValueError(
            f"The attention backend flashinfer compiles its kernels and finds no"
            f" {' and no '.join(missing)}. Install the CUDA toolkit (or set CUDA_HOME) and ninja,"
            " both on PATH, or use --attention-backend triton."
        )
    return package


def why_not_here() -> str | None:
    """Returns why FlashInfer cannot run on this host, judging by installed software alone; None if
    it may."""
    if importlib.util.find_spec("flashinfer") is None:
        return f"flashinfer-python is not installed (pip install flashinfer-python=={VERSION})"
    if missing := missing_tools():
        return f"flashinfer finds no {' and no '.join(missing)} to compile its kernels with"
    return None


def missing_tools() -> list[str]:
    """Returns the tools that FlashInfer lacks for compiling, looking where it looks."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:  # kernels compiled beforehand
        return []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = None if home else shutil.which("nvcc")
    nvcc = os.environ.get("FLASHINFER_NVCC") or found
    nvcc = nvcc or str(Path(home or "/usr/local/cuda") / "bin" / "nvcc")
    return [tool for tool in (nvcc, "ninja") if shutil.which(tool) is None]


@dataclass(frozen=True, slots=True)
class _PagedStep:
    """A step in the form of FlashInfer's plans. All but `page_indices` lie on the host,
    page-locked: a plan reads them there without waiting, and its copies to the device do not wait
    either.

    Attributes:
        layout: the same as numbers.
        qo_indptr, page_indptr: [R + 1] int32.
        last_page_lens, kv_lens: [R] int32.
        page_indices: [num_pages] int32, on the device; pages of each request in order.
    """

    layout: StepLayout
    qo_indptr: torch.Tensor
    page_indptr: torch.Tensor
    last_page_lens: torch.Tensor
    kv_lens: torch.Tensor
    page_indices: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """The memory that a wrapper works in.

    Attributes:
        floats: [bytes] uint8; partial results. Shared by all wrappers: kernels run one after the
            other.
        page_indices: [most pages of a step] int32 at a graph's address, shared too, since a plan
            fills it before each replay; None without a graph.
    """

    floats: torch.Tensor
    page_indices: torch.Tensor | None


class _Growing:
    """Memory that is handed out repeatedly. Memory that is too small is replaced; earlier users
    keep it, since graphs hold its address."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._tensor = torch.empty(0, dtype=dtype, device=device)

    def at_least(self, count: int) -> torch.Tensor:
        if self._tensor.numel() < count:
            self._tensor = self._tensor.new_zeros(count)
        return self._tensor


class _Wrapper:
    """One of FlashInfer's wrappers, for one kind of step and one window.

    Args:
        is_decode: for steps of one row per request, else for any.
        key: the graph that its plans serve; None for steps that are launched.
    """

    def __init__(
        self,
        flashinfer: ModuleType,
        heads: Heads,
        scores: ScoreForm,
        window: int | None,
        is_decode: bool,
        key: GraphKey | None,
        memory: _Memory,
    ) -> None:
        self._heads, self._scores = heads, scores
        self._window_left = window_left(window)
        self._is_decode = is_decode
        self._device = memory.floats.device
        self._staged: torch.cuda.Event | None = None
        options: dict[str, Any] = {"backend": KERNELS}
        if is_decode:
            options["use_tensor_cores"] = uses_tensor_cores(heads.group)
        if key is not None:
            options |= self._graph_options(key, memory)
        kind = (
            flashinfer.BatchDecodeWithPagedKVCacheWrapper
            if is_decode
            else flashinfer.BatchPrefillWithPagedKVCacheWrapper
        )
        self._wrapper = kind(memory.floats, "NHD", **options)
        if key is not None:
            ints = memory.floats.new_empty(GRAPH_INT_WORKSPACE_BYTES)
            self._wrapper.reset_workspace_buffer(memory.floats, ints)

    def _graph_options(self, key: GraphKey, memory: _Memory) -> dict[str, Any]:
        """Returns buffers at addresses that the graph of `key` may hold."""
        ints = torch.zeros((3, key.num_reqs + 1), dtype=torch.int32, device=self._device)
        qo_indptr, page_indptr, last_page_lens = ints[0], ints[1], ints[2, :-1]
        if self._is_decode:
            return {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": page_indptr,
                "paged_kv_indices_buffer": memory.page_indices,
                "paged_kv_last_page_len_buffer": last_page_lens,
            }
        return {
            "use_cuda_graph": True,
            "qo_indptr_buf": qo_indptr,
            "paged_kv_indptr_buf": page_indptr,
            "paged_kv_indices_buf": memory.page_indices,
            "paged_kv_last_page_len_buf": last_page_lens,
        }

    def plan(
        self,
        step: _PagedStep,
        page_size: int,
        dtype: torch.dtype,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Gives a step to FlashInfer. With a mask of `tree_masks`, which includes the window, it
        waits for the device; without one, rows are causal."""
        # FlashInfer writes each plan to the same page-locked buffer and does not ask whether the
        # copy of the last one to the device has happened. It has, unless the host is more than a
        # step ahead; the step that the copy was for is not waited for.
        if self._staged is not None:
            self._staged.synchronize()
        heads = self._heads
        shape = (heads.num_heads, heads.num_kv_heads, heads.head_dim, page_size)
        options = {
            "window_left": self._window_left,
            "sm_scale": self._scores.scale_of(heads.head_dim),
            "logits_soft_cap": self._scores.softcap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "seq_lens": step.kv_lens,
        }
        pages = (step.page_indptr, step.page_indices, step.last_page_lens)
        longest = {"max_token_per_sequence": max(step.layout.q_lens)}
        if mask is not None:
            # It packs masks on the device, by numbers that must have arrived there.
            numbers = (step.qo_indptr, *pages)
            on_device = [each.to(self._device, non_blocking=True) for each in numbers]
            options |= {"custom_mask": mask, "window_left": -1, **longest}
            self._wrapper.plan(*on_device, *shape, **options)
        elif self._is_decode:
            # Without a graph it copies an index range of its own from pageable memory. That is not
            # ours to change, and too small (R + 1 numbers) for the driver to wait.
            self._wrapper.plan(*pages, *shape, **options)
        else:
            # The longest q, else it looks for it element by element.
            options |= {"causal": True, **longest}
            self._wrapper.plan(step.qo_indptr, *pages, *shape, **options)
        if self._device.type == "cuda":
            self._staged = self._staged or torch.cuda.Event()
            self._staged.record()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """q [T, num_heads, head_dim], k and v [num_pages, page_size, num_kv_heads, head_dim] with
        any strides but the last -> out, as q."""
        self._wrapper.run(q, (k, v), out=out)


def _read_lens(
    batch: ForwardBatch, kv_starts: torch.Tensor | None
) -> tuple[list[int], list[int], list[int]]:
    """Returns the rows that each request feeds, its tokens with KV after the step, and the first of
    these that it sees; waits for the device where the host does not know them.

    Args:
        kv_starts: see `MHATokenToKVPool`; None: all see all.
    """
    num_reqs, is_packed = len(batch.q_lens), batch.q_starts is not None
    firsts = [0] * num_reqs
    if batch.bounds_are_exact and not is_packed and kv_starts is None:
        return batch.q_lens, batch.kv_len_upper_bounds, firsts
    parts = [batch.kv_lens]
    parts += [] if kv_starts is None else [kv_starts[batch.rows]]
    parts += [] if batch.q_starts is None else [batch.q_starts]
    numbers = torch.cat(parts).tolist()
    kv_lens, q_lens = numbers[:num_reqs], batch.q_lens
    if is_packed:
        q_lens = [b - a for a, b in pairwise(numbers[-num_reqs - 1 :])]
    if kv_starts is not None:
        firsts = numbers[num_reqs : 2 * num_reqs]
    return q_lens, kv_lens, firsts


class FlashInferBackend:
    """One plan per step and distinct window. A step whose bounds of lengths are exact never waits
    for the device; another waits once, to read the lengths, and so does a packed one, or one over
    a pool that `hides_kv`. A step of trees waits, too, while FlashInfer packs its masks, and
    replays no graph.

    A plan names the pages that each request sees: what is hidden is not among them. A page begins
    anywhere then, so each slot is one.

    A graph is planned for all its requests with the same number of rows each. Every `GraphKey` and
    window has wrappers of its own, since the grids and addresses of a plan in a graph are fixed.
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        num_heads: int,
        windows: Sequence[int | None],
        scores: ScoreForm = PLAIN,
        page_size: int | None = None,
    ) -> None:
        """
        Args:
            scores: see `AttentionBackend`.
            page_size: of the pool if None, else a divisor of it. Of 1, every slot is a page, as it
                is where the pool has `kv_starts`.

        Raises:
            ValueError: for heads that FlashInfer lacks, or if it is not there.
        """
        slots, _, head_dim = kv_pool.kv[0].shape
        page_size = page_size or kv_pool.page_size
        if kv_pool.kv_starts is not None:
            page_size = 1
        assert slots % page_size == 0, (slots, page_size)
        num_kv_heads = kv_pool.k[0].shape[1]
        self._heads = Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self._scores = scores
        self._flashinfer = load_flashinfer()
        self._page_size = page_size
        self._table, self._pool = req_to_token_pool.req_to_token, kv_pool
        self._device, self._dtype = kv_pool.kv[0].device, kv_pool.kv[0].dtype
        self._num_multiprocessors = num_multiprocessors(self._device)
        self._window_of_layer = tuple(windows)
        self._k_pages = [layer.unflatten(0, (-1, page_size)) for layer in kv_pool.k]
        self._v_pages = [layer.unflatten(0, (-1, page_size)) for layer in kv_pool.v]
        self._floats = _Growing(torch.uint8, self._device)
        self._page_indices = _Growing(torch.int32, self._device)
        self._wrappers: dict[tuple[GraphKey | None, bool, int | None], _Wrapper] = {}
        self._current: dict[int | None, _Wrapper] = {}
        self._num_tokens = 0

    @classmethod
    def capabilities(cls) -> AttentionCapabilities:
        return AttentionCapabilities(
            devices=LIMITS.devices,
            dtypes=frozenset(getattr(torch, name) for name in LIMITS.dtypes),
            page_sizes=None,
            graph=GraphSupport.UNIFORM_Q,
            tree_masks=True,
            max_mask_entries=LIMITS.max_mask_entries,
            captures_trees=False,
            reads_q_starts=False,
            captures_plans=False,
            reads_kv_starts=True,
        )

    def plan(self, batch: ForwardBatch) -> None:
        key = batch.graph_key
        assert key is None or batch.q_lens == [key.width] * key.num_reqs, (key, batch.q_lens)
        is_plain = batch.q_starts is None and batch.ancestors is None
        assert key is None or is_plain, "No graph serves packed batches or trees."
        kv_starts = self._pool.kv_starts if self._pool.hides_kv else None
        q_lens, kv_lens, firsts = _read_lens(batch, kv_starts)
        assert max(kv_lens) <= self._table.shape[1], "A request is longer than its row."
        seen_lens = [kv_len - first for kv_len, first in zip(kv_lens, firsts, strict=True)]
        layout = lay_out(q_lens, seen_lens, self._page_size)
        self._num_tokens = layout.qo_indptr[-1]
        if self._num_tokens == 0:
            return
        step = _PagedStep(
            layout=layout,
            qo_indptr=self._on_host(layout.qo_indptr),
            page_indptr=self._on_host(layout.page_indptr),
            last_page_lens=self._on_host(layout.last_page_lens),
            kv_lens=self._on_host(layout.kv_lens),
            page_indices=self._find_pages(layout, firsts, batch.rows),
        )
        windows, masks = dict.fromkeys(self._window_of_layer), dict[int | None, torch.Tensor]()
        if batch.ancestors is not None:
            if batch.tree_starts is not None and any(firsts):
                starts = batch.tree_starts - to_device(firsts, self._device)
                batch = replace(batch, tree_starts=starts)
            masks = tree_masks(batch, layout, self._window_of_layer)
        is_decode = layout.is_decode and not masks  # decode kernels take no masks
        self._current = {window: self._wrapper(key, is_decode, window) for window in windows}
        for window, wrapper in self._current.items():
            wrapper.plan(step, self._page_size, self._dtype, masks.get(window))

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        assert q.stride(-1) == 1
        out = q.new_zeros(q.shape) if len(q) > self._num_tokens else q.new_empty(q.shape)
        if self._num_tokens > 0:
            fed = slice(self._num_tokens)  # rows after these pad a packed batch
            wrapper = self._current[self._window_of_layer[layer]]
            wrapper.run(q[fed], self._k_pages[layer], self._v_pages[layer], out[fed])
        return out.flatten(1)

    def _on_host(self, numbers: Sequence[int]) -> torch.Tensor:
        """Returns a page-locked int32 tensor."""
        is_pinned = self._device.type == "cuda"
        return torch.tensor(numbers, dtype=torch.int32, pin_memory=is_pinned)

    def _find_pages(
        self, layout: StepLayout, firsts: Sequence[int], rows: torch.Tensor
    ) -> torch.Tensor:
        """[num_pages] int32: the pages of each request from the first token on that it sees, read
        on the device from the first slot of each. The host knows how many there are, so nothing
        waits."""
        size, width = self._page_size, self._table.shape[1]
        starts = layout.page_indptr[:-1]
        counts = [end - start for start, end in zip(starts, layout.page_indptr[1:], strict=True)]
        # Entry n of the result is column first + (n - start) * size of its request's row.
        begins = [first - start * size for first, start in zip(firsts, starts, strict=True)]
        numbers = to_device([begins, counts], self._device)
        origins = torch.add(numbers[0], rows, alpha=width)
        total = layout.num_pages
        entries = torch.repeat_interleave(origins, numbers[1], output_size=total)
        entries += torch.arange(0, total * size, size, device=self._device)
        slots = self._table.view(-1).index_select(0, entries)
        return slots if size == 1 else slots.div_(size, rounding_mode="floor")

    def _wrapper(self, key: GraphKey | None, is_decode: bool, window: int | None) -> _Wrapper:
        found = self._wrappers.get((key, is_decode, window))
        if found is None:
            found = _Wrapper(
                self._flashinfer,
                self._heads,
                self._scores,
                window,
                is_decode,
                key,
                self._memory(key),
            )
            self._wrappers[key, is_decode, window] = found
        return found

    def _memory(self, key: GraphKey | None) -> _Memory:
        if key is None:
            needed = self._heads.eager_workspace_bytes(self._num_multiprocessors)
            return _Memory(floats=self._floats.at_least(needed), page_indices=None)
        needed = self._heads.graph_workspace_bytes(
            self._num_multiprocessors, key.num_reqs, key.num_tokens
        )
        # Requests may share pages, so the pool's size is no bound; but each request names one row.
        num_rows, width = self._table.shape
        num_pages = max(num_rows, key.num_reqs) * -(-width // self._page_size)
        return _Memory(
            floats=self._floats.at_least(needed),
            page_indices=self._page_indices.at_least(num_pages),
        )
