"""Chooses which linear layers of a model hold weights of 8 bits with scales."""

from __future__ import annotations

import torch

from sglang.srt.layers.experts import Experts
from sglang.srt.layers.linear import FusedLinear, Linear, VocabLinear
from sglang.srt.layers.scaled_weight import multiplies
from sglang.srt.model_config import ModelConfig, ModelPathError
from sglang.srt.models.model import Model
from sglang.srt.tensor_headers import read_headers
from sglang.srt.weight_format import STORED_TYPE, WEIGHT, said_of_weights

HEAD = "lm_head"


def hold_in_8_bits(
    model: Model, config: ModelConfig, dtype: torch.dtype, device: torch.device, is_dummy: bool
) -> None:
    """Has layers hold weights of 8 bits whose parts the files have so, or all layers where
    `config.rounds_weights` says it. The model has no memory yet.

    Output heads never do, nor do experts, nor layers that the device cannot multiply so or whose
    ranks would divide blocks. Of these the values are held.

    Args:
        is_dummy: nothing is read, so config.json says it for all layers.

    Raises:
        ModelPathError: if they cannot be rounded.
    """
    says_so = said_of_weights(config.hf) is not None
    rounds, form = config.rounds_weights and not says_so, config.weight_format
    if rounds:
        _check_rounding(model, config, dtype, device)
    takes_all = rounds or (is_dummy and says_so)
    if not multiplies(form, dtype, device) or (is_dummy and not takes_all):
        return
    stored = frozenset[str]() if takes_all else _stored_in_8_bits(model, config)
    output = model.shared_modules().lm_head if rounds else None
    for name, module in model.named_modules():
        path, _, last = name.rpartition(".")
        is_head = module is output or last == HEAD or isinstance(module, VocabLinear)
        if is_head or not isinstance(module, Linear) or not module.takes(form):
            continue
        shards = module.shards if isinstance(module, FusedLinear) else (last,)
        prefix = f"{path}." if path else ""
        if takes_all or stored.issuperset(f"{prefix}{shard}.{WEIGHT}" for shard in shards):
            module.hold_in(form)


def remark_on_weights(model: Model, config: ModelConfig) -> str:
    """Says how many products have weights of 8 bits; empty if nothing asks for any."""
    layers = [each for each in model.modules() if isinstance(each, Linear)]
    num_held = sum(each.form is not None for each in layers)
    form, says_so = config.weight_format, said_of_weights(config.hf) is not None
    if num_held:
        return f"fp8 with {form} in {num_held} of {len(layers)} products"
    return f"fp8 with {form} in the files, held as values of --dtype" if says_so else ""


def _stored_in_8_bits(model: Model, config: ModelConfig) -> frozenset[str]:
    """Returns the model's names of the weights that its files have so."""
    names = model.checkpoint_names
    return frozenset(
        names.own_name(name)
        for name, header in read_headers(config.path).items()
        if header.dtype == STORED_TYPE and names.holds(name)
    )


def _check_rounding(
    model: Model, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> None:
    if any(isinstance(module, Experts) for module in model.modules()):
        why = "experts are not rounded here; leave it out, or use a dense model"
    elif not multiplies(config.weight_format, dtype, device):
        why = (
            "products in 8 bits need a GPU of compute capability 8.9 at least, and --dtype"
            " bfloat16; leave it out"
        )
    else:
        return
    raise ModelPathError(f"--quantization fp8: {why}.")
