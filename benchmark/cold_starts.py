"""Starts a server with empty caches of compiled code, then with full ones.

Cold: every cache (Triton, sgl_kernel, FlashInfer, inductor, the driver's) is an empty folder. Warm:
the same folders again. So cold less warm is the time of compiling and of measuring prices of steps.
Files that the system has cached stay cached.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from benchmark.http_load import first_token
from benchmark.server_process import RunningServer, running_server

CACHES = {  # environment variable: folder
    "SGLANG_CACHE_DIR": "sglang",  # of Triton and sgl_kernel too
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}


def starts(
    command: list[str], num_warm: int, limit_s: float
) -> Iterator[tuple[str, RunningServer, float]]:
    """Starts a server cold, then warm again and again. Each has given its first token when it is
    yielded, and is ended afterwards: all of its processes must be gone.

    Yields:
        "cold" or "warm", the server, and the seconds from its start to the token.

    Raises:
        StartError: a server failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = {name: str(Path(folder) / place) for name, place in CACHES.items()}
        for path in environ.values():
            Path(path).mkdir()
        for run in tqdm(("cold", *["warm"] * num_warm), unit="start"):
            with running_server(command, environ, limit_s) as server:
                asyncio.run(asyncio.wait_for(first_token(server.port), limit_s))
                yield run, server, time.perf_counter() - server.start_s
                server.stop()
