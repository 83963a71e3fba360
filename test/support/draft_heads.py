"""Folders of draft heads as they are published, small, and an oracle of their forward passes.

The oracle runs a whole sequence at once in plain torch, with an explicit mask and no cache, over
the tensors of the file. It shares no code with the runtime."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

EAGLE, EAGLE3 = "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"
NEXTN = "LlamaForCausalLMNextN"
DFLASH = "DFlashDraftModel"
P_EAGLE = "P-EAGLE"  # a kind of heads of EAGLE3
MASK_TOKEN = 5
BLOCK_SIZE = 6
FILE = "model.safetensors"
DRAFT_VOCAB_SIZE = 96

Shapes = dict[str, tuple[torch.dtype, list[int]]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a head; those given are Llama-3.1-8B's."""

    hidden: int = 4096
    intermediate: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    draft_vocab: int = 32000


SMALL = Sizes(64, 96, 4, 2, 16, 320, DRAFT_VOCAB_SIZE)


def eagle3_shapes(sizes: Sizes, layer: str = "midlayer.") -> Shapes:
    """Tensors of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, at any size."""
    dtype, size, mlp = torch.float32, sizes.hidden, sizes.intermediate
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    return {
        "d2t": (torch.int64, [sizes.draft_vocab]),
        "t2d": (torch.bool, [sizes.vocab]),
        "fc.weight": (dtype, [size, 3 * size]),
        f"{layer}self_attn.q_proj.weight": (dtype, [q, 2 * size]),
        f"{layer}self_attn.k_proj.weight": (dtype, [kv, 2 * size]),
        f"{layer}self_attn.v_proj.weight": (dtype, [kv, 2 * size]),
        f"{layer}self_attn.o_proj.weight": (dtype, [size, q]),
        f"{layer}mlp.gate_proj.weight": (dtype, [mlp, size]),
        f"{layer}mlp.up_proj.weight": (dtype, [mlp, size]),
        f"{layer}mlp.down_proj.weight": (dtype, [size, mlp]),
        f"{layer}hidden_norm.weight": (dtype, [size]),
        f"{layer}input_layernorm.weight": (dtype, [size]),
        f"{layer}post_attention_layernorm.weight": (dtype, [size]),
        "norm.weight": (dtype, [size]),
        "lm_head.weight": (dtype, [sizes.draft_vocab, size]),
    }


def eagle_shapes(sizes: Sizes) -> Shapes:
    """Tensors of yuhuili/EAGLE-LLaMA3.1-Instruct-8B, at any size, but for its copy of the target's
    embedding."""
    dtype, size, mlp = torch.float32, sizes.hidden, sizes.intermediate
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    return {
        "fc.weight": (dtype, [size, 2 * size]),
        "layers.0.self_attn.q_proj.weight": (dtype, [q, size]),
        "layers.0.self_attn.k_proj.weight": (dtype, [kv, size]),
        "layers.0.self_attn.v_proj.weight": (dtype, [kv, size]),
        "layers.0.self_attn.o_proj.weight": (dtype, [size, q]),
        "layers.0.mlp.gate_proj.weight": (dtype, [mlp, size]),
        "layers.0.mlp.up_proj.weight": (dtype, [mlp, size]),
        "layers.0.mlp.down_proj.weight": (dtype, [size, mlp]),
        "layers.0.post_attention_layernorm.weight": (dtype, [size]),
    }


def nextn_shapes(sizes: Sizes) -> Shapes:
    """Tensors of a layer for multi-token prediction, by plain names."""
    size = [sizes.hidden]
    names = ("embedding_norm", "hidden_norm", "layers.0.input_layernorm", "norm")
    return eagle_shapes(sizes) | {f"{name}.weight": (torch.float32, size) for name in names}


def block_shapes(sizes: Sizes, num_layers: int = 5, num_taps: int = 3) -> Shapes:
    """Tensors of z-lab/Qwen3-8B-DFlash-b16, at any size."""
    dtype, size, head = torch.float32, sizes.hidden, sizes.head_dim
    layer = {n: it for n, it in eagle_shapes(sizes).items() if n.startswith("layers.0.")}
    layer |= {f"layers.0.self_attn.{name}_norm.weight": (dtype, [head]) for name in "qk"}
    layer["layers.0.input_layernorm.weight"] = (dtype, [size])
    layers = {
        name.replace("layers.0.", f"layers.{index}."): each
        for index in range(num_layers)
        for name, each in layer.items()
    }
    norms = {f"{name}.weight": (dtype, [size]) for name in ("hidden_norm", "norm")}
    return layers | norms | {"fc.weight": (dtype, [size, num_taps * size])}


def block_config(sizes: Sizes = SMALL) -> dict[str, Any]:
    """Returns the configuration of a head of z-lab, without `dflash_config`."""
    shape = {**_config(sizes), "architectures": [DFLASH], "model_type": "qwen3"}
    return {**shape, "head_dim": sizes.head_dim, "block_size": BLOCK_SIZE, "rope_theta": 1000000.0}


def eagle3_config(sizes: Sizes = SMALL) -> dict[str, Any]:
    """As published: no rope_theta, and the name of a plain Llama."""
    return {**_config(sizes), "draft_vocab_size": sizes.draft_vocab}


def eagle_config(sizes: Sizes = SMALL) -> dict[str, Any]:
    return {**_config(sizes), "bias": False, "rope_theta": 500000.0}


def _config(sizes: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "initializer_range": 0.02,
        "intermediate_size": sizes.intermediate,
        "max_position_embeddings": 64,
        "model_type": "llama",
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": sizes.vocab,
    }


def random_tensors(shapes: Shapes, seed: int = 0) -> dict[str, torch.Tensor]:
    """Draft token i of an EAGLE-3 head is one of the target's tokens 3 i, 3 i + 1, 3 i + 2."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (dtype, shape) in shapes.items():
        if name == "d2t":
            chosen = torch.randint(0, 3, shape, generator=generator)
            tensors[name] = 2 * torch.arange(shape[0]) + chosen
        elif dtype == torch.bool:
            tensors[name] = torch.zeros(shape, dtype=dtype)
        elif name.endswith("norm.weight"):
            tensors[name] = 0.5 + torch.rand(shape, generator=generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * 0.2
    return tensors


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """`t2d` is made to fit `d2t`."""
    if "t2d" in tensors and "d2t" in tensors:
        tensors["t2d"].zero_()
        tensors["t2d"][tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = True
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / FILE)
    return folder


def write_eagle3(folder: Path, seed: int = 0, layer: str = "midlayer.", **changes: Any) -> Path:
    config = {**eagle3_config(), **changes}
    return write_head(folder, config, random_tensors(eagle3_shapes(SMALL, layer), seed))


def write_p_eagle(folder: Path, **changes: Any) -> Path:
    write_eagle3(folder, mask_token_id=MASK_TOKEN, **changes)
    return add_mask_hidden(folder, SMALL)


def add_mask_hidden(folder: Path, sizes: Sizes) -> Path:
    """Gives the file of an EAGLE-3 head hidden states of mask tokens."""
    mask = torch.randn(1, 1, 3 * sizes.hidden, generator=torch.Generator().manual_seed(2))
    save_file({**load_file(folder / FILE), "mask_hidden": mask}, folder / FILE)
    return folder


def architecture_of(kind: str) -> str:
    return EAGLE3 if kind == P_EAGLE else kind


def write_eagle(folder: Path, seed: int = 0, **changes: Any) -> Path:
    config = {**eagle_config(), **changes}
    return write_head(folder, config, random_tensors(eagle_shapes(SMALL), seed))


class Oracle:
    """A head of the folder over a target whose embedding and output head are given.

    Args:
        embedding, output: [vocab, hidden]; the target's.
        facts: of its forward pass, by names of entries; those of the folder's config.json if None.
        tensors: by the names that flat folders have; those of the folder if None.
    """

    def __init__(
        self,
        folder: Path,
        embedding: torch.Tensor,
        output: torch.Tensor,
        facts: dict[str, Any] | None = None,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.config = facts or json.loads((folder / "config.json").read_text())
        self.tensors = {
            name.replace("midlayer.", "layers.0.")
            .replace("mtp.pre_fc_norm_embedding", "embedding_norm")
            .replace("mtp.pre_fc_norm_hidden", "hidden_norm")
            .removeprefix("mtp."): tensor
            for name, tensor in (tensors or load_file(folder / FILE)).items()
        }
        self.embedding, self.output = embedding, output
        self.is_eagle3 = "layers.0.hidden_norm.weight" in self.tensors
        self.is_nextn = "embedding_norm.weight" in self.tensors

    def combine(self, taps: torch.Tensor) -> torch.Tensor:
        """The hidden input of a prompt's rows, of a target's hidden states."""
        if not self.is_eagle3:
            return taps
        if self.config.get("norm_before_fc"):
            taps = self._norm(taps, "input_norm")
        if self.config.get("fc_norm"):
            count = sum(name.startswith("fc_norm.") for name in self.tensors)
            each = enumerate(taps.chunk(count, dim=1))
            taps = torch.cat([self._norm(tap, f"fc_norm.{i}") for i, tap in each], dim=1)
        return self._linear(taps, "fc")

    def run(self, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Carried hidden states [T, hidden] and logits [T, tokens] of a whole sequence, whose
        hidden inputs are [T, hidden]."""
        embedded = self.tensors.get("embed_tokens.weight", self.embedding)[tokens]
        if self.is_eagle3:
            normed = self._norm(hidden, "layers.0.hidden_norm")
            x = torch.cat((self._norm(embedded, "layers.0.input_layernorm"), normed), dim=1)
            residual = normed if self.config.get("norm_before_residual") else hidden
        elif self.is_nextn:
            both = [self._norm(embedded, "embedding_norm"), self._norm(hidden, "hidden_norm")]
            residual = self._linear(torch.cat(both[:: self.config.get("order", 1)], dim=1), "fc")
            x = self._norm(residual, "layers.0.input_layernorm")
        else:
            x = residual = self._linear(torch.cat((embedded, hidden), dim=1), "fc")
        for layer in range(1 + max(int(n.split(".")[1]) for n in self.tensors if "layers." in n)):
            at = f"layers.{layer}."
            if layer:
                x = self._norm(residual, f"{at}input_layernorm")
            residual = residual + self._attention(x, f"{at}self_attn.")
            y = self._norm(residual, f"{at}post_attention_layernorm")
            gate, up = (self._linear(y, f"{at}mlp.{name}_proj") for name in ("gate", "up"))
            residual = residual + self._linear(
                gate * torch.sigmoid(gate) * up, f"{at}mlp.down_proj"
            )
        head = self.tensors.get("lm_head.weight", self.output)
        if not (self.is_eagle3 or self.is_nextn):
            return residual, residual @ head.T
        last = self._norm(residual, "norm")
        return (
            last if self.is_nextn or self.config.get("norm_output") else residual
        ), last @ head.T

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        x = x @ self.tensors[f"{name}.weight"].T
        return x + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else x

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = x.pow(2).mean(dim=-1, keepdim=True)
        return x / (mean + self.config["rms_norm_eps"]).sqrt() * self.tensors[f"{name}.weight"]

    def _attention(self, x: torch.Tensor, at: str) -> torch.Tensor:
        count, config = len(x), self.config
        num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        q, k, v = (self._linear(x, f"{at}{name}_proj") for name in "qkv")
        q, k = (each.view(count, -1, q.shape[1] // num_heads) for each in (q, k))
        if f"{at}q_norm.weight" in self.tensors:
            q, k = self._norm(q, f"{at}q_norm"), self._norm(k, f"{at}k_norm")
        q, k = self._rotate(q), self._rotate(k)
        v = v.view(count, num_kv_heads, -1)
        k, v = (each.repeat_interleave(num_heads // num_kv_heads, dim=1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -torch.inf).softmax(dim=2)
        attended = torch.einsum("hts,shd->thd", shares, v).reshape(count, -1)
        return self._linear(attended, f"{at}o_proj")

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, head_dim] at positions 0 to T - 1: pairs (i, i + head_dim / 2)."""
        half = x.shape[2] // 2
        theta = self.config.get("rope_theta", 10000.0)
        turns = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * turns
        cos, sin = (f(angles).float()[:, None] for f in (torch.cos, torch.sin))
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
