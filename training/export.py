"""Write a trained demo model as a Hugging Face folder, with its model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer

from training.model import Llama
from training.tokens import (
    BOS_ID,
    BOS_TOKEN,
    EOS_ID,
    EOS_TOKEN,
    MASK_ID,
    MASK_TOKEN,
    SPECIAL_TOKENS,
)

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def model_config(model: Llama, has_mask: bool = True) -> dict[str, Any]:
    """config.json: LlamaForCausalLM's keys, and the mask token's id for multi-token decoding, of
    models that may have been trained for it."""
    shape, mask = model.shape, {"mtp_mask_token_id": MASK_ID} if has_mask else {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        **mask,
        "torch_dtype": "bfloat16",
    }


def tokenizer_config(context: int) -> dict[str, Any]:
    """tokenizer_config.json: names the special tokens; tokenizer.json holds everything else."""
    added = {
        str(index): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "mask_token": MASK_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": context,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Indented JSON with a final newline; NaN and infinities are refused."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_model_folder(
    folder: Path, model: Llama, tokenizer: Tokenizer, has_mask: bool = True
) -> None:
    """Write config, generation config, bf16 weights and tokenizer files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", model_config(model, has_mask))
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID},
    )
    write_json(
        folder / "tokenizer_config.json", tokenizer_config(model.shape.max_position_embeddings)
    )
    if has_mask:  # a model to talk to, and no draft of one
        write_text = (folder / "chat_template.jinja").write_text
        write_text(CHAT_TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
    weights = folder / "model.safetensors"
    save_file(model.to_hf_state_dict(), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it readable by the owner alone
    tokenizer.save(str(folder / "tokenizer.json"))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines)


def _loss_table(results: dict[str, Any]) -> str:
    scores = list(results["held_out_loss"].values())
    header = ["held-out package", "version", "licence", "tokens"]
    header += [f"nats/token, {s['context']}-token windows" for s in scores]
    header += ["bits/byte", "accuracy"]
    rows = []
    named = [(p["name"], p["version"], p["licence"]) for p in results["corpus"]["held_out"]]
    for name, version, licence in [*named, ("all", "", "")]:
        cells = [s["overall"] if name == "all" else s["packages"][name] for s in scores]
        losses = [f"{cell['nats_per_token']:.3f}" for cell in cells]
        last = [f"{cells[0]['bits_per_byte']:.3f}", f"{cells[0]['accuracy']:.3f}"]
        rows.append([name, version, licence, f"{cells[0]['tokens']:,}", *losses, *last])
    return _table(header, rows)


def _corpus_table(results: dict[str, Any]) -> str:
    rows = [
        [p["name"], p["version"], p["licence"], f"{p['files']:,}", f"{p['bytes'] / 1e6:.2f}"]
        for p in results["corpus"]["train"]
    ]
    return _table(["package", "version", "licence", "files", "MB"], rows)


def sample_texts(samples: list[dict[str, str]]) -> str:
    """Markdown of continuations that `draw_samples` made."""
    parts = []
    for sample in samples:
        lines = len(sample["prompt"].splitlines())
        text = (sample["prompt"] + sample["text"]).rstrip()
        parts.append(
            f"{sample['how']}; the first {lines} lines are the prompt:\n\n````python\n{text}\n````"
        )
    return "\n\n".join(parts)


CARD = """---
library_name: transformers
pipeline_tag: text-generation
license: apache-2.0
language: code
---
# tiny-code

A Llama of {parameters:.2f} M parameters that continues Python source. It exists so that this
project can be tried and tested without a download; it is a test bed, not an assistant.

| | |
| --- | --- |
| shape | {shape} |
| tokenizer | byte-level BPE, {vocab} entries, {bytes_per_token:.2f} bytes/token; BOS `{bos}` 0, \
EOS `{eos}` 1, mask `{mask}` 2; BOS is put before a prompt by the post-processor |
| weights | bfloat16, {megabytes:.1f} MB; a chat template that makes comments of messages |
| held-out loss | {nats:.3f} nats/token, {bits:.3f} bits/byte, accuracy {accuracy:.3f} \
({context}-token windows) |
| loss on training text | {train_nats:.3f} nats/token (a sample, same windows) |

## Training

    {command}

{seconds:.0f} s of training on one {gpu} (commit {commit}): {steps:,} steps, {tokens:.0f} M tokens \
drawn from {unique:.1f} M ({epochs:.1f} passes), {rate:.2f} M tokens/s. {how}
Optimisers: Muon (lr {muon_lr}, momentum 0.95, weight decay {decay}) on matrices, AdamW
(lr {adam_lr}, 0.9/0.95) on embedding and norms; bfloat16 autocast. The schedule follows the clock,
so another machine gives other weights.
All figures come from the same run and are in `benchmark/results/train_base_tiny_code.json`.

## Held-out packages

Never in training, whole: {rule}. Training files that share over half of their longer lines with a
held-out file were dropped as well.

{loss_table}

Loss by position in {long_context}-token windows: {by_position}.
Every window starts with BOS. `transformers` {transformers} computes {hf_nats:.4f} nats/token from
the exported folder in float32, the training code {own_nats:.4f}.

## Samples (not picked)

{samples}

## Limits

- Python only, {max_positions} tokens of context, five million parameters: it imitates the look of
  code. Expect wrong names, wrong logic and, in greedy decoding, loops.
- It answers no questions, knows no language besides the English of docstrings, and nothing that it
  writes should be run unread.
- It can repeat passages of its training files, notices and names of people included.
- The mask token is there for multi-token decoding; these base weights were not taught to fill it.
- A prompt that spells out a special token gets that token: one that spells BOS has two of them.

## Licence and corpus

The weights come under the project's licence (Apache-2.0). Training used {train_files:,} files,
{train_megabytes:.0f} MB: the Python standard library and installed packages whose metadata names a
permissive licence only, listed below with that licence; the texts stay their authors'. Left out:
{dropped}.

{corpus_table}
"""


def model_card(results: dict[str, Any], weights_bytes: int) -> str:
    """README.md of the folder, from the results dictionary of the training script."""
    shape, training, corpus = results["model"], results["training"], results["corpus"]
    scores = list(results["held_out_loss"].values())
    first, long = scores[0], scores[-1]
    check = results["transformers_check"]
    return CARD.format(
        parameters=results["parameters"] / 1e6,
        shape=", ".join(f"{key} {value:g}" for key, value in shape.items()) + ", tied embeddings",
        vocab=shape["vocab_size"],
        bytes_per_token=corpus["bytes_per_token"],
        bos=BOS_TOKEN,
        eos=EOS_TOKEN,
        mask=MASK_TOKEN,
        megabytes=weights_bytes / 1e6,
        nats=first["overall"]["nats_per_token"],
        bits=first["overall"]["bits_per_byte"],
        accuracy=first["overall"]["accuracy"],
        context=first["context"],
        train_nats=results["train_loss"]["nats_per_token"],
        command=results["command"],
        seconds=training["seconds"],
        gpu=results["device"],
        commit=results["commit"],
        steps=training["steps"],
        tokens=training["tokens"] / 1e6,
        unique=corpus["train_tokens"] / 1e6,
        epochs=training["epochs"],
        rate=training["tokens_per_s"] / 1e6,
        how=training["how"],
        muon_lr=training["muon_lr"],
        adam_lr=training["adam_lr"],
        decay=training["weight_decay"],
        rule=corpus["held_out_rule"],
        loss_table=_loss_table(results),
        long_context=long["context"],
        by_position=", ".join(f"{k}: {v:.3f}" for k, v in long["by_position"].items()),
        transformers=results["versions"]["transformers"],
        hf_nats=check["transformers_nats_per_token"],
        own_nats=check["training_code_nats_per_token"],
        samples=sample_texts(results["samples"]),
        max_positions=shape["max_position_embeddings"],
        train_files=sum(p["files"] for p in corpus["train"]),
        train_megabytes=sum(p["bytes"] for p in corpus["train"]) / 1e6,
        dropped=", ".join(f"{count:,} {reason}" for reason, count in corpus["dropped"].items()),
        corpus_table=_corpus_table(results),
    )
