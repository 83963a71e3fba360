"""Attention of transformers' code for the heads of one rank, where transformers' plan divides none.

The code is made again for that many heads. Whether it then computes what the whole computes for
these heads is found out by running both on small tensors.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from sglang.srt.layers.linear import part_of
from sglang.srt.models.exchanged_modules import (
    COLUMNS,
    ROWS,
    WRONG_CODE,
    eps_of_rms_norm,
    is_same,
    sample,
    style_of,
)
from sglang.srt.shard import Cut, Shard


class Heads(NamedTuple):
    """Query heads and KV heads of all ranks together, and the size of a head."""

    num_heads: int
    num_kv_heads: int
    size: int

    @property
    def joined(self) -> tuple[int, int, int]:
        """Output features of queries, keys and values."""
        keys = self.num_kv_heads * self.size
        return self.num_heads * self.size, keys, keys


def divide_attention(
    model: nn.Module, shard: Shard, plan: Mapping[str, str], heads: Heads
) -> dict[nn.Module, Cut]:
    """Exchanges the attention modules below a model, which has no memory yet, that a plan leaves
    whole and that can be divided by heads.

    Returns:
        Their linear layers and norms of which this rank has a part, and which.
    """
    cuts = dict[nn.Module, Cut]()
    for path, parent in [] if shard.is_whole else list(model.named_modules()):
        for name, module in list(parent.named_children()):
            styles = [
                style_of(f"{path}.{name}.{each}", plan) for each, _ in module.named_children()
            ]
            is_planned = bool({*styles} & {COLUMNS, ROWS})
            if "layer_idx" not in vars(module) or is_planned or module._parameters:
                continue
            made = _made_for(module, shard, heads)
            found = None if made is None else _cuts_between(module, made, shard, heads)
            if made is not None and found and _is_part(module, made, found, shard, heads):
                setattr(parent, name, made)
                cuts |= {made.get_submodule(each): cut for each, cut in found.items()}
    return cuts


def _made_for(module: nn.Module, shard: Shard, heads: Heads) -> nn.Module | None:
    """Makes an attention module anew for the heads of a rank; None if its code cannot."""
    values = vars(module)
    config: Any = copy.copy(values.get("config"))
    try:
        config.num_attention_heads = shard.part(heads.num_heads)
        config.num_key_value_heads = shard.part(heads.num_kv_heads)
        config.head_dim = heads.size
        made: nn.Module = type(module)(config, values["layer_idx"])
    except WRONG_CODE:
        return None
    return made


def _cuts_between(
    whole: nn.Module, made: nn.Module, shard: Shard, heads: Heads
) -> dict[str, Cut] | None:
    """Names the submodules of which a rank has a part; None if one is neither a linear layer nor an
    RMSNorm, or has another size."""
    cuts, num_ranks = dict[str, Cut](), shard.num_ranks
    for name, old in whole.named_children():
        new = made.get_submodule(name)
        sizes = [[*weight.shape] for weight in old.parameters()]
        if sizes == [[*weight.shape] for weight in new.parameters()]:
            continue
        if isinstance(old, nn.Linear) and isinstance(new, nn.Linear):
            if old.in_features == new.in_features:
                is_joined = old.out_features == sum(heads.joined)
                cut = shard.cut(0, old.out_features, heads.joined if is_joined else ())
                size = new.out_features
            else:
                cut, size = shard.cut(1, old.in_features), new.in_features
        elif eps_of_rms_norm(old) is not None:
            cut, size = shard.cut(0, sizes[0][0]), len(new.get_parameter("weight"))
        else:
            return None
        if cut.size != size or cut.whole != size * num_ranks:
            return None
        cuts[name] = cut
    return cuts


def _is_part(
    whole: nn.Module, made: nn.Module, cuts: Mapping[str, Cut], shard: Shard, heads: Heads
) -> bool:
    """Tells whether a rank's module hands attention its heads of what the whole one does, and each
    linear layer its part."""
    children = whole.named_children()
    linears = {name: each for name, each in children if isinstance(each, nn.Linear)}
    outputs = {name: sample(1, 3, each.out_features) for name, each in linears.items()}
    parts, taken = dict(outputs), dict[str, Cut]()
    for name in linears.keys() & cuts.keys():
        cut = cuts[name]._replace(dim=2)
        if cuts[name].dim == 0:
            parts[name] = part_of(outputs[name], cut)
        else:
            taken[name] = cut
    for name, number in zip("qkv", (heads.num_heads, *[heads.num_kv_heads] * 2), strict=True):
        taken[name] = shard.cut(1, number)
    expected, found = _inputs(whole, outputs, heads), _inputs(made, parts, heads)
    if "q" not in expected or expected.keys() != found.keys():
        return False
    if expected.pop("options") != found.pop("options"):
        return False
    for name, cut in taken.items():
        expected[name] = part_of(expected[name], cut)
    return all(is_same(found[name], values) for name, values in expected.items())


def _inputs(module: nn.Module, outputs: Mapping[str, torch.Tensor], heads: Heads) -> dict[str, Any]:
    """Runs an attention module on small tensors, without its norms.

    Args:
        outputs: of its linear layers.

    Returns:
        What its linear layers get, by their names, and attention, as q, k, v and options; empty if
        its code does not run so.
    """
    seen = dict[str, Any]()

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        seen[name] = x
        return outputs[name]

    def attend(
        _: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        seen.update(q=q, k=k, v=v, options=options)
        return q.transpose(1, 2)

    own = {name: each for name, each in vars(module).items() if not name.startswith("_")}
    for name, child in module.named_children():
        own[name] = child if eps_of_rms_norm(child) is None else nn.Identity()
    products = {name: partial(product, name) for name in outputs}
    step = SimpleNamespace(attend=attend)
    stand_in = SimpleNamespace(**{**own, **products, "paged_step": step})
    cos, sin = sample(2, 1, 3, heads.size)
    code = inspect.unwrap(type(module).forward)
    try:
        code(stand_in, sample(1, 3, 8), position_embeddings=(cos, sin), attention_mask=None)
    except WRONG_CODE:
        return {}
    return seen
