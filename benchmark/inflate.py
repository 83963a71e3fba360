"""Writes a larger Llama that computes the same function as a small one, at the larger one's cost.

The gain of multi-token decoding hangs on the predictions: random weights cannot show it, and the
bundled model costs nothing to run. This puts that model into the geometry of a real one, by default
Llama-3.1-8B, among filler that is never heard (d and D are the hidden sizes):

- The residual stream keeps its d channels; the others are 0, but for a spare one that holds a
  constant c, written by the embedding and read by the last norm alone.
- A mean of squares over D channels is d/D of that over d, so norm weights times sqrt(d/D) and
  eps_big = (eps * d - c * c) / D give the old result. With D/d a power of 4 this rounds nothing.
- Query head g of KV head j becomes head G * j + g, G being the target's queries per KV head. Other
  heads, intermediate columns and layers compute something, but meet zeros in o_proj and down_proj.
- Tokens past the vocabulary have -6.4e5 at the spare channel of the head: no probability at all.

Zeros can be faster than numbers. `--silent-std 1e-12` puts normal values of that size in their
place, so that no matrix and no activation has any; logits then change by less than rounding.

    python -m benchmark.inflate --out DIR                 16 GB in bfloat16

`test/unit/benchmark/test_inflate.py` proves it on a small target.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from benchmark.random_model import LLAMA_8B, Geometry
from sglang.srt.model_config import ModelConfig, ModelPathError, load_model_config
from sglang.srt.model_loader.weight_files import read_directory

FILLER_STD = 0.02  # as of weights at initialization
# Times the spare channel after the last norm, which must be small there: a norm over that hidden
# state, as of NEXTN, would hear it.
PADDED_LOGIT = -6.4e5
EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
BLOCKS = (
    *("input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


class InflationError(ValueError):
    """A target that the small model does not fit into, or a model of another kind."""


def weight_names(geometry: Geometry) -> list[str]:
    """Returns the names of the weights of a Llama with a head of its own, in the order in which
    they are made."""
    layers = [f"model.layers.{layer}" for layer in range(geometry.num_layers)]
    inner = [f"{layer}.{block}.weight" for layer in layers for block in BLOCKS]
    return [EMBEDDING, *inner, LAST_NORM, HEAD]


@dataclass(frozen=True, kw_only=True)
class Inflation:
    """From which sizes to which, and the numbers that keep the function.

    Attributes:
        norm_scale: factor of all norm weights, sqrt(d/D).
        spare: what the spare channel holds, a power of two.
        eps: of the target's norms.
    """

    small: Geometry
    target: Geometry
    norm_scale: float
    spare: float
    eps: float


def plan_inflation(config: ModelConfig, target: Geometry) -> Inflation:
    """The inflation of a model.

    Raises:
        InflationError: if the target is too small for it, or the model is no plain Llama.
    """
    if config.architecture != "LlamaForCausalLM":
        raise InflationError(f"Only a LlamaForCausalLM can be inflated, no {config.architecture}.")
    small = Geometry(**{field.name: vars(config)[field.name] for field in fields(Geometry)})
    for name, size in asdict(small).items():
        if asdict(target)[name] < size:
            raise InflationError(f"{name} must be at least {size}, that of the small model.")
    if target.head_dim != small.head_dim:
        raise InflationError(f"head_dim must stay {small.head_dim}: attention depends on it.")
    queries = small.num_heads // small.num_kv_heads
    if target.num_heads % target.num_kv_heads or target.num_heads < queries * target.num_kv_heads:
        raise InflationError(f"num_heads must be {queries} or more times num_kv_heads.")
    d, big_d = small.hidden_size, target.hidden_size
    if big_d == d:
        raise InflationError(f"hidden_size must be larger than {d}: one channel must be spare.")
    root = math.isqrt(big_d // d)
    if root * root * d != big_d or root & (root - 1):
        raise InflationError(
            f"hidden_size is {big_d / d:g} times {d}, but only powers of 4 keep norm weights exact."
        )
    # The largest power of two that leaves half of eps or more.
    budget = config.rms_norm_eps * d
    spare = 2.0 ** math.floor(math.log2(budget / 2) / 2)
    scale, eps = math.sqrt(d / big_d), (budget - spare * spare) / big_d
    return Inflation(small=small, target=target, norm_scale=scale, spare=spare, eps=eps)


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Describes what lies where the function does not look, and how tensors are made.

    Attributes:
        device: where they are made. CPU and CUDA draw different filler.
        silent_std: of what must contribute nothing; 0 for zeros.
    """

    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    silent_std: float = 0.0

    def draw(self, name: str, *shape: int, std: float = FILLER_STD) -> torch.Tensor:
        """Normal values: the same for the same seed and name."""
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.normal_(0.0, std, generator=generator)

    def silence(self, name: str, *shape: int) -> torch.Tensor:
        """Zeros, or almost."""
        if self.silent_std:
            return self.draw(name, *shape, std=self.silent_std)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Builder:
    """Makes one tensor of the target at a time. `weights` are those of the small model."""

    weights: Mapping[str, torch.Tensor]
    plan: Inflation
    filling: Filling

    def tensor(self, name: str) -> torch.Tensor:
        if name in (EMBEDDING, HEAD):
            return self.embedding() if name == EMBEDDING else self.head()
        return self.norm(name) if "norm" in name else self.matrix(name)

    def embedding(self) -> torch.Tensor:
        """[V, D]: rows of other tokens are filler, and all hold the constant."""
        v, d, target = self.plan.small.vocab_size, self.plan.small.hidden_size, self.plan.target
        weight = self.filling.silence(EMBEDDING, target.vocab_size, target.hidden_size)
        weight[:v, :d] = self.weights[EMBEDDING].to(weight)
        weight[v:, :d] = self.filling.draw(f"{EMBEDDING} padding", target.vocab_size - v, d)
        weight[:, d] = self.plan.spare
        return weight

    def head(self) -> torch.Tensor:
        """[V, D]: of the spare channel, tokens hear nothing and padding hears that it is none."""
        v, d = self.plan.small.vocab_size, self.plan.small.hidden_size
        weight = self.filling.draw(HEAD, self.plan.target.vocab_size, self.plan.target.hidden_size)
        weight[:v, :d] = self.weights.get(HEAD, self.weights[EMBEDDING]).to(weight)
        weight[:v, d] = 0.0
        weight[v:, d] = PADDED_LOGIT
        return weight

    def norm(self, name: str) -> torch.Tensor:
        """[D]: only the last norm lets the spare channel pass."""
        d, scale = self.plan.small.hidden_size, self.plan.norm_scale
        weight = torch.full((self.plan.target.hidden_size,), scale, dtype=torch.float64)
        if name in self.weights:
            weight[:d] = self.weights[name].to(weight) * scale
        weight[d] = scale if name == LAST_NORM else 0.0
        return weight.to(self.filling.device, self.filling.dtype)

    def matrix(self, name: str) -> torch.Tensor:
        """A projection, [out, in]: the small one in a corner, or in the corners of some heads."""
        small, target, kind = self.plan.small, self.plan.target, name.split(".")[-2]
        heads = {"q_proj": target.num_heads, "o_proj": target.num_heads}
        heads |= {"k_proj": target.num_kv_heads, "v_proj": target.num_kv_heads}
        inner = heads[kind] * target.head_dim if kind in heads else target.intermediate_size
        if kind in ("o_proj", "down_proj"):  # the only ways back into the residual stream
            weight = self.filling.silence(name, target.hidden_size, inner)
        else:
            weight = self.filling.draw(name, inner, target.hidden_size)
        if name not in self.weights:
            return weight
        corner, source, d = weight, self.weights[name].to(weight), small.hidden_size
        kv, shape = small.num_kv_heads, (-1, target.head_dim)
        if kind == "q_proj":
            source = source.view(kv, *shape, d)
            corner = weight.view(target.num_kv_heads, *shape, target.hidden_size)
        elif kind == "o_proj":
            source = source.view(d, kv, *shape)
            corner = weight.view(target.hidden_size, target.num_kv_heads, *shape)
        corner[tuple(slice(size) for size in source.shape)] = source
        return weight


def inflated_tensors(
    small: Mapping[str, torch.Tensor], inflation: Inflation, filling: Filling
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the target by its name in a checkpoint, made when it is asked for.

    Args:
        small: the weights of the small model, from `read_directory`.

    Raises:
        InflationError: if `small` has other weights than a Llama of these sizes.
    """
    if odd := (small.keys() | {HEAD}) ^ set(weight_names(inflation.small)):
        raise InflationError(f"The small model lacks or has beyond a Llama: {min(odd)!r}.")
    builder = _Builder(small, inflation, filling)
    for name in weight_names(inflation.target):
        yield name, builder.tensor(name)


def inflated_config(config: ModelConfig, plan: Inflation, dtype: torch.dtype) -> dict[str, Any]:
    """The target's config.json: token ids, context and RoPE stay."""
    return {
        **{key: value for key, value in config.hf.items() if key != "dtype"},
        **plan.target.hf_config(),
        "rms_norm_eps": plan.eps,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "inflated_from": asdict(plan.small),
    }


def write_model(config: ModelConfig, out: Path, plan: Inflation, filling: Filling) -> None:
    """Writes config.json, what belongs to the tokenizer, and the weights, one layer a file.

    Raises:
        InflationError: if there are weights in `out` already.
    """
    out.mkdir(parents=True, exist_ok=True)
    if stale := sorted(out.glob("*.safetensors*")):
        raise InflationError(f"{out} has weights already, such as {stale[0].name}; remove them.")
    target_config = inflated_config(config, plan, filling.dtype)
    (out / "config.json").write_text(json.dumps(target_config, indent=2) + "\n", encoding="utf-8")
    for file in config.path.glob("*.json"):
        if file.name != "config.json" and not file.name.endswith(".index.json"):
            shutil.copyfile(file, out / file.name)
    num_files, num_bytes, files = plan.target.num_layers + 3, 0, {}
    tensors = inflated_tensors(dict(read_directory(config.path)), plan, filling)
    shards = groupby(tensors, key=lambda item: item[0].split(".")[:3])
    for number, (_, shard) in enumerate(tqdm(shards, total=num_files, unit="file", desc=out.name)):
        file_name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        content = {name: tensor.cpu() for name, tensor in shard}
        save_file(content, out / file_name, metadata={"format": "pt"})
        files.update(dict.fromkeys(content, file_name))
        num_bytes += sum(tensor.nbytes for tensor in content.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Writes a folder; 2 for a target that the model does not fit into."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--model-path", default="demo", help="the small model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu", help="where filler is drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--silent-std", type=float, default=0.0)
    for field in fields(Geometry):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int)
    args = parser.parse_args(arguments)
    given = {field.name: vars(args)[field.name] for field in fields(Geometry)}
    geometry = replace(LLAMA_8B, **{key: size for key, size in given.items() if size})
    dtype = getattr(torch, args.dtype)
    filling = Filling(seed=args.seed, dtype=dtype, device=args.device, silent_std=args.silent_std)
    try:
        config = load_model_config(args.model_path)
        write_model(config, args.out, plan_inflation(config, geometry), filling)
    except (InflationError, ModelPathError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
