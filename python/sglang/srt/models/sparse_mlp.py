"""Feed-forward layers with experts, of which each token goes through a few (arXiv 1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sglang.srt.layers.experts import PLAIN_NAMES, ExpertNames, Experts
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import Linear
from sglang.srt.model_config import ModelConfig

COUNTS = "num_experts", "num_local_experts"  # names of one entry
MAX_EXPERTS = 4096  # more than any model has; each has names of its own for its weights


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """The experts of a family.

    Attributes:
        size: intermediate features of each.
        num_chosen: experts that compute a token.
        normalizes: the weights of a token's experts sum to 1.
        dense_layers: layers with one feed-forward part and no experts.
        names: of their weights in checkpoints.
    """

    num_experts: int
    size: int
    num_chosen: int
    normalizes: bool
    dense_layers: frozenset[int] = frozenset()
    names: ExpertNames = PLAIN_NAMES


def expert_counts(config: ModelConfig, num_chosen: int) -> tuple[int, int]:
    """Reads the number of experts, and of those that compute a token.

    Args:
        num_chosen: the family's, where config.json has none.

    Raises:
        ModelPathError: if there can be no such numbers.
    """
    named = [name for name in COUNTS if config.hf.get(name) is not None]
    if not named:
        raise config.refusal(f"neither {' nor '.join(COUNTS)} says how many experts there are")
    num_experts = config.integer(named[0], None, minimum=1) or 0
    num_chosen = config.integer("num_experts_per_tok", num_chosen, minimum=1) or num_chosen
    if num_experts > MAX_EXPERTS:
        raise config.refusal(f"{named[0]} is {num_experts}, but must be at most {MAX_EXPERTS}")
    if num_chosen > num_experts:
        raise config.refusal(
            f"num_experts_per_tok is {num_chosen}, but there are {num_experts} experts"
        )
    return num_experts, num_chosen


class SparseMLP(nn.Module):
    """A router and the experts that it chooses among. Every rank computes the same scores, and each
    expert's features that it has; the output is the sum over ranks."""

    def __init__(self, config: ModelConfig, spec: ExpertSpec) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, spec.num_experts, bias=False)
        self.experts = Experts(
            spec.num_experts, config.hidden_size, spec.size, spec.names, config.shard
        )
        self._num_chosen, self._normalizes = spec.num_chosen, spec.normalizes
        self._is_whole = config.shard.is_whole

    def forward(self, x: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        """[T, hidden_size] of x [T, hidden_size]."""
        out = runtime.experts(
            x,
            self.gate(x, runtime),
            self.experts.gate_up_proj,
            self.experts.down_proj,
            self._num_chosen,
            self._normalizes,
        )
        return out if self._is_whole else runtime.ranks.sum(out)
