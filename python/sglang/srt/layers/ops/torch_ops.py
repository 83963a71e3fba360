"""Implements `LayerOps` in plain torch: the CPU runtime and the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.layers.layer_runtime import HeadNorms
from sglang.srt.layers.ops.chosen_experts import choose_experts, sum_of_chosen
from sglang.srt.layers.scaled_weight import ScaledWeight, Weight


class TorchOps:
    """Implements `LayerOps`."""

    def __init__(self, device: torch.device) -> None: ...

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        values = weight.values(x.dtype) if isinstance(weight, ScaledWeight) else weight
        return F.linear(x, values, bias)

    def gated_linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self.silu_and_mul(self.linear(x, weight, bias))

    def experts(
        self,
        x: torch.Tensor,
        scores: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        num_chosen: int,
        normalizes: bool,
    ) -> torch.Tensor:
        def compute(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
            counts = experts.bincount(minlength=len(down)).tolist()
            parts = rows.split(counts)
            used = [expert for expert, count in enumerate(counts) if count]
            products = [self._expert(parts[each], gate_up[each], down[each]) for each in used]
            return torch.cat(products) if products else rows

        return sum_of_chosen(x, choose_experts(scores, num_chosen, normalizes), compute)

    def _expert(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return F.linear(self.gated_linear(x, gate_up, None), down)

    def rotation(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return table[positions]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return F.rms_norm(total, weight.shape, weight, eps), total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        rotation: torch.Tensor,
        positions: torch.Tensor | None,
        kv: torch.Tensor,
        slots: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        num_kv_heads = kv.shape[1] // 2
        qk, v = heads.split((heads.shape[1] - num_kv_heads, num_kv_heads), dim=1)
        if norms is not None:
            q, k = qk.split((qk.shape[1] - num_kv_heads, num_kv_heads), dim=1)
            q, _ = self.add_rms_norm(q, None, norms.queries, norms.eps)
            k, _ = self.add_rms_norm(k, None, norms.keys, norms.eps)
            qk = torch.cat((q, k), dim=1)
        cos, sin = rotation.to(heads.dtype).unsqueeze(2).unbind(1)
        swapped = qk.roll(qk.shape[-1] // 2, dims=-1)
        rotated = torch.addcmul(qk * cos, swapped, sin)
        q, k = rotated.split((rotated.shape[1] - num_kv_heads, num_kv_heads), dim=1)
        kv[:, :num_kv_heads].index_copy_(0, slots, k)
        kv[:, num_kv_heads:].index_copy_(0, slots, v)
        return q
