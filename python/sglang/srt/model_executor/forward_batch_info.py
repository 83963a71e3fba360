"""The one shape of a forward pass: a ragged batch. Prefill, decode and look-ahead rows differ only
in numbers (DESIGN section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """R requests that feed T tokens in all; request i feeds q_lens[i] consecutive tokens.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64; index of each token in its sequence.
        slots: [T] int64; KV slot that each token's K and V go to.
        rows: [R] int64; row of the request-to-token table.
        q_lens: host list of R; tokens fed by each request.
        kv_lens: [R] int64; tokens with KV after this step's are written.
        kv_len_upper_bounds: host list of R; at least `kv_lens`, without reading the device.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    q_lens: list[int]
    kv_lens: torch.Tensor
    kv_len_upper_bounds: list[int]
