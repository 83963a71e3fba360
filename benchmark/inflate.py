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

Zeros can be faster than numbers, so normal values of SILENT_STD stand in their place: then no
matrix and no activation has any, and logits change by less than rounding.

A draft head is inflated as a layer of the target is. `fc` passes the constant on, from the
embedding for EAGLE and from the first hidden state for EAGLE-3, since the norms behind it count on
it. It ignores the spare channel of what the last norm gives. With NEXTN the embedding comes from a
norm of its own, so the constant is nearly what it was; its last norm passes it on to the target's
output head, as the target's does. `--draft-vocab-size` pads an EAGLE-3 head's own output head to
the size of published ones, with tokens of the target's padding that are never drafted.

    python -m benchmark.inflate --out DIR                 16 GB in bfloat16
    python -m benchmark.inflate --out DIR --head demo-eagle3 --algorithm EAGLE3

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

from benchmark.random_model import INFLATED_GEOMETRIES, Geometry
from sglang.srt.head_config import DraftHeadConfig, load_head_config
from sglang.srt.head_layouts import EAGLE, EAGLE3, NEXTN, renamed
from sglang.srt.model_config import ModelConfig, ModelPathError, load_model_config
from sglang.srt.model_loader.weight_files import read_directory

FILLER_STD, SILENT_STD = 0.02, 1e-12  # as of weights at initialization; of what is not to be heard
# Times the spare channel after the last norm, which must be small there: a norm over that hidden
# state, as of NEXTN, would hear it.
PADDED_LOGIT = -6.4e5
EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
BLOCKS = (
    *("input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
WAYS_BACK = ("o_proj", "down_proj")  # into the residual stream, the only ones
HEAD_LAYOUTS = {"EAGLE": EAGLE, "EAGLE3": EAGLE3, "NEXTN": NEXTN}
# Tensors of draft heads.
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
IGNORED, NORM_OF_HEAD = "embed_tokens.weight", "norm.weight"


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
    queries, d, big_d = small.num_heads // small.num_kv_heads, small.hidden_size, target.hidden_size
    for name, size in asdict(small).items():
        if asdict(target)[name] < size:
            raise InflationError(f"{name} must be at least {size}, that of the small model.")
    if target.head_dim != small.head_dim:
        raise InflationError(f"head_dim must stay {small.head_dim}: attention depends on it.")
    if target.num_heads % target.num_kv_heads or target.num_heads < queries * target.num_kv_heads:
        raise InflationError(f"num_heads must be {queries} or more times num_kv_heads.")
    root = math.isqrt(big_d // d)
    if root * root * d != big_d or root & (root - 1) or root < 2:
        raise InflationError(f"hidden_size must be {d} times a power of 4, with a spare channel.")
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
class Builder:
    """Makes tensors of the target of those of the small model, which a filler layer does not have:
    then `small` is None."""

    plan: Inflation
    filling: Filling

    def embedding(self, small: torch.Tensor) -> torch.Tensor:
        """[V, D]: rows of other tokens are filler, and all hold the constant."""
        (v, d), target = small.shape, self.plan.target
        weight = self.filling.silence(EMBEDDING, target.vocab_size, target.hidden_size)
        weight[:v, :d] = small.to(weight)
        weight[v:, :d] = self.filling.draw(f"{EMBEDDING} padding", target.vocab_size - v, d)
        weight[:, d] = self.plan.spare
        return weight

    def head(self, small: torch.Tensor) -> torch.Tensor:
        """[V, D]: of the spare channel, tokens hear nothing and padding hears that it is none."""
        v, d = small.shape
        weight = self.filling.draw(HEAD, self.plan.target.vocab_size, self.plan.target.hidden_size)
        weight[:v, :d] = small.to(weight)
        weight[:v, d] = 0.0
        weight[v:, d] = PADDED_LOGIT
        return weight

    def norm(self, small: torch.Tensor | None, passes_spare: bool = False) -> torch.Tensor:
        """[D]: the last norm of a model lets the spare channel pass."""
        d, scale = self.plan.small.hidden_size, self.plan.norm_scale
        weight = torch.full((self.plan.target.hidden_size,), scale, dtype=torch.float64)
        if small is not None:
            weight[:d] = small.to(weight) * scale
        weight[d] = scale if passes_spare else 0.0
        return weight.to(self.filling.device, self.filling.dtype)

    def matrix(self, name: str, kind: str, small: torch.Tensor | None) -> torch.Tensor:
        """A projection, [out, in]: the small one in a corner, or in the corners of some heads.
        Inputs of a draft head's q, k and v may be two hidden states wide."""
        plan, target, d = self.plan, self.plan.target, self.plan.small.hidden_size
        big_d, kv, big_kv = target.hidden_size, plan.small.num_kv_heads, target.num_kv_heads
        heads = {"q_proj": target.num_heads, "o_proj": target.num_heads}
        heads |= {"k_proj": big_kv, "v_proj": big_kv}
        inner = heads[kind] * target.head_dim if kind in heads else target.intermediate_size
        if kind == "lm_head":  # of a draft head
            inner = len(small)
        count = 1 if small is None or kind in WAYS_BACK else small.shape[1] // d
        if kind in WAYS_BACK:
            weight = self.filling.silence(name, big_d, inner)
        else:
            weight = self.filling.draw(name, inner, count * big_d)
        if small is None:
            return weight
        by_head = (-1, target.head_dim)
        shapes = {  # of the small one, and of the large one
            "q_proj": ((kv, *by_head, count, d), (big_kv, *by_head, count, big_d)),
            "o_proj": ((d, kv, *by_head), (big_d, big_kv, *by_head)),
            "down_proj": (small.shape, weight.shape),
        }
        shape, big_shape = shapes.get(kind, ((-1, count, d), (-1, count, big_d)))
        source = small.view(shape).to(weight)
        weight.view(big_shape)[tuple(slice(size) for size in source.shape)] = source
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
    builder = Builder(inflation, filling)
    for name in weight_names(inflation.target):
        weight = small.get(name)
        if name == EMBEDDING:
            yield name, builder.embedding(small[name])
        elif name == HEAD:
            yield name, builder.head(small.get(name, small[EMBEDDING]))
        elif "norm" in name:
            yield name, builder.norm(weight, passes_spare=name == LAST_NORM)
        else:
            yield name, builder.matrix(name, name.split(".")[-2], weight)


def inflated_config(hf: Mapping[str, Any], plan: Inflation, dtype: torch.dtype) -> dict[str, Any]:
    """The target's config.json, of the small one: token ids, context and RoPE stay."""
    return {
        **{key: value for key, value in hf.items() if key != "dtype"},
        **plan.target.hf_config(),
        "rms_norm_eps": plan.eps,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "inflated_from": asdict(plan.small),
    }


def new_folder(out: Path, config: dict[str, Any]) -> None:
    """Makes a folder of a model, and writes its config.json.

    Raises:
        InflationError: if there are weights in it already.
    """
    out.mkdir(parents=True, exist_ok=True)
    if stale := sorted(out.glob("*.safetensors*")):
        raise InflationError(f"{out} has weights already, such as {stale[0].name}; remove them.")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_model(config: ModelConfig, out: Path, plan: Inflation, filling: Filling) -> None:
    """Writes config.json, what belongs to the tokenizer, and the weights, one layer a file.

    Raises:
        InflationError: if there are weights in `out` already.
    """
    new_folder(out, inflated_config(config.hf, plan, filling.dtype))
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


# ---------------------------------------------------------------- draft heads


def inflated_head(
    small: Mapping[str, torch.Tensor],
    plan: Inflation,
    filling: Filling,
    names: tuple[tuple[str, str], ...] = (),
) -> dict[str, torch.Tensor]:
    """Every tensor of the larger head.

    Args:
        small: those of a head, from `read_directory`.
        plan: the inflation of the target, from the head's sizes.
        names: see `DraftHeadConfig`.
    """
    builder = Builder(plan, filling)
    return {
        name: _of_head(name, renamed(name, names), tensor, builder)
        for name, tensor in small.items()
        if name != IGNORED
    }


def pad_draft_vocabulary(
    tensors: dict[str, torch.Tensor], num_tokens: int, plan: Inflation, filling: Filling
) -> None:
    """Adds tokens to the output head of an inflated EAGLE-3 head, up to `num_tokens`. They hear
    from the spare channel that they are none, and stand for tokens of the target's padding.

    Raises:
        InflationError: if the head has no vocabulary of its own, or there are too few tokens.
    """
    d, big_d = plan.small.hidden_size, plan.target.hidden_size
    if DRAFT_TO_TARGET not in tensors:
        raise InflationError("--draft-vocab-size: this head has the target's vocabulary.")
    count = len(tensors[DRAFT_TO_TARGET])
    first, most = plan.small.vocab_size, plan.target.vocab_size - plan.small.vocab_size + count
    if not count <= num_tokens <= most:
        raise InflationError(f"--draft-vocab-size must be between {count} and {most}.")
    weight = filling.draw(f"{HEAD} padding", num_tokens, big_d)
    weight[:count] = tensors[HEAD].to(weight)
    weight[count:, d] = PADDED_LOGIT
    tensors[HEAD] = weight
    tensors[NORM_OF_HEAD][d] = plan.norm_scale
    added = torch.full((num_tokens - count,), first - count, dtype=torch.int64)
    tensors[DRAFT_TO_TARGET] = torch.cat((tensors[DRAFT_TO_TARGET], added))
    tensors[TARGET_TO_DRAFT][first : first + len(added)] = True


def _of_head(name: str, own: str, tensor: torch.Tensor, builder: Builder) -> torch.Tensor:
    """Makes a tensor of a head; `own` is its name here, `name` that of its file."""
    plan, filling = builder.plan, builder.filling
    d, big_d = plan.small.hidden_size, plan.target.hidden_size
    kind = own.split(".")[-2] if "." in own else own
    if kind == DRAFT_TO_TARGET:
        return tensor
    if kind == TARGET_TO_DRAFT:
        padding = torch.zeros(plan.target.vocab_size - len(tensor), dtype=torch.bool)
        return torch.cat((tensor, padding))
    if name == "fc.bias":
        bias = torch.zeros(big_d, dtype=filling.dtype)
        bias[:d] = tensor.to(bias)
        return bias
    if "norm" in kind:
        return builder.norm(tensor)
    if kind == "fc":
        return _joining_matrix(name, tensor, plan, filling)
    weight = builder.matrix(name, kind, tensor)
    if kind not in WAYS_BACK:  # no norm keeps the constant from EAGLE's layer
        weight.view(len(weight), -1, big_d)[:, :, d] = 0.0
    return weight


def _joining_matrix(
    name: str, tensor: torch.Tensor, plan: Inflation, filling: Filling
) -> torch.Tensor:
    """`fc`, [D, n * D] of [d, n * d]."""
    d, big_d = plan.small.hidden_size, plan.target.hidden_size
    count = tensor.shape[1] // d
    weight = filling.silence(name, big_d, count * big_d).view(big_d, count, big_d)
    weight[:d] = filling.draw(f"{name} rows", d, count, big_d)
    weight[:d, :, :d] = tensor.view(d, count, d).to(weight)
    weight[:, :, d] = 0.0
    weight[d] = 0.0
    weight[d, 0, d] = 1.0
    return weight.view(big_d, count * big_d)


def _pass_constant_on(
    head: DraftHeadConfig, tensors: dict[str, torch.Tensor], plan: Inflation, rms: float
) -> None:
    """Has an inflated layer of NEXTN, whose `tensors` have the names of its file, pass the constant
    from the embedding to the target's output head.

    Args:
        rms: root mean square of the small target's embedding, which the first norm divides by.
    """
    d, big_d = plan.small.hidden_size, plan.target.hidden_size
    own = {renamed(name, head.names): tensor for name, tensor in tensors.items()}
    own["embedding_norm.weight"][d] = plan.norm_scale * rms
    own[NORM_OF_HEAD][d] = plan.norm_scale
    row = own["fc.weight"][d].view(2, big_d)
    row[:] = 0.0
    row[int(head.layout.hidden_first), d] = 1.0


def write_head(
    head: DraftHeadConfig,
    out: Path,
    plan: Inflation,
    filling: Filling,
    draft_vocab_size: int | None = None,
) -> None:
    """Writes config.json and the weights.

    Args:
        draft_vocab_size: see `pad_draft_vocabulary`; None: the small head's.

    Raises:
        InflationError: if there are weights in `out` already, or the head does not fit.
    """
    sizes = Geometry(**{field.name: vars(head)[field.name] for field in fields(Geometry)})
    plan = replace(plan, small=sizes)  # NEXTN's may be smaller than its target's
    tensors = inflated_head(dict(read_directory(head.path)), plan, filling, head.names)
    if head.architecture == NEXTN:
        embedding = dict(read_directory(head.target))[EMBEDDING].float()
        _pass_constant_on(head, tensors, plan, float(embedding.square().mean().sqrt()))
    if draft_vocab_size is not None:
        pad_draft_vocabulary(tensors, draft_vocab_size, plan, filling)
    kept = {key: head.hf[key] for key in ("architectures", "model_type")}
    entries = {**inflated_config(head.hf, plan, filling.dtype), "num_hidden_layers": 1, **kept}
    if draft_vocab_size is not None:
        entries["draft_vocab_size"] = draft_vocab_size
    new_folder(out, entries)
    content = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(content, out / "model.safetensors", metadata={"format": "pt"})


def main(arguments: list[str] | None = None) -> int:
    """Writes a folder; 2 for a target that the model or head does not fit into."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory to write")
    add("--model-path", default="demo", help="the small model")
    add("--geometry", choices=INFLATED_GEOMETRIES, default="llama-3.1-8b")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--device", default="cpu", help="where filler is drawn")
    add("--head", help="a head of the small model, which is written in its place")
    add("--algorithm", choices=HEAD_LAYOUTS, help="of the head")
    add("--draft-vocab-size", type=int, help="of an EAGLE-3 head; default: its own")
    args = parser.parse_args(arguments)
    dtype = getattr(torch, args.dtype)
    filling = Filling(dtype=dtype, device=args.device, silent_std=SILENT_STD)
    try:
        config = load_model_config(args.model_path)
        plan = plan_inflation(config, INFLATED_GEOMETRIES[args.geometry])
        if args.head is None:
            write_model(config, args.out, plan, filling)
        else:
            head = load_head_config(args.head, HEAD_LAYOUTS[args.algorithm], config)
            write_head(head, args.out, plan, filling, args.draft_vocab_size)
    except (InflationError, ModelPathError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
