"""TileSpec beside plain decoding and other ways to choose drafts, an experiment of `benchmark/`.

python -m tile_spec.run_bench --model-dir FOLDER      on a GPU
python -m tile_spec.run_bench --model-path demo --device cpu --concurrency 1 4
"""

from __future__ import annotations

import sys

from benchmark.measure.experiment import main

if __name__ == "__main__":
    main(["tile_spec", *sys.argv[1:]])
