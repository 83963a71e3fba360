"""A fake FlashInfer package, whose wrappers attend in plain torch from nothing but what they were
handed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention import flashinfer_backend, flashinfer_plan
from sglang.srt.registry import ATTENTION_BACKENDS


class FakeWrapper:
    """Stands for both wrappers.

    Attributes:
        buffers: those of a graph, by role.
        num_masked: runs with masks.
    """

    def __init__(self, floats: torch.Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"
        self.floats, self.options = floats, options
        self.is_graph = options.get("use_cuda_graph", False)
        self.buffers: dict[str, torch.Tensor] = {
            name.removesuffix("fer").removesuffix("_buf"): tensor
            for name, tensor in options.items()
            if isinstance(tensor, torch.Tensor)
        }
        self.ints: torch.Tensor | None = None
        self.planned: dict[str, torch.Tensor] = {}
        self.num_plans = self.num_masked = 0

    def reset_workspace_buffer(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        assert floats is self.floats
        self.ints = ints

    def _keep(self, sizes: Sequence[int], options: dict[str, Any], **tensors: torch.Tensor) -> None:
        assert all(tensor.dtype == torch.int32 for tensor in tensors.values())
        assert options["q_data_type"] == options["kv_data_type"]
        self.num_plans += 1
        self.sizes, self.plan_options = tuple(sizes), options
        if not self.is_graph:
            self.planned = tensors
            return
        for name, tensor in tensors.items():
            if name == "paged_kv_indices":
                assert len(tensor) <= len(self.buffers[name])
            elif name in self.buffers:
                assert len(tensor) == len(self.buffers[name])
            self.buffers.setdefault(name, tensor)[: len(tensor)].copy_(tensor)
        self.planned = self.buffers

    def run(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        num_heads, num_kv_heads, head_dim, page_size = self.sizes
        assert q.shape[1:] == (num_heads, head_dim)
        assert kv[0].shape[1:] == kv[1].shape[1:] == (page_size, num_kv_heads, head_dim)
        assert kv[0].stride() == kv[1].stride()
        planned = self.planned
        self.num_masked += "custom_mask" in self.plan_options
        rows, pages = planned["qo_indptr"].tolist(), planned["paged_kv_indptr"].tolist()
        masks = self.plan_options.get("custom_mask")
        for request, last in enumerate(planned["paged_kv_last_page_len"].tolist()):
            own = planned["paged_kv_indices"][pages[request] : pages[request + 1]].long()
            kv_len = (len(own) - 1) * page_size + last
            k, v = (
                part[own].flatten(0, 1)[:kv_len].repeat_interleave(num_heads // num_kv_heads, 1)
                for part in kv
            )
            start, end = rows[request], rows[request + 1]
            mask = None
            if masks is not None:
                count = (end - start) * kv_len
                mask, masks = masks[:count].view(end - start, kv_len), masks[count:]
            out[start:end] = self._attend(q[start:end], k, v, mask)
        assert masks is None or not len(masks)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        keys = torch.arange(len(k))
        positions = torch.arange(len(k) - len(q), len(k))[:, None]
        seen = keys <= positions if mask is None else mask
        if (left := self.plan_options["window_left"]) >= 0:
            seen &= keys >= positions - left
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.plan_options["sm_scale"]
        if (cap := self.plan_options["logits_soft_cap"]) is not None:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


class FakeDecodeWrapper(FakeWrapper):
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *sizes: int,
        **options: Any,
    ) -> None:
        self._keep(
            sizes,
            options,
            qo_indptr=torch.arange(len(indptr), dtype=torch.int32),
            paged_kv_indptr=indptr,
            paged_kv_indices=indices,
            paged_kv_last_page_len=last_page_len,
        )


class FakePrefillWrapper(FakeWrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *sizes: int,
        **options: Any,
    ) -> None:
        assert options.get("causal") or "custom_mask" in options
        assert options["max_token_per_sequence"] == qo_indptr.diff().max()
        self._keep(
            sizes,
            options,
            qo_indptr=qo_indptr,
            paged_kv_indptr=paged_kv_indptr,
            paged_kv_indices=paged_kv_indices,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )


def install_fake(monkeypatch: pytest.MonkeyPatch) -> list[FakeWrapper]:
    """Installs a fake FlashInfer; gives the wrappers made of it so far."""
    wrappers: list[FakeWrapper] = []

    def recorded(kind: type[FakeWrapper]) -> Any:
        def make(*arguments: Any, **options: Any) -> FakeWrapper:
            wrappers.append(kind(*arguments, **options))
            return wrappers[-1]

        return make

    package = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=recorded(FakeDecodeWrapper),
        BatchPrefillWithPagedKVCacheWrapper=recorded(FakePrefillWrapper),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(flashinfer_backend, "missing_tools", list)
    monkeypatch.setattr(flashinfer_backend, "num_multiprocessors", lambda _: 1)
    monkeypatch.setattr(flashinfer_plan, "LEAST_FLOAT_WORKSPACE_BYTES", 1)
    return wrappers


def serve_with_fake(monkeypatch: pytest.MonkeyPatch) -> list[FakeWrapper]:
    """Has models on the CPU, of heads of any size, attend by FlashInfer's backend over a fake."""
    backend = flashinfer_backend.FlashInferBackend
    here = replace(
        backend.capabilities(), devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32})
    )
    monkeypatch.setattr(backend, "capabilities", classmethod(lambda cls: here))
    monkeypatch.setattr(flashinfer_plan, "HEAD_DIMS", range(1, 257))
    place = f"{backend.__module__}:{backend.__name__}"
    monkeypatch.setitem(ATTENTION_BACKENDS.entries, "torch_native", place)
    return install_fake(monkeypatch)
