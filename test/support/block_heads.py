"""Small heads of DFlash as they are published, and an oracle of their forward pass.

The oracle drafts a block behind a whole sequence at once in plain torch, without a cache, over the
tensors of the file. It shares no code with the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draft_heads import (
    MASK_TOKEN,
    SMALL,
    Oracle,
    Shapes,
    Sizes,
    block_config,
    block_shapes,
    random_tensors,
    write_head,
)

IDS, INPUTS = "target_layer_ids", "aux_hidden_state_layer_ids"


def write_block_head(
    folder: Path, seed: int = 0, sizes: Sizes = SMALL, num_layers: int = 2, **changes: Any
) -> Path:
    """`changes` go to its config.json; without an object they are those of `dflash_config`."""
    options = {"mask_token_id": MASK_TOKEN, IDS: [1, 3, 4], **changes.pop("dflash_config", {})}
    config = {**block_config(sizes), "num_hidden_layers": num_layers, **changes}
    num_taps = len(options[IDS] or (1, 3, 4))
    tensors = random_tensors(block_shapes(sizes, num_layers, num_taps), seed)
    return write_head(folder, {**config, "dflash_config": options}, tensors)


@dataclass(frozen=True)
class BlockCase:
    """A head of a layout.

    Attributes:
        layout: what it is called in tests.
        entries: of config.json, beside those of its shape.
        nests: config.json is that of speculators: the shape in an object of its own.
        num_layers: of the head.
        add: tensors beside those of the plain head.
        drop: parts of names of tensors that it does not have.
        prefix: of all names in the file.
        taps: layers of a target of 8 whose inputs it reads.
    """

    layout: str
    entries: dict[str, Any]
    nests: bool = False
    num_layers: int = 2
    add: Shapes = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    prefix: str = ""
    taps: tuple[int, ...] = (2, 4, 5)

    @property
    def facts(self) -> dict[str, Any]:
        return {**block_config(SMALL), **self.entries, "mask_token_id": MASK_TOKEN}

    def tensors(self) -> dict[str, torch.Tensor]:
        shapes = block_shapes(SMALL, self.num_layers, len(self.taps)) | self.add
        kept = (name for name in shapes if not any(part in name for part in self.drop))
        return random_tensors({name: shapes[name] for name in kept}, 3)

    def write(self, folder: Path) -> Path:
        config = {**block_config(SMALL), "num_hidden_layers": self.num_layers}
        if self.nests:
            del config["architectures"], config["block_size"]
            config = {"transformer_layer_config": config}
        tensors = {self.prefix * (name != "d2t") + name: it for name, it in self.tensors().items()}
        return write_head(folder, {**config, **self.entries}, tensors)


OPTIONS = {"mask_token_id": MASK_TOKEN, IDS: [1, 3, 4]}
SPECULATORS = {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash"}
BLOCK_CASES = (
    BlockCase("z-lab DFlash", {"dflash_config": OPTIONS, "num_target_layers": 8}, num_layers=3),
    BlockCase(
        "z-lab DFlash, block in dflash_config",
        {"block_size": None, "dflash_config": {**OPTIONS, IDS: [0, 5], "block_size": 4}},
        num_layers=1,
        drop=("q_norm", "k_norm"),
        prefix="model.",
        taps=(1, 6),
    ),
    BlockCase(
        "speculators, DFlash",
        {**SPECULATORS, "mask_token_id": MASK_TOKEN, INPUTS: [1, 4, 6], "block_size": 5}
        | {"draft_vocab_size": SMALL.draft_vocab},
        nests=True,
        add={
            "d2t": (torch.int64, [SMALL.draft_vocab]),
            "t2d": (torch.bool, [SMALL.vocab]),
            "embed_tokens.weight": (torch.float32, [SMALL.vocab, SMALL.hidden]),
            "lm_head.weight": (torch.float32, [SMALL.draft_vocab, SMALL.hidden]),
        },
        taps=(1, 4, 6),
    ),
)


class BlockOracle(Oracle):
    """A head of DFlash over a target whose embedding and output head are given."""

    @property
    def block_size(self) -> int:
        size: int = self._entry("block_size")
        return size

    def combine(self, taps: torch.Tensor) -> torch.Tensor:
        """Joined hidden states [T, hidden] of those of several layers."""
        return self._norm(self._linear(taps, "fc"), "hidden_norm")

    def draft(self, certain: int, joined: torch.Tensor) -> torch.Tensor:
        """Logits [block_size - 1, tokens] of the rows behind a certain token, whose sequence has
        `joined` [T, hidden]."""
        tokens = [certain] + [self._entry("mask_token_id")] * (self.block_size - 1)
        x = self.tensors.get("embed_tokens.weight", self.embedding)[tokens]
        for layer in range(1 + max(int(n.split(".")[1]) for n in self.tensors if "layers." in n)):
            at = f"layers.{layer}."
            rows = self._norm(x, f"{at}input_layernorm")
            x = x + self._attend(rows, joined, f"{at}self_attn.")
            y = self._norm(x, f"{at}post_attention_layernorm")
            gate, up = (self._linear(y, f"{at}mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(gate * torch.sigmoid(gate) * up, f"{at}mlp.down_proj")
        return self._norm(x, "norm")[1:] @ self.tensors.get("lm_head.weight", self.output).T

    def _entry(self, name: str) -> Any:
        options = self.config.get("dflash_config") or {}
        return options[name] if name in options else self.config[name]

    def _attend(self, rows: torch.Tensor, joined: torch.Tensor, at: str) -> torch.Tensor:
        """Attention of a block's rows over all of them, and over what comes before."""
        everything = torch.cat((joined, rows))
        count, total = len(rows), len(everything)
        num_heads = self.config["num_attention_heads"]
        num_kv_heads = self.config["num_key_value_heads"]
        q, k, v = (self._linear(everything, f"{at}{name}_proj") for name in "qkv")
        q, k = (each.view(total, -1, q.shape[1] // num_heads) for each in (q, k))
        q, k = (
            self._norm(each, f"{at}{name}_norm")
            if f"{at}{name}_norm.weight" in self.tensors
            else each
            for each, name in ((q, "q"), (k, "k"))
        )
        q, k = self._rotate(q)[-count:], self._rotate(k)
        v = v.view(total, num_kv_heads, -1)
        k, v = (each.repeat_interleave(num_heads // num_kv_heads, dim=1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
        attended = torch.einsum("hts,shd->thd", scores.softmax(dim=2), v)
        return self._linear(attended.reshape(count, -1), f"{at}o_proj")
