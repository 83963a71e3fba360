"""Models of random weights: sizes of a Llama or a Qwen3-MoE, and a folder that
`--load-format dummy` can serve."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from sglang.srt.model_config import resolve_model_path

HF_NAMES = {  # of config.json, where they differ
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_chosen": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
}


@dataclass(frozen=True)
class Geometry:
    """Sizes of a Llama, named as in `ModelConfig`.

    Attributes:
        family: what config.json says of the kind of model.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    family: ClassVar[dict[str, Any]] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500000.0,
    }

    def hf_config(self) -> dict[str, int]:
        """The sizes by their names in config.json."""
        return {HF_NAMES.get(name, name): size for name, size in asdict(self).items()}


@dataclass(frozen=True)
class ExpertGeometry(Geometry):
    """Sizes of a Qwen3-MoE; `intermediate_size` is that of a row's chosen experts together.

    Attributes:
        num_chosen: experts that compute a token.
        expert_size: intermediate features of each.
    """

    num_experts: int
    num_chosen: int
    expert_size: int

    family: ClassVar[dict[str, Any]] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
    }


LLAMA_8B = Geometry(4096, 14336, 32, 32, 8, 128, 128256)
GEOMETRIES = {
    "llama-3.1-8b": LLAMA_8B,
    "qwen3-30b-a3b": ExpertGeometry(2048, 8 * 768, 48, 32, 4, 128, 151936, 128, 8, 768),
    "32b": Geometry(5120, 25600, 64, 64, 8, 128, 151936),
    "tiny": Geometry(256, 512, 2, 4, 2, 64, 4096),
    "tiny-experts": ExpertGeometry(256, 2 * 64, 2, 4, 2, 64, 4096, 8, 2, 64),
}
# Of draft models for LLAMA_8B, which have its tokens, but for the last.
DRAFT_GEOMETRIES = {
    "llama-3.2-1b": Geometry(2048, 8192, 16, 32, 8, 64, 128256),
    "tiny-draft": Geometry(512, 512, 3, 4, 2, 64, 5000),
}
INFLATED_GEOMETRIES = {  # that the bundled models are inflated into
    "llama-3.1-8b": LLAMA_8B,
    "tiny": Geometry(1024, 1024, 6, 8, 4, 128, 5000),  # for trials on a CPU
    **DRAFT_GEOMETRIES,
}


@contextmanager
def random_model(geometry_name: str, context_len: int = 8192) -> Iterator[str]:
    """A folder with the config.json of a name in GEOMETRIES, until the block ends."""
    geometry = GEOMETRIES[geometry_name]
    config = {
        **geometry.family,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context_len,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **geometry.hf_config(),
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def dummy_flags(folder: str) -> dict[str, Any]:
    """Returns the flags of an Engine that serves such a folder, and logs errors alone."""
    tokenizer = str(resolve_model_path("demo"))
    return {
        "model_path": folder,
        "tokenizer_path": tokenizer,
        "load_format": "dummy",
        "log_level": "error",
    }


@contextmanager
def random_head(target: str) -> Iterator[str]:
    """A folder with the config.json of an EAGLE head for the model in `target`."""
    config = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "bias": False}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder
