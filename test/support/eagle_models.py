"""A target and heads, and a draft model, that often foresee it, and often do not.

The target's next token depends on its last token for the most part, and a little on all that it
follows. EAGLE's head hands the embedding of the token that it is fed on, as the target does; that
of EAGLE-3 gets it through attention, which sees its own row best. Both add some noise, so what they
say depends on all KV that they read. The draft model is a smaller one of the target's kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from block_heads import IDS
from draft_heads import (
    DFLASH,
    EAGLE,
    EAGLE3,
    MASK_TOKEN,
    P_EAGLE,
    Sizes,
    add_mask_hidden,
    architecture_of,
    block_config,
    block_shapes,
    eagle3_config,
    eagle3_shapes,
    eagle_config,
    eagle_shapes,
    random_tensors,
    write_head,
)
from sglang.srt.draft_model_config import load_draft_config
from sglang.srt.head_config import load_head_config
from sglang.srt.lookahead.adaptive_config import AdaptiveConfig
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.model_config import load_model_config
from sglang.srt.speculative.drafter_configs import EagleConfig, StandaloneConfig
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.draft_shapes import TreeShape
from thread_ranks import NUM_RANKS
from utils import make_random_llama

STANDALONE = "STANDALONE"
VOCAB, HIDDEN, CONTEXT, HEAD_CONTEXT = 24, 32, 128, 16
FOREIGN = (3, 14)
SIZES = Sizes(HIDDEN, 48, 2, 2, 16, VOCAB, VOCAB - len(FOREIGN))
OUTPUTS = ("o_proj.weight", "down_proj.weight")
EMBEDDING, OUTPUT_HEAD = "model.embed_tokens.weight", "lm_head.weight"
ATTENTION = "midlayer.self_attn."


def write_target(
    path: Path,
    seed: int = 0,
    noise: float = 0.028,
    num_layers: int = 8,
    hidden: int = HIDDEN,
    num_ranks: int = NUM_RANKS,
) -> Path:
    """A Llama of 8 layers: but for them token t would be followed by t + 7, and all sequences would
    go round. The first number of each embedding is 1."""
    make_random_llama(
        path,
        seed,
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=num_ranks,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    [file] = path.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        if name.endswith(OUTPUTS):
            tensor *= noise
    tensors[EMBEDDING][:, 0] = 1.0
    tensors[OUTPUT_HEAD] = tensors[EMBEDDING].roll(7, 0).clone()
    save_file(tensors, file, {"format": "pt"})
    return path


def write_eagle_head(path: Path, seed: int = 0, noise: float = 0.1, sizes: Sizes = SIZES) -> Path:
    """`fc` hands the embedding on."""
    tensors = random_tensors(eagle_shapes(sizes), seed)
    for name in tensors:
        if name.endswith((*OUTPUTS, "fc.weight")):
            tensors[name] *= noise
    tensors["fc.weight"][:, : sizes.hidden] += torch.eye(sizes.hidden)
    config = {**eagle_config(sizes), "max_position_embeddings": HEAD_CONTEXT}
    return write_head(path, config, tensors)


def write_eagle3_head(
    path: Path,
    target: Path,
    seed: int = 0,
    noise: float = 0.04,
    sizes: Sizes = SIZES,
    foreign: tuple[int, ...] = FOREIGN,
    **changes: Any,
) -> Path:
    """Attention hands the embedding on, and outweighs what it is added to. The number that all
    embeddings have makes queries and keys that agree best with those of the same position. The
    `foreign` tokens of the target are none of the head's. `changes` go to its config."""
    tensors = random_tensors(eagle3_shapes(sizes), seed)
    for name in tensors:
        if name.startswith(ATTENTION) or name.endswith("down_proj.weight"):
            tensors[name] *= noise
        if name.endswith("norm.weight"):
            tensors[name].fill_(1.0)
    for name in ("q_proj", "k_proj"):
        tensors[f"{ATTENTION}{name}.weight"][:, 0] += 1.2
    tensors[f"{ATTENTION}v_proj.weight"][:, : sizes.hidden] += torch.eye(sizes.hidden)
    tensors[f"{ATTENTION}o_proj.weight"] += 10 * torch.eye(sizes.hidden)
    ids = torch.tensor([token for token in range(sizes.vocab) if token not in foreign])
    tensors["d2t"] = ids - torch.arange(len(ids))
    [file] = target.glob("*.safetensors")
    tensors["lm_head.weight"] = load_file(file)[OUTPUT_HEAD][ids]
    config = {**eagle3_config(sizes), "max_position_embeddings": HEAD_CONTEXT, **changes}
    return write_head(path, {**config, "norm_output": True}, tensors)


def write_p_eagle_head(path: Path, target: Path, noise: float = 0.04) -> Path:
    """Drafts from mask tokens too, as that of `write_eagle3_head` drafts; these drafts are seldom
    right."""
    write_eagle3_head(path, target, noise=noise, mask_token_id=MASK_TOKEN)
    return add_mask_hidden(path, SIZES)


def write_block_head(path: Path, target: Path, seed: int = 0, noise: float = 1.2) -> Path:
    """Attention of mask tokens hands the embedding of the certain one on, so the first draft of a
    block is that of the head of `write_eagle3_head`, and so are others, which are seldom right. It
    looks for a number that all embeddings have, and away from those of mask tokens; hidden states
    of the target count little."""
    tensors = random_tensors(block_shapes(SIZES, 2), seed)
    [file] = target.glob("*.safetensors")
    mask = load_file(file)[EMBEDDING][MASK_TOKEN]
    mask = mask / mask.pow(2).mean().sqrt()
    mask[0] = 0.0
    for name in list(tensors):
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            del tensors[name]
        elif name.endswith("norm.weight"):
            tensors[name].fill_(0.6 if name.startswith("hidden") else 1.0)
        elif "self_attn" in name or name.endswith("down_proj.weight"):
            tensors[name] *= noise
    slowest = SIZES.head_dim // 2 - 1  # turns least with the distance
    for layer in range(2):
        at = f"layers.{layer}.self_attn."
        for head in range(SIZES.num_heads):
            row = head * SIZES.head_dim + slowest
            tensors[f"{at}q_proj.weight"][row, 0] += 2.0
            tensors[f"{at}k_proj.weight"][row] += 2.0 * torch.eye(SIZES.hidden)[0] - 0.5 * mask
        tensors[f"{at}v_proj.weight"] += torch.eye(SIZES.hidden)
        tensors[f"{at}o_proj.weight"] += 4 * torch.eye(SIZES.hidden)
    options = {"mask_token_id": MASK_TOKEN, IDS: [1, 3, 4]}
    config = {**block_config(SIZES), "dflash_config": options, "num_hidden_layers": 2}
    return write_head(path, {**config, "max_position_embeddings": HEAD_CONTEXT}, tensors)


def write_draft(path: Path, seed: int = 1, noise: float = 0.1) -> Path:
    """A draft model of 2 layers, half as wide as the target."""
    return write_target(path, seed, noise, num_layers=2, hidden=HIDDEN // 2)


def write_models(folder: Path, num_ranks: int = NUM_RANKS) -> dict[str, Path]:
    """The target, with KV heads for so many ranks, a head of each kind, and a draft model."""
    noise = 0.028 if num_ranks == 1 else 0.036
    target = write_target(folder / "target", noise=noise, num_ranks=num_ranks)
    return {
        "target": target,
        EAGLE: write_eagle_head(folder / EAGLE),
        EAGLE3: write_eagle3_head(folder / EAGLE3, target),
        P_EAGLE: write_p_eagle_head(folder / P_EAGLE, target),
        DFLASH: write_block_head(folder / DFLASH, target),
        STANDALONE: write_draft(folder / STANDALONE),
    }


def eagle_config_for(
    target: Path,
    head: Path,
    kind: str,
    num_steps: int,
    tier_policy: str = "fixed",
    initial_steps: int | None = None,
    adaptive: AdaptiveConfig | None = None,
    tile_spec_cache: Path | None = None,
    tree: TreeShape | None = None,
    **options: Any,
) -> DrafterConfig:
    """The drafter with the head of a folder, or of STANDALONE the draft model; `options` are of
    `load_head_config`, the others of `RoundOptions`."""
    model = load_model_config(str(target))
    rounds = RoundOptions(
        num_steps, tier_policy, initial_steps, adaptive, tile_spec_cache, tree=tree
    )
    if kind == STANDALONE:
        draft = load_draft_config(str(head), model, target)
        return DrafterConfig("standalone", StandaloneConfig(draft, replace(rounds, num_free=0)))
    config = load_head_config(str(head), architecture_of(kind), model, **options)
    if kind == DFLASH:
        assert config.mask is not None
        block = replace(rounds, num_free=0, block_size=config.mask.block_size)
        return DrafterConfig("dflash", EagleConfig(config, block))
    return DrafterConfig("eagle", EagleConfig(config, rounds))
