"""SGLang's path of the worker of plain decoding; it is in `srt/workers/`."""

from __future__ import annotations

from sglang.srt.workers.tp_worker import (
    TpModelWorker as TpModelWorker,
)
