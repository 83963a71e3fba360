"""Flags of files of hidden states; no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sglang.srt.head_taps import usual_layers
from sglang.srt.model_config import ModelConfig
from sglang.srt.processes.config_error import Refusal
from sglang.srt.server_args import ServerArgs

FOLDER, LAYERS = "--hidden-states-folder", "--hidden-states-layers"


def check_hidden_flags(args: ServerArgs, model: ModelConfig) -> None:
    """
    Raises:
        Refusal: for a folder that cannot be written to, or layers that the model lacks.
    """
    folder = args.hidden_states_folder
    if folder is None:
        if args.hidden_states_layers is not None:
            raise Refusal(LAYERS, f"says what files hold, and there is no {FOLDER}", "add that")
        return
    returned_layers(args, model)
    if not Path(folder).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise Refusal(f"{FOLDER} {folder}", "is no folder that can be written to", "make it first")


def returned_layers(
    args: ServerArgs, model: ModelConfig, of_drafter: Sequence[int] = ()
) -> tuple[int, ...]:
    """Gives the layers whose inputs go to files, beside the last hidden state.

    Args:
        of_drafter: those that the drafter reads, the default. Without any it is what EAGLE-3 heads
            usually read.

    Raises:
        Refusal: for layers that the model lacks.
    """
    text, num_layers = args.hidden_states_layers, model.num_layers
    if args.hidden_states_folder is None:
        return ()
    if text is None:
        there = {min(max(layer, 0), num_layers - 1) for layer in usual_layers(num_layers)}
        return tuple(of_drafter or sorted(there))
    words = [word.strip() for word in text.split(",")]
    layers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 6]
    is_right = len(layers) == len(words) == len({*layers}) and max(layers) < num_layers
    if not is_right:
        raise Refusal(
            f"{LAYERS} {text}",
            "must be different numbers between commas, counted as in transformers' hidden_states:"
            f" 0 is the embedding, {num_layers - 1} the input of the last layer",
            "name such layers; the last hidden state is always there",
        )
    return tuple(layers)
