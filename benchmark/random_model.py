"""Models of random weights: sizes of a Llama, and a folder that `--load-format dummy` can serve."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

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


@contextmanager
def random_model(geometry_name: str) -> Iterator[str]:
    """A folder with the config.json of a name in GEOMETRIES, until the block ends."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **GEOMETRIES[geometry_name].hf_config(),
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder
