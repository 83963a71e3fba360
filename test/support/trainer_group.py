"""The trainer's side of a group for weight updates, with nothing of this project."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

LIMIT = timedelta(seconds=20)


def trainers_group(port: int, name: str) -> dist.ProcessGroup:
    """Rank 0 of a group of two over gloo, as a trainer makes it beside its own groups."""
    store = dist.TCPStore("127.0.0.1", port, 2, True, LIMIT, wait_for_workers=False)
    prefixed = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        2, 0, [], "gloo", prefixed, group_name=name, timeout=LIMIT
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group
