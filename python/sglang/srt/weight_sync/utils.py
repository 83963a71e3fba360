"""SGLang's path of what trainers send weights with."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.utils.common import NO_PICKLE
from sglang.srt.utils.refused_names import RefusedName

update_weights = RefusedName("update_weights of sglang.srt.weight_sync.utils", NO_PICKLE)


def _preprocess_tensor_for_update_weights(tensor: torch.Tensor) -> Any:
    """The whole of a tensor that is spread over processes, which all of them must ask for."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
