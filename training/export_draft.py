"""The model card of a draft model's folder, which is laid out as every model's (`export.py`)."""

from __future__ import annotations

from typing import Any

from training.export_eagle import ACCEPTANCE, acceptance_fields, run_fields

TRAINING = """---
library_name: transformers
license: apache-2.0
language: code
base_model: tiny-code
---
# {name}

A small Llama that drafts for the demo model `tiny-code`, with the same tokenizer. It exists so that
speculative decoding with a draft model can be tried and tested without a download.

    python -m sglang.launch_server --model-path demo --speculative-algorithm STANDALONE \\
        --speculative-draft-model-path demo-draft

| | |
| --- | --- |
| parameters | {parameters:.2f} M, output head tied to the embedding |
| layers | {layers}; hidden {hidden}, {heads} query and {kv_heads} KV heads of {head_dim}, \
MLP {mlp}, RoPE theta {theta:g}, {positions} positions |
| weights | bfloat16, {megabytes:.2f} MB |
| accept length, {steps} draft steps | **{accept:.2f}** tokens per verification, the target's own \
included |

## Training

    {command}

{seconds:.0f} s on one {device} (commit {commit}), {updates:,} updates; the target is frozen. Each
step takes {batch} windows of {context} tokens, {own_share:.0%} of them continued by the target
itself (half greedy, half at temperature {temperature}). Every {long_every} steps one more takes
{long_rows} windows of {long_context} tokens of real text.
The loss is the cross-entropy to the target's distribution, and with a share of {best_weight:g} to
its best token. Drafts count only while all before them are right, and then the text is the
target's own, so the draft model never reads its own text in training.
Optimisers: Muon (lr {muon_lr}) on matrices, AdamW (lr {adam_lr}) on the rest; bfloat16 autocast.
The schedule follows the clock, so another machine gives other weights. All figures come from the
same run and are in `{results}`.

"""
LIMITS = """## Limits

- It is trained to draft for `tiny-code`; what it writes alone is worse than what that writes.
- Drafts change no text: the target confirms each. A draft model that guesses badly costs time
  alone.

## Licence

The project's (Apache-2.0).
"""


def draft_card(results: dict[str, Any], results_name: str) -> str:
    """README.md of the folder, from the results of train_draft.py."""
    draft = results["draft"]
    shape = draft["shape"]
    return (TRAINING + ACCEPTANCE + LIMITS).format(
        **run_fields(results),
        **acceptance_fields(results, results_name),
        best_weight=results["training"]["settings"]["best_weight"],
        name=draft["name"],
        parameters=draft["parameters"] / 1e6,
        megabytes=draft["weights_bytes"] / 1e6,
        layers=shape["num_hidden_layers"],
        hidden=shape["hidden_size"],
        heads=shape["num_attention_heads"],
        kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        mlp=shape["intermediate_size"],
        theta=shape["rope_theta"],
        positions=shape["max_position_embeddings"],
    )
