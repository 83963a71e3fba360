"""KV memory of all models of a process: one page table, and one pool for each model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from sgl_kernel import KVAddresses
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGeometry:
    """The shape of one token's KV in a model's pool, of the heads that this rank has."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: ModelConfig, dtype: torch.dtype) -> KVGeometry:
        return cls(
            num_layers=model.num_layers,
            num_kv_heads=model.shard.part(model.num_kv_heads),
            head_dim=model.head_dim,
            dtype=dtype,
        )

    @property
    def bytes_per_token(self) -> int:
        """K and V in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def make_pool(self, num_pages: int, page_size: int, device: str) -> MHATokenToKVPool:
        """A pool of `num_pages` pages, and the dummy page."""
        return MHATokenToKVPool(
            num_pages * page_size,
            page_size,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            device,
        )


class KVMemory:
    """A page table and the pools that it serves. A slot number means the same slot in every pool.
    So the owner of a page owns it in all pools, and all pools have the same number of pages.

    Args:
        pools: one for each model that steps over the table, the target's first.

    Attributes:
        table: slots of each request's tokens.
        page_size: tokens of a page.
        num_pages: of every pool, without the dummy page.
        bytes_per_token: K and V of one token in all pools.
        size_reason: explains the number of pages in the start-up summary.
    """

    def __init__(
        self, table: ReqToTokenPool, pools: Sequence[MHATokenToKVPool], size_reason: str = ""
    ) -> None:
        sizes = {(pool.page_size, len(pool.kv[0])) for pool in pools}
        if len(sizes) != 1:
            raise ValueError(f"Pools behind one page table must have the same slots, not {sizes}.")
        [(self.page_size, num_slots)] = sizes
        self.num_pages = num_slots // self.page_size - 1
        self.table, self.pools, self.size_reason = table, tuple(pools), size_reason
        num_bytes = sum(kv.nbytes for pool in pools for kv in pool.kv)
        self.bytes_per_token = num_bytes // num_slots
        self._addresses: list[KVAddresses] = []

    def addresses(self) -> KVAddresses:
        """Returns the addresses of all tensors of the pools, as they are now."""
        addresses = KVAddresses([tensor for pool in self.pools for tensor in pool.tensors])
        self._addresses.append(addresses)
        return addresses

    @property
    def is_released(self) -> bool:
        """Tells whether a pool has no memory. Then no step may run."""
        return any(pool.is_released for pool in self.pools)

    def release(self) -> None:
        """Gives the memory of all pools back; its contents are lost.

        Raises:
            RuntimeError: if that has been done already; then nothing has changed.
        """
        if self.is_released:
            raise RuntimeError("The KV pool is released already.")
        for pool in self.pools:
            pool.release()

    def restore(self) -> None:
        """Takes memory for all pools again, filled with zeros.

        Raises:
            RuntimeError: if nothing was released, or if there is not enough memory; then all pools
                are as before.
        """
        with ExitStack() as undo:
            for pool in self.pools:
                pool.restore()
                undo.callback(pool.release)
            undo.pop_all()
        for addresses in self._addresses:
            addresses.refresh()
