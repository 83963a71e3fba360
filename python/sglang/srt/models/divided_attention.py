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
from typing import Any

import torch
from torch import nn

from sglang.srt.layers.linear import part_of
from sglang.srt.model_config import ModelConfig
from sglang.srt.models.exchanged_modules import (
    COLUMNS,
    ROWS,
    WRONG_CODE,
    eps_of_rms_norm,
    is_same,
    sample,
    style_of,
)
from sglang.srt.shard import Cut


def divide_attention(
    model: nn.Module, config: ModelConfig, plan: Mapping[str, str]
) -> dict[nn.Module, Cut]:
    """Exchanges the attention modules below a model, which has no memory yet, that a plan leaves
    whole and that can be divided by heads.

    Returns:
        Their linear layers and norms of which this rank has a part, and which.
    """
    cuts = dict[nn.Module, Cut]()
    for path, parent in [] if config.shard.is_whole else list(model.named_modules()):
        for name, module in list(parent.named_children()):
            children = (f"{path}.{name}.{each}" for each, _ in module.named_children())
            is_planned = any(style_of(each, plan) in (COLUMNS, ROWS) for each in children)
            if "layer_idx" not in vars(module) or is_planned or module._parameters:
                continue
            made = _made_for(module, config)
            found = {} if made is None else _cuts_between(module, made, config)
            if made is not None and found and _is_part(module, made, found, config):
                setattr(parent, name, made)
                cuts |= {made.get_submodule(each): cut for each, cut in found.items()}
    return cuts


def _made_for(module: nn.Module, config: ModelConfig) -> nn.Module | None:
    """Makes an attention module anew for the heads of a rank; None if its code cannot."""
    values, part = vars(module), config.shard.part
    own: Any = copy.copy(values.get("config"))
    try:
        own.num_attention_heads = part(config.num_heads)
        own.num_key_value_heads = part(config.num_kv_heads)
        own.head_dim = config.head_dim
        made: nn.Module = type(module)(own, values["layer_idx"])
    except WRONG_CODE:
        return None
    return made


def _cuts_between(whole: nn.Module, made: nn.Module, config: ModelConfig) -> dict[str, Cut]:
    """Names the linear layers and RMSNorms of which a rank has a part; none if another module has
    other sizes, or one has not those of a part."""
    cuts, keys = dict[str, Cut](), config.num_kv_heads * config.head_dim
    qkv = config.num_heads * config.head_dim, keys, keys
    for name, old in whole.named_children():
        new = made.get_submodule(name)
        if [p.shape for p in old.parameters()] == [p.shape for p in new.parameters()]:
            continue
        if type(old) is not nn.Linear and eps_of_rms_norm(old) is None:
            return {}
        sizes = zip(*(each.get_parameter("weight").shape for each in (old, new)), strict=True)
        changed = [(dim, *both) for dim, both in enumerate(sizes) if both[0] != both[1]]
        dim, size, own_size = changed[0]
        is_joined = dim == 0 and size == sum(qkv)
        cuts[name] = config.shard.cut(dim, size, qkv if is_joined else ())
        if len(changed) > 1 or cuts[name].size != own_size:
            return {}
    return cuts


def _is_part(
    whole: nn.Module, made: nn.Module, cuts: Mapping[str, Cut], config: ModelConfig
) -> bool:
    """Tells whether a rank's module hands attention its heads of what the whole one does, and each
    linear layer its part."""
    children = whole.named_children()
    linears = {name: each for name, each in children if isinstance(each, nn.Linear)}
    outputs = {name: sample(1, 3, each.out_features) for name, each in linears.items()}
    q, k = (config.shard.cut(1, each) for each in (config.num_heads, config.num_kv_heads))
    parts, taken = dict(outputs), {"q": q, "k": k, "v": k}
    for name in linears.keys() & cuts.keys():
        cut = cuts[name]._replace(dim=2)
        if cuts[name].dim == 0:
            parts[name] = part_of(outputs[name], cut)
        else:
            taken[name] = cut
    expected, found = _inputs(whole, outputs, config), _inputs(made, parts, config)
    if not taken.keys() <= expected.keys() == found.keys():
        return False
    if expected.pop("options") != found.pop("options"):
        return False
    wanted = expected | {name: part_of(expected[name], cut) for name, cut in taken.items()}
    return all(is_same(found[name], values) for name, values in wanted.items())


def _inputs(
    module: nn.Module, outputs: Mapping[str, torch.Tensor], config: ModelConfig
) -> dict[str, Any]:
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
    cos, sin = sample(2, 1, 3, config.head_dim)
    code = inspect.unwrap(type(module).forward)
    try:
        code(stand_in, sample(1, 3, 8), position_embeddings=(cos, sin), attention_mask=None)
    except WRONG_CODE:
        return {}
    return seen
