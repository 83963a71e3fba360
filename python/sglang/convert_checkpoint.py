"""Converts a folder with pickled (*.bin, *.pt) or quantized weights to one that is served.

    sglang convert-checkpoint SOURCE TARGET

TARGET must not exist. It gets the tensors in safetensors, the config and the tokenizer. How pickles
are read, and why in a process of its own: `sglang.srt.pickled_weights`. Weights in AWQ or GPTQ
become plain ones of 16 bits: `sglang.srt.quantized_weights`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang.srt.model_config import ModelPathError
from sglang.srt.pickled_weights import WITH_NETWORK, convert
from sglang.srt.quantized_weights import dequantize, quantized_method


def main(arguments: Sequence[str]) -> int:
    """Converts; returns the exit code, 1 after a line that says what went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("source", type=Path, help="folder with weights and config.json")
    parser.add_argument("target", type=Path, help="folder to be made")
    parser.add_argument(
        WITH_NETWORK,
        action="store_true",
        help="go on where the process that reads cannot be kept from the network",
    )
    given = parser.parse_args(arguments)
    try:
        if quantized_method(given.source):
            dequantize(given.source, given.target)
        else:
            convert(given.source, given.target, given.with_network)
    except (ModelPathError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
