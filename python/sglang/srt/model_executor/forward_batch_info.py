"""SGLang's path of a forward pass's input; it is in `srt/layers/`."""

from __future__ import annotations

from sglang.srt.layers.forward_batch import (
    ForwardBatch as ForwardBatch,
)
