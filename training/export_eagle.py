"""Folders of draft heads, as published ones are laid out, with their model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.eagle_head import (
    EAGLE,
    EAGLE3,
    NEXTN,
    DraftHead,
    Eagle3Head,
    EagleHead,
    NextNHead,
)
from training.export import write_json
from training.model import LlamaShape
from training.tokens import BOS_ID, EOS_ID

WEIGHTS = "model.safetensors"
ARCHITECTURES = {
    EAGLE: "LlamaForCausalLMEagle",
    EAGLE3: "LlamaForCausalLMEagle3",
    NEXTN: "LlamaForCausalLMNextN",
}
NEXTN_PREFIX = "mtp."  # of the tensors of Qwen3-Next's layer for multi-token prediction
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def head_config(algorithm: str, head: DraftHead, taps: tuple[int, ...]) -> dict[str, Any]:
    """config.json of a head; `taps` are the layers whose inputs it reads, which an entry names by
    the layers before them, whose outputs those are."""
    shape = head.shape
    config = {
        "architectures": [ARCHITECTURES[algorithm]],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }
    if algorithm == EAGLE:
        return {**config, "bias": False}
    if algorithm == NEXTN:
        return config
    layers = {LAYER_IDS: [layer - 1 for layer in taps], "use_aux_hidden_state": True}
    return {**config, "draft_vocab_size": len(head.target_ids), "eagle_config": layers}


def write_head_folder(folder: Path, algorithm: str, head: DraftHead, taps: tuple[int, ...]) -> None:
    """Write config and bf16 weights into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", head_config(algorithm, head, taps))
    prefix = NEXTN_PREFIX if algorithm == NEXTN else ""
    tensors = {
        prefix + name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
    }
    if algorithm == EAGLE3:
        tensors |= vocabulary_maps(head.target_ids.cpu(), head.shape.vocab_size)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes it readable by the owner alone


def vocabulary_maps(target_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` [V] int64, to be added to a head's token to get the target's, and `t2d` [vocab_size]
    bool, the target's tokens that the head has, of target_ids [V] int64."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[target_ids] = True
    return {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": t2d}


def read_taps(folder: Path) -> tuple[int, ...]:
    """The layers of the target whose inputs the head of a folder reads."""
    options = json.loads((folder / "config.json").read_text()).get("eagle_config", {})
    return tuple(layer + 1 for layer in options.get(LAYER_IDS, ()))


def load_head(folder: Path) -> DraftHead:
    """The head of a folder that `write_head_folder` wrote, in float32."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / WEIGHTS)
    shape = LlamaShape.from_config(config)
    tensors.pop("t2d", None)
    offsets = tensors.pop("d2t", None)
    head: DraftHead
    if offsets is not None:
        head = Eagle3Head(shape, offsets + torch.arange(len(offsets)))
    elif config["architectures"] == [ARCHITECTURES[NEXTN]]:
        head = NextNHead(shape)
    else:
        head = EagleHead(shape)
    head.load_state_dict(
        {name.removeprefix(NEXTN_PREFIX): tensor.float() for name, tensor in tensors.items()}
    )
    return head


TRAINING = """---
library_name: safetensors
license: apache-2.0
language: code
base_model: tiny-code
---
# {name}

{what} It exists so that speculative decoding can be tried and tested without a download.

    python -m sglang.launch_server --model-path demo --speculative-algorithm {algorithm} \\
        --speculative-draft-model-path {path}

| | |
| --- | --- |
| own parameters | {parameters:.2f} M; embedding{shared} of the target |
| layer | hidden {hidden}, {heads} query and {kv_heads} KV heads of {head_dim}, MLP {mlp}, \
RoPE theta {theta:g}, {positions} positions |
{vocabulary}| weights | bfloat16, {megabytes:.2f} MB |
| accept length, {steps} draft steps | **{accept:.2f}** tokens per verification, the target's own \
included |

## Training

    {command}

{seconds:.0f} s on one {device} (commit {commit}), {updates:,} updates; the target is frozen. Each
step takes {batch} windows of {context} tokens, {own_share:.0%} of them continued by the target
itself (half greedy, half at temperature {temperature}), and starts a drafting at {starts} places of
each window. A drafting has {unrolled} steps, of which all but the first read the head's own output
(EAGLE-3, arXiv 2503.01840, section 3.1). Every {long_every} steps one more takes {long_rows}
windows of {long_context} tokens of real text.
The loss of a step is the cross-entropy to the target's distribution{also}; it counts fully while
the drafts before it are right, else {late:g} of that.
Optimisers: Muon (lr {muon_lr}) on matrices, AdamW (lr {adam_lr}) on the rest; {precision}.
The schedule follows the clock, so another machine gives other weights. All figures come from the
same run and are in `{results}`.

"""
ACCEPTANCE = """## Acceptance

{prompts} held-out prompts of 128 tokens, continued by {new} tokens: greedy, a chain of drafts,
float32. Only continuations with less than 20 % repeated 4-grams count (in brackets: all). The text
is the target's own, checked for every prompt (departures at a near-tie of two logits: {ties}).

| draft steps | accept length | rounds with at least 1, 2, ... drafts confirmed |
| --- | --- | --- |
{own_rows}

On real text of held-out packages, whose tokens are fed as if they had been drafted: how often
draft 1..{num_offsets} is what the target says there, alone and with all drafts before it right.

| window | places | alone | with all before it |
| --- | --- | --- | --- |
{real_rows}

Held out: {held_out}. The rule, and the licences of the corpus, are on the card of `tiny-code`;
this run found {train_files:,} training files, {train_tokens:.1f} M tokens.

"""
LIMITS = """## Limits

- It drafts for the weights of `tiny-code` in this project and no others.
- Drafts change no text: the target confirms each. A head that guesses badly costs time alone.

## Licence

The project's (Apache-2.0).
"""
CARD = TRAINING + ACCEPTANCE + LIMITS
WHAT = {
    EAGLE: "A draft head of EAGLE (arXiv 2401.15077) for the demo model `tiny-code`.",
    EAGLE3: "A draft head of EAGLE-3 (arXiv 2503.01840) for the demo model `tiny-code`.",
    NEXTN: "A layer for multi-token prediction (NEXTN; arXiv 2412.19437, section 2.2) for the demo"
    " model `tiny-code`, which drafts recurrently. Its tensors have Qwen3-Next's names.",
}
PATHS = {EAGLE: "demo-eagle", EAGLE3: "demo-eagle3", NEXTN: "demo-nextn"}


def _cells(shares: list[float | None]) -> str:
    return " ".join("-" if share is None else f"{share:.2f}" for share in shares)


def acceptance_fields(results: dict[str, Any], results_name: str) -> dict[str, Any]:
    """Returns what a card says of acceptance, for `ACCEPTANCE`."""
    found, corpus = results["acceptance"], results["corpus"]
    own_rows = [
        f"| {steps} | {row['accept_length'] or 0:.2f} ({row['accept_length_all']:.2f}) |"
        f" {_cells(row['accepted'])} |"
        for steps, row in found["own_text"].items()
    ]
    real_rows = [
        f"| {context} | {row['positions']:,} | {_cells(row['alone'])} | {_cells(row['accepted'])} |"
        for context, row in found["real_text"].items()
    ]
    return {
        "steps": found["num_steps"],
        "accept": found["own_text"][str(found["num_steps"])]["accept_length"] or 0,
        "results": results_name,
        "prompts": found["prompts"],
        "new": found["new_tokens"],
        "ties": found["near_ties"],
        "own_rows": "\n".join(own_rows),
        "num_offsets": max(map(int, found["own_text"])),
        "real_rows": "\n".join(real_rows),
        "held_out": ", ".join(corpus["held_out"]),
        "train_files": corpus["train_files"],
        "train_tokens": corpus["train_tokens"] / 1e6,
    }


def head_card(results: dict[str, Any], results_name: str) -> str:
    """README.md of the folder, from the results of train_eagle.py."""
    return CARD.format(
        **_head_fields(results["head"]),
        **_training_fields(results),
        **acceptance_fields(results, results_name),
    )


def _head_fields(head: dict[str, Any]) -> dict[str, Any]:
    """Returns what the card says of the head itself."""
    shape, is_eagle3 = head["shape"], head["algorithm"] == EAGLE3
    vocabulary = (
        f"| reads | the outputs of layers {head['layer_ids']} |\n"
        f"| draft vocabulary | {head['draft_vocab_size']:,} tokens, {head['covered']:.1%} of those"
        " that the target writes |\n"
    )
    return {
        "name": head["name"],
        "what": WHAT[head["algorithm"]],
        "algorithm": head["algorithm"],
        "path": PATHS[head["algorithm"]],
        "parameters": head["parameters"] / 1e6,
        "shared": "" if is_eagle3 else " and output head",
        "hidden": shape["hidden_size"],
        "heads": shape["num_attention_heads"],
        "kv_heads": shape["num_key_value_heads"],
        "head_dim": shape["head_dim"],
        "mlp": shape["intermediate_size"],
        "theta": shape["rope_theta"],
        "positions": shape["max_position_embeddings"],
        "vocabulary": vocabulary if is_eagle3 else "",
        "megabytes": head["weights_bytes"] / 1e6,
        "also": "" if is_eagle3 else ", and the distance to the target's hidden state",
    }


def _training_fields(results: dict[str, Any]) -> dict[str, Any]:
    """Returns what the card says of the run."""
    training = results["training"]
    names = ("starts", "unrolled")
    return {
        **run_fields(results),
        **{name: training["settings"][name] for name in names},
        "late": training["late_weight"],
    }


def run_fields(results: dict[str, Any]) -> dict[str, Any]:
    """Returns what the cards of heads and draft models say of the run."""
    training = results["training"]
    names = ("context", "own_share", "muon_lr", "adam_lr")
    long = ("long_every", "long_rows", "long_context")
    return {
        **{name: training["settings"][name] for name in (*names, *long)},
        "batch": training["settings"]["batch_size"],
        "command": results["command"],
        "seconds": training["seconds"],
        "device": results["device"],
        "precision": "bfloat16 autocast" if results["versions"]["cuda"] else "float32",
        "commit": results["commit"],
        "updates": training["steps"],
        "temperature": training["temperature"],
    }
