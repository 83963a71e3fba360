"""Small draft heads in each layout in which they are published, with random weights.

A case is written from the layout's facts alone: its forward pass (`facts`) and its tensors by plain
names for the oracle, and config.json and the names in the file for the loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draft_heads import (
    EAGLE,
    EAGLE3,
    FILE,
    MASK_TOKEN,
    SMALL,
    Shapes,
    eagle3_config,
    eagle3_shapes,
    eagle_config,
    eagle_shapes,
    random_tensors,
)

IDS = "eagle_aux_hidden_state_layer_ids"
H, V, HEAD_DIM, Q, KV = SMALL.hidden, SMALL.vocab, SMALL.head_dim, 64, 32
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class HeadCase:
    """A head of a layout.

    Attributes:
        layout: what it is called in tests.
        facts: entries that its forward pass follows, beside those of its shape.
        entries: of config.json, beside those of its shape.
        add: tensors beside those of the plain head of its kind, by plain names.
        drop: tensors of the plain head that it does not have.
        rename: the file's name of a plain one.
        nests: config.json is that of speculators: the shape in an object of its own.
        taps: layers of a target of 8 whose inputs it reads.
        target_hidden: width of that target.
    """

    layout: str
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)
    add: Shapes = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    rename: Callable[[str], str] = str
    nests: bool = False
    taps: tuple[int, ...] = (2, 4, 5)
    target_hidden: int = H

    @property
    def config(self) -> dict[str, Any]:
        shape = eagle_config() if self.kind == EAGLE else eagle3_config()
        if not self.nests:
            return {**shape, **self.entries}
        own = {"draft_vocab_size": shape.pop("draft_vocab_size"), "model_type": "speculator_model"}
        del shape["architectures"]
        return {**own, "transformer_layer_config": shape, **self.entries}

    def tensors(self) -> Tensors:
        shapes = eagle_shapes(SMALL) if self.kind == EAGLE else eagle3_shapes(SMALL, "layers.0.")
        plain = random_tensors({**shapes, **self.add}, seed=3)
        plain = {name: each for name, each in plain.items() if name not in self.drop}
        if "d2t" in plain:
            plain["t2d"] = torch.zeros(V, dtype=torch.bool)
            plain["t2d"][plain["d2t"] + torch.arange(len(plain["d2t"]))] = True
        return plain

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({self.rename(name): each for name, each in self.tensors().items()}, folder / FILE)
        return folder

    @property
    def oracle_facts(self) -> dict[str, Any]:
        shape = eagle_config() if self.kind == EAGLE else eagle3_config()
        return {**shape, **self.facts}


def floats(**shapes: list[int]) -> Shapes:
    """Tensors by names with `__` for dots."""
    return {name.replace("__", "."): (torch.float32, shape) for name, shape in shapes.items()}


def midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def model_prefix(name: str) -> str:
    return name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}"


def aux_norms(name: str) -> str:
    for index, level in enumerate(("low", "mid", "high")):
        name = name.replace(f"fc_norm.{index}.", f"aux_norm_{level}.")
    return midlayer(name)


def upper_layer(layer: int) -> Shapes:
    """A plain decoder layer above the first one."""
    own = {
        name.replace("layers.0.", f"layers.{layer}."): each
        for name, each in eagle_shapes(SMALL).items()
        if name.startswith("layers.0.")
    }
    return own | {f"layers.{layer}.input_layernorm.weight": (torch.float32, [H])}


EMBEDDING = floats(embed_tokens__weight=[V, H])
QKV_BIASES = floats(
    layers__0__self_attn__q_proj__bias=[Q],
    layers__0__self_attn__k_proj__bias=[KV],
    layers__0__self_attn__v_proj__bias=[KV],
)
ALL_BIASES = QKV_BIASES | floats(
    layers__0__self_attn__o_proj__bias=[H],
    layers__0__mlp__gate_proj__bias=[96],
    layers__0__mlp__up_proj__bias=[96],
    layers__0__mlp__down_proj__bias=[H],
)
QK_NORMS = floats(
    layers__0__self_attn__q_norm__weight=[HEAD_DIM],
    layers__0__self_attn__k_norm__weight=[HEAD_DIM],
)
FC_NORMS = floats(fc_norm__0__weight=[H], fc_norm__1__weight=[H], fc_norm__2__weight=[H])
OF_TARGET = ("d2t", "t2d", "lm_head.weight")
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/model"}},
    "target_hidden_size": None,
    "norm_before_residual": False,
}
BEFORE = {"norm_before_residual": True}

CASES = (
    HeadCase("yuhuili EAGLE3", EAGLE3, rename=midlayer),
    HeadCase(
        "SpecForge, ids of outputs",
        EAGLE3,
        entries={"architectures": [EAGLE3], "eagle_config": {IDS: [0, 3, 5]}},
        taps=(1, 4, 6),
    ),
    HeadCase(
        "AngelSlim, vLLM's class",
        EAGLE3,
        entries={"architectures": ["Eagle3LlamaForCausalLM"], "attention_bias": False},
    ),
    HeadCase(
        "lmsys, the target's vocabulary",
        EAGLE3,
        entries={"architectures": [EAGLE3], "draft_vocab_size": None},
        drop=OF_TARGET,
    ),
    HeadCase(
        "a whole output head of its own",
        EAGLE3,
        entries={"draft_vocab_size": None},
        drop=OF_TARGET,
        add=floats(lm_head__weight=[V, H]),
    ),
    HeadCase("yuhuili EAGLE without a bias", EAGLE),
    HeadCase("yuhuili EAGLE with a bias", EAGLE, add=floats(fc__bias=[H])),
    HeadCase("lmsys EAGLE", EAGLE, entries={"architectures": [EAGLE]}),
    HeadCase(
        "vLLM EAGLE, model. prefix",
        EAGLE,
        entries={"architectures": ["EagleLlamaForCausalLM"]},
        rename=model_prefix,
    ),
    HeadCase(
        "EAGLE with an embedding and a head", EAGLE, add=EMBEDDING | floats(lm_head__weight=[V, H])
    ),
    HeadCase(
        "yuhuili EAGLE-Qwen2",
        EAGLE,
        entries={"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        add=QKV_BIASES,
    ),
    HeadCase(
        "NeMo, ids of inputs at the top",
        EAGLE3,
        entries={"architectures": [EAGLE3], IDS: [1, 2, 6]},
        taps=(1, 2, 6),
    ),
    HeadCase("an embedding of its own", EAGLE3, add=EMBEDDING, rename=midlayer),
    HeadCase(
        "yuhuili EAGLE3-Vicuna, the target's layer count",
        EAGLE3,
        entries={"num_hidden_layers": 40},
        rename=midlayer,
    ),
    HeadCase("model. prefix", EAGLE3, rename=lambda name: model_prefix(midlayer(name))),
    HeadCase(
        "NVIDIA gpt-oss",
        EAGLE3,
        facts={"norm_before_fc": True},
        entries={
            "architectures": [EAGLE3],
            "eagle_config": {IDS: [], "norm_before_fc": True, "use_aux_hidden_state": True},
        },
        add=floats(input_norm__weight=[3 * H]),
    ),
    HeadCase(
        "EAGLE-3.1",
        EAGLE3,
        facts={"fc_norm": True, "norm_output": True},
        entries={"fc_norm": True, "norm_output": True},
        add=FC_NORMS,
    ),
    HeadCase(
        "EAGLE-3.1, names of levels",
        EAGLE3,
        facts={"fc_norm": True, "norm_output": True},
        entries={"use_aux_norm": True, "norm_output": True},
        add=FC_NORMS,
        rename=aux_norms,
    ),
    HeadCase("flat, norm_before_residual", EAGLE3, facts=BEFORE, entries=BEFORE),
    HeadCase(
        "RedHat, nested",
        EAGLE3,
        facts=BEFORE,
        entries={**SPECULATORS, **BEFORE, IDS: [1, 4, 6]},
        add=EMBEDDING,
        nests=True,
        taps=(1, 4, 6),
    ),
    HeadCase(
        "speculators, EAGLE-3.1 of 2 layers",
        EAGLE3,
        facts={"fc_norm": True},
        entries={**SPECULATORS, "fc_norm": True},
        add=FC_NORMS | upper_layer(1) | EMBEDDING,
        nests=True,
    ),
    HeadCase("2 layers", EAGLE3, add=upper_layer(1)),
    HeadCase(
        "2 layers, SGLang's norm of the second",
        EAGLE3,
        add=upper_layer(1),
        rename=lambda name: name.replace("1.input_layernorm", "1.hidden_norm"),
    ),
    HeadCase("3 layers of EAGLE", EAGLE, add=upper_layer(1) | upper_layer(2)),
    HeadCase(
        "a target of another width",
        EAGLE3,
        entries={"target_hidden_size": 96},
        add=EMBEDDING | floats(fc__weight=[H, 3 * 96]),
        target_hidden=96,
    ),
    HeadCase(
        "P-EAGLE of 4 layers",
        EAGLE3,
        entries={"architectures": [EAGLE3], "pard_token": MASK_TOKEN, "mask_token_id": MASK_TOKEN},
        add=floats(mask_hidden=[1, 3 * H]) | upper_layer(1) | upper_layer(2) | upper_layer(3),
    ),
    HeadCase(
        "speculators, P-EAGLE",
        EAGLE3,
        facts=BEFORE,
        entries={
            **SPECULATORS,
            **BEFORE,
            "speculators_model_type": "peagle",
            "mask_token_id": MASK_TOKEN,
            "num_depths": 8,
        },
        add=EMBEDDING | upper_layer(1) | floats(mask_hidden=[1, 1, 3 * H]),
        nests=True,
    ),
    HeadCase("norms of queries and keys", EAGLE3, add=QK_NORMS),
    HeadCase(
        "biases",
        EAGLE3,
        entries={"attention_bias": True, "mlp_bias": True},
        add=ALL_BIASES | floats(fc__bias=[H]),
    ),
)
