"""Models of random weights: sizes of a Llama, a folder that `--load-format dummy` can serve, and
its weights as safetensors."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

STD = 0.02
BLOCK = 1 << 22  # values that are drawn; weights repeat them
HF_NAMES = {  # of config.json, where they differ
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}


@dataclass(frozen=True)
class Geometry:
    """Sizes of a Llama, named as in `ModelConfig`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def hf_config(self) -> dict[str, int]:
        """The sizes by their names in config.json."""
        return {HF_NAMES.get(name, name): size for name, size in asdict(self).items()}


LLAMA_8B = Geometry(4096, 14336, 32, 32, 8, 128, 128256)
GEOMETRIES = {"llama-3.1-8b": LLAMA_8B, "tiny": Geometry(256, 512, 2, 4, 2, 64, 4096)}
# Of draft models for LLAMA_8B, which have its tokens.
DRAFT_GEOMETRIES = {
    "llama-3.2-1b": Geometry(2048, 8192, 16, 32, 8, 64, 128256),
    "160m": Geometry(512, 2048, 8, 8, 4, 64, 128256),
    "tiny": Geometry(512, 512, 3, 4, 2, 64, 5000),
}


@contextmanager
def random_model(
    geometry_name: str, context_len: int = 8192, parent: Path | None = None
) -> Iterator[str]:
    """A folder with the config.json of a name in GEOMETRIES, until the block ends.

    Args:
        parent: where it is made; default: the system's temporary folder.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": context_len,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **GEOMETRIES[geometry_name].hf_config(),
    }
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


@contextmanager
def random_head(target: str) -> Iterator[str]:
    """A folder with the config.json of an EAGLE head for the model in `target`."""
    config = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "bias": False}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder


def weight_shapes(geometry: Geometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The weights of a Llama with a head of its own, by their names in a checkpoint."""
    sizes, hidden = geometry, geometry.hidden_size
    q_len, kv_len = (heads * sizes.head_dim for heads in (sizes.num_heads, sizes.num_kv_heads))
    blocks = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_len, hidden),
        "self_attn.k_proj": (kv_len, hidden),
        "self_attn.v_proj": (kv_len, hidden),
        "self_attn.o_proj": (hidden, q_len),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (sizes.intermediate_size, hidden),
        "mlp.up_proj": (sizes.intermediate_size, hidden),
        "mlp.down_proj": (hidden, sizes.intermediate_size),
    }
    yield "model.embed_tokens.weight", (sizes.vocab_size, hidden)
    for layer in range(sizes.num_layers):
        for name, shape in blocks.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (sizes.vocab_size, hidden)


def write_weights(folder: Path, geometry: Geometry) -> int:
    """Writes bfloat16 weights, one layer a file; returns their bytes. For times only: the values
    of a weight repeat."""
    drawn = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(STD).bfloat16()
    num_bytes, files = 0, dict[str, str]()
    shards = groupby(weight_shapes(geometry), key=lambda item: item[0].split(".")[:3])
    for number, (_, shard) in enumerate(
        tqdm(shards, total=geometry.num_layers + 3, unit="file", desc="writing weights")
    ):
        name = f"model-{number + 1:05}.safetensors"
        content = {
            weight: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else drawn.repeat(-(-math.prod(shape) // BLOCK))[: math.prod(shape)].view(shape)
            for weight, shape in shard
        }
        save_file(content, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(content, name))
        num_bytes += sum(tensor.nbytes for tensor in content.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return num_bytes
