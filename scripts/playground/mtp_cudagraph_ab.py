"""Runs `benchmark/measure/mtp_cudagraph_ab.py`: multi-token prediction with graphs and without.

python scripts/playground/mtp_cudagraph_ab.py
python scripts/playground/mtp_cudagraph_ab.py --model-path DIR --dtype bfloat16 --out ab.json
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.measure.mtp_cudagraph_ab import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
