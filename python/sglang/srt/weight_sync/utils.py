"""SGLang's path of what trainers send weights with; it is in `srt/control/`."""

from __future__ import annotations

from sglang.srt.control.weight_sending import (
    _preprocess_tensor_for_update_weights as _preprocess_tensor_for_update_weights,
)
from sglang.srt.control.weight_sending import (
    update_weights as update_weights,
)
