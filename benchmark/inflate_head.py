"""Writes a larger draft head that says over an inflated target what a small one says over its own.

    python -m benchmark.inflate_head --head demo-eagle3 --algorithm EAGLE3 --out DIR

`inflate.py` says what the target's hidden states become: the small model's channels, zeros, and a
constant in the spare channel. The head's layer is inflated as a layer of the target is. `fc` passes
the constant on, from the embedding for EAGLE and from the first hidden state for EAGLE-3, since the
norms behind it count on it. It ignores the spare channel of what the last norm gives. With NEXTN
the embedding comes from a norm of its own, so the constant is nearly what it was; its last norm
passes it on to the target's output head, as the target's does.

`--draft-vocab-size` pads an EAGLE-3 head's own output head to the size of published ones, with
tokens of the target's padding that are never drafted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmark.inflate import (
    PADDED_LOGIT,
    Filling,
    Inflation,
    InflationError,
    plan_inflation,
)
from benchmark.random_model import LLAMA_8B, Geometry
from sglang.srt.head_config import DraftHeadConfig, load_head_config
from sglang.srt.head_layouts import EAGLE, EAGLE3, NEXTN, renamed
from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.model_loader.weight_files import read_directory

NAMES = {"EAGLE": EAGLE, "EAGLE3": EAGLE3, "NEXTN": NEXTN}
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
IGNORED = "embed_tokens.weight"
OUTPUT_HEAD, LAST_NORM = "lm_head.weight", "norm.weight"


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

    Raises:
        InflationError: if the head's layer has other sizes.
    """
    sizes = plan.small
    expected = {
        "q_proj": sizes.num_heads * sizes.head_dim,
        "k_proj": sizes.num_kv_heads * sizes.head_dim,
        "gate_proj": sizes.intermediate_size,
    }
    made = {}
    for name, tensor in small.items():
        own = renamed(name, names)
        kind = own.split(".")[-2] if "." in own else own
        if tensor.shape[0] != expected.get(kind, tensor.shape[0]):
            raise InflationError(f"{name} has {tensor.shape[0]} rows, not {expected[kind]}.")
        if name != IGNORED:
            made[name] = _inflate(name, kind, tensor, plan, filling)
    return made


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
    weight = filling.draw(f"{OUTPUT_HEAD} padding", num_tokens, big_d)
    weight[:count] = tensors[OUTPUT_HEAD].to(weight)
    weight[count:, d] = PADDED_LOGIT
    tensors[OUTPUT_HEAD] = weight
    tensors[LAST_NORM][d] = plan.norm_scale
    added = torch.full((num_tokens - count,), first - count, dtype=torch.int64)
    tensors[DRAFT_TO_TARGET] = torch.cat((tensors[DRAFT_TO_TARGET], added))
    tensors[TARGET_TO_DRAFT][first : first + len(added)] = True


def _inflate(
    name: str, kind: str, tensor: torch.Tensor, plan: Inflation, filling: Filling
) -> torch.Tensor:
    d, big_d = plan.small.hidden_size, plan.target.hidden_size
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
        weight = torch.full((big_d,), plan.norm_scale, dtype=torch.float64)
        weight[:d] = tensor.to(weight) * plan.norm_scale
        weight[d] = 0.0
        return weight.to(filling.dtype)
    if kind == "fc":
        return _inflate_fc(name, tensor, plan, filling)
    return _inflate_matrix(name, kind, tensor, plan, filling)


def _inflate_fc(name: str, tensor: torch.Tensor, plan: Inflation, filling: Filling) -> torch.Tensor:
    """[D, n * D] of [d, n * d]."""
    d, big_d = plan.small.hidden_size, plan.target.hidden_size
    count = tensor.shape[1] // d
    weight = filling.silence(name, big_d, count * big_d).view(big_d, count, big_d)
    weight[:d] = filling.draw(f"{name} rows", d, count, big_d)
    weight[:d, :, :d] = tensor.view(d, count, d).to(weight)
    weight[:, :, d] = 0.0
    weight[d] = 0.0
    weight[d, 0, d] = 1.0
    return weight.view(big_d, count * big_d)


def _inflate_matrix(
    name: str, kind: str, tensor: torch.Tensor, plan: Inflation, filling: Filling
) -> torch.Tensor:
    """A projection of the layer, or an output head. Inputs of q, k and v may be two hidden states
    wide."""
    small, target = plan.small, plan.target
    d, big_d, head_dim = small.hidden_size, target.hidden_size, target.head_dim
    if kind in ("o_proj", "down_proj"):
        inner = target.num_heads * head_dim if kind == "o_proj" else target.intermediate_size
        weight = filling.silence(name, big_d, inner)
        if kind == "down_proj":
            weight[:d, : tensor.shape[1]] = tensor.to(weight)
            return weight
        source = tensor.view(d, small.num_kv_heads, -1, head_dim)
        corner = weight.view(big_d, target.num_kv_heads, -1, head_dim)
        corner[:d, : source.shape[1], : source.shape[2]] = source.to(weight)
        return weight
    count = tensor.shape[1] // d
    rows = {
        "q_proj": target.num_heads * head_dim,
        **dict.fromkeys(("k_proj", "v_proj"), target.num_kv_heads * head_dim),
        **dict.fromkeys(("gate_proj", "up_proj"), target.intermediate_size),
        "lm_head": len(tensor),
    }[kind]
    weight = filling.draw(name, rows, count * big_d)
    weight.view(rows, count, big_d)[:, :, d] = 0.0  # no norm keeps the constant from EAGLE's layer
    if kind == "q_proj":
        source = tensor.view(small.num_kv_heads, -1, head_dim, count, d)
        corner = weight.view(target.num_kv_heads, -1, head_dim, count, big_d)
        corner[: source.shape[0], : source.shape[1], :, :, :d] = source.to(weight)
    else:
        weight.view(rows, count, big_d)[: len(tensor), :, :d] = tensor.view(-1, count, d).to(weight)
    return weight


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
    own[LAST_NORM][d] = plan.norm_scale
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
    out.mkdir(parents=True, exist_ok=True)
    if stale := sorted(out.glob("*.safetensors*")):
        raise InflationError(f"{out} has weights already, such as {stale[0].name}; remove them.")
    sizes = Geometry(**{field.name: vars(head)[field.name] for field in fields(Geometry)})
    plan = replace(plan, small=sizes)  # NEXTN's may be smaller than its target's
    tensors = inflated_head(dict(read_directory(head.path)), plan, filling, head.names)
    if head.architecture == NEXTN:
        embedding = dict(read_directory(head.target))["model.embed_tokens.weight"].float()
        _pass_constant_on(head, tensors, plan, float(embedding.square().mean().sqrt()))
    if draft_vocab_size is not None:
        pad_draft_vocabulary(tensors, draft_vocab_size, plan, filling)
    entries: dict[str, Any] = {
        **head.hf,
        **plan.target.hf_config(),
        "num_hidden_layers": 1,
        "rms_norm_eps": plan.eps,
        "tie_word_embeddings": False,
        "torch_dtype": str(filling.dtype).removeprefix("torch."),
        "inflated_from": asdict(plan.small),
    }
    entries |= {key: head.hf[key] for key in ("architectures", "model_type")}
    if draft_vocab_size is not None:
        entries["draft_vocab_size"] = draft_vocab_size
    (out / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    content = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(content, out / "model.safetensors", metadata={"format": "pt"})


def main(arguments: list[str] | None = None) -> int:
    """Writes a folder; 2 for a head that does not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--head", required=True, help="the small head")
    parser.add_argument("--algorithm", choices=NAMES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--model-path", default="demo", help="the small model")
    parser.add_argument("--draft-vocab-size", type=int, help="of an EAGLE-3 head; default: its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--silent-std", type=float, default=0.0)
    for field in fields(Geometry):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int)
    args = parser.parse_args(arguments)
    given = {field.name: vars(args)[field.name] for field in fields(Geometry)}
    geometry = replace(LLAMA_8B, **{key: size for key, size in given.items() if size})
    try:
        target = load_model_config(args.model_path)
        head = load_head_config(args.head, NAMES[args.algorithm], target)
        filling = Filling(seed=args.seed, silent_std=args.silent_std)
        plan = plan_inflation(target, geometry)
        write_head(head, args.out, plan, filling, args.draft_vocab_size)
    except (InflationError, ModelPathError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
