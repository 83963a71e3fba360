"""Runs `sglang convert-checkpoint` of this checkout: pickled weights become safetensors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from sglang.convert_checkpoint import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
