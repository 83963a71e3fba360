"""The GPU's clock and power during a measurement: under full load the power limit lowers the
clock."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

FIELDS = {
    "sm_mhz": "clocks.current.sm",
    "max_sm_mhz": "clocks.max.sm",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
}
INTERVAL_MS = 250


@contextmanager
def sample_gpu() -> Iterator[dict[str, float]]:
    """Yields a dictionary that gets the medians of `FIELDS` when the block ends; without a GPU,
    nothing."""
    found: dict[str, float] = {}
    if shutil.which("nvidia-smi") is None:
        yield found
        return
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "-i", device, f"--query-gpu={','.join(FIELDS.values())}"]
    query += ["--format=csv,noheader,nounits", f"--loop-ms={INTERVAL_MS}"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(query, stdout=output, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            output.seek(0)
            found.update(medians(output.read()))


def medians(text: str) -> dict[str, float]:
    """Medians of the lines that nvidia-smi printed, without the values that it does not know and a
    last line that was cut."""
    values: dict[str, list[float]] = {name: [] for name in FIELDS}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(FIELDS):
            for name, cell in zip(FIELDS, cells, strict=True):
                if cell.replace(".", "", 1).isdigit():
                    values[name].append(float(cell))
    return {name: statistics.median(found) for name, found in values.items() if found}
