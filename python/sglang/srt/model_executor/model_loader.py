"""Builds a model and fills it, from safetensors or with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from sglang.srt.layers.linear import FusedLinear
from sglang.srt.model_config import ModelConfig, ModelPathError
from sglang.srt.models.transformer import CausalLM
from sglang.srt.registry import MODELS

DUMMY_STD = 0.02
DUMMY_SEED = 0


def load_model(
    config: ModelConfig, load_format: str, max_positions: int, dtype: torch.dtype, device: str
) -> CausalLM:
    """Builds the architecture that config.json names.

    Args:
        load_format: `auto` or `safetensors` read the directory; `dummy` draws weights.
        max_positions: length of the RoPE table.

    Raises:
        ModelPathError: if the architecture is unknown, config.json asks of it what it has not, or
            weights are missing, broken or misshapen.
    """
    if config.architecture not in MODELS.names:
        raise config.refusal(
            f"architecture {config.architecture!r} is not supported; use a checkpoint of one that"
            f" is known: {', '.join(MODELS.names)}"
        )
    architecture = MODELS.load(config.architecture)
    with torch.device("meta"):
        model: CausalLM = architecture(config, max_positions)
    model.to_empty(device="cpu" if load_format != "dummy" else device)
    model.tie_head()
    model = model.to(dtype)
    # After the conversion, so that the table stays float32.
    model.model.rotary.recompute()
    if load_format == "dummy":
        _fill_dummy(model)
    else:
        _fill(model, config)
    return model.to(device).eval().requires_grad_(False)


def _fill_dummy(model: nn.Module) -> None:
    """Normal weights as at initialization, from a fixed seed; norms stay at one."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
            continue
        generator = torch.Generator(parameter.device).manual_seed(DUMMY_SEED + index)
        parameter.data.normal_(0.0, DUMMY_STD, generator=generator)


def _fill(model: nn.Module, config: ModelConfig) -> None:
    """Copies every tensor of the checkpoint to its place; each place exactly once."""
    targets = _targets(model)
    if config.tie_word_embeddings:
        targets.pop("lm_head.weight", None)
    missing = set(targets)
    for name, tensor in _read_tensors(config.path):
        target = targets.get(name)
        if target is None:
            if _may_be_ignored(name, config):
                continue
            raise ModelPathError(
                f"{config.path} has a weight {name!r} that {config.architecture} does not know;"
                " is `architectures` in config.json right?"
            )
        if target.shape != tensor.shape:
            raise ModelPathError(
                f"Weight {name!r} of {config.path} has shape {list(tensor.shape)}, but config.json"
                f" asks for {list(target.shape)}."
            )
        target.data.copy_(tensor)
        missing.discard(name)
    if missing:
        raise ModelPathError(
            f"{config.path} lacks {len(missing)} weights, such as {min(missing)!r}; is the download"
            " complete?"
        )


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Checkpoint name to the tensor (or rows of a fused one) that it fills."""
    targets: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(module, FusedLinear):
                targets[f"{module_name}.{name}"] = parameter
                continue
            prefix = module_name.rpartition(".")[0]
            for shard in module.shards:
                targets[f"{prefix}.{shard}.{name}"] = module.shard_of(parameter, shard)
    return targets


def _may_be_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints carry and that are computed here."""
    tied_head = config.tie_word_embeddings and name == "lm_head.weight"
    return tied_head or name.endswith("rotary_emb.inv_freq")


def _read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
                    yield name, weights.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelPathError(f"{file} is not a readable safetensors file: {error}.") from None


def _weight_files(path: Path) -> list[Path]:
    """The files of the index, if there is one, else every *.safetensors."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            # Only names inside the directory: an index must not reach other files.
            files = sorted({path / Path(name).name for name in names})
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise ModelPathError(f"{index} is not a safetensors index.") from None
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelPathError(
            f"{path} has no *.safetensors file; convert the weights, or use --load-format dummy."
        )
    return files
