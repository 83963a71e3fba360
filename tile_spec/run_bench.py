"""TileSpec beside plain decoding and other ways to choose drafts: `benchmark/measure/tile_spec.py`.

python -m tile_spec.run_bench --model-dir FOLDER      on a GPU
python -m tile_spec.run_bench --model-path demo --device cpu --concurrency 1 4
"""

from __future__ import annotations

from benchmark.measure.tile_spec import main

if __name__ == "__main__":
    main()
