"""Holds what training commands share: options, the device, what a result says of the run."""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import safetensors
import tokenizers
import torch
import transformers
from torch import nn

from training.optim import MuonAdamW


def make_parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options of every training; what has no default here gets the script's."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, help="training time, compilation not counted")
    add("--out", type=Path, required=True, help="folder for the exported model")
    add("--results", type=Path, help="results JSON (default: beside --out)")
    add("--commit", default="uncommitted", help="commit hash to store with the results")
    add("--seed", type=int)
    add("--device", default="auto", help="auto, cuda or cpu")
    add("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU only")
    add("--batch-size", type=int, help="windows of --context tokens per step")
    add("--context", type=int, help="tokens of a window")
    add("--long-context", type=int, default=4096, help="tokens of a long window")
    add("--muon-lr", type=float)
    add("--adam-lr", type=float)
    add("--weight-decay", type=float, help="of the matrices, per unit of lr")
    add("--max-corpus-bytes", type=int, help="use about this much of the corpus (quick runs)")
    add("--max-eval-tokens", type=int, help="per held-out package (quick runs)")
    return parser


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: PyTorch sees no GPU here; use --device cpu.")
    return torch.device(name)


def is_compiled(arguments: argparse.Namespace, device: torch.device) -> bool:
    """Tells whether --compile was given, or nothing was and there is a GPU."""
    return device.type == "cuda" if arguments.compile is None else bool(arguments.compile)


def make_optimizer(arguments: argparse.Namespace, model: nn.Module) -> MuonAdamW:
    """As the options say."""
    return MuonAdamW(
        model,
        muon_lr=arguments.muon_lr,
        adam_lr=arguments.adam_lr,
        weight_decay=arguments.weight_decay,
    )


def describe_run(name: str, commit: str, device: torch.device) -> dict[str, Any]:
    """Describes for a result what was run, where and with what; `name` is that of the script."""
    on_gpu = device.type == "cuda"
    return {
        "script": f"training/{name}.py",
        "command": shlex.join(["python", "-m", f"training.{name}", *sys.argv[1:]]),
        "commit": commit,
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda if on_gpu else None,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "safetensors": safetensors.__version__,
        },
    }
