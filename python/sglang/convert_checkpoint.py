"""Converts a folder with pickled weights (*.bin, *.pt) to safetensors, which is all that is served.

    sglang convert-checkpoint SOURCE TARGET

TARGET must not exist. It gets the tensors, under their names and in their types, the config and the
tokenizer. How the files are read, and why in a process of its own: `sglang.srt.pickled_weights`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang.srt.model_config import ModelPathError
from sglang.srt.pickled_weights import WITH_NETWORK, convert


def main(arguments: Sequence[str]) -> int:
    """Converts; returns the exit code, 1 after a line that says what went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("source", type=Path, help="folder with *.bin or *.pt and config.json")
    parser.add_argument("target", type=Path, help="folder to be made")
    parser.add_argument(
        WITH_NETWORK,
        action="store_true",
        help="go on where the process that reads cannot be kept from the network",
    )
    given = parser.parse_args(arguments)
    try:
        convert(given.source, given.target, given.with_network)
    except (ModelPathError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
