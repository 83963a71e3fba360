"""Matrix products whose result for a row has the same bits for any number of rows.

Each of their kernels adds up an output's products in the order of the input features into one
float32 sum. On a GPU the tensor cores' steps are of 16 features in every kernel and tile, so tiles
may be chosen by speed. torch's library is faster where products take longest. It may divide the
features among programs, so it computes only numbers of rows for which it was found to give the same
bits (`_Library`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang.srt.layers.ops.activation import silu_times
from sglang.srt.layers.triton_launch import INTERPRETED, begin, dependent_launch

LEAST_PROGRAMS = 96  # that make use of an H100's memory bandwidth
BAND = 8  # tiles of rows that read the same part of a weight at about the same time
LIBRARY_ROWS = (8192, 4096, 2048, 1024, 512, 256, 128)
LARGE_ROWS = 1024  # a step is divided into such products: each uses the whole GPU
ADDRESS_BYTES = 256  # the library may choose another kernel for addresses that this does not divide
LEAST_NONZERO = 0.5  # share of results, so that equal ones mean something


@triton.jit(do_not_specialize=["num_rows", "early"])
def tile_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, out_features, in_features,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    IS_EVEN: tl.constexpr, BAND: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """x [num_rows, in_features] times the transpose of weight [out_features, in_features], plus
    bias [out_features] or None: a program computes a tile.

    GATED: as in `_few_rows_kernel`, where BLOCK_N features of the result are of two tiles.
    IS_EVEN: the blocks divide the features."""
    begin(PDL, early)
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    band = tl.program_id(0) // (BAND * tiles_n)
    place = tl.program_id(0) % (BAND * tiles_n)
    size = tl.minimum(tiles_m - band * BAND, BAND)
    row = (band * BAND + place % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = place // size * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    # The last features are read again where there are no more.
    read = feature if IS_EVEN else tl.minimum(feature, out_features - 1)
    x = x_ptr + row[:, None].to(tl.int64) * in_features + column[None, :]
    weight = weight_ptr + read[:, None].to(tl.int64) * in_features + column[None, :]
    exists = (row < num_rows)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        if IS_EVEN:
            values = tl.load(x, mask=exists, other=0.0)
            w = tl.load(weight)
        else:
            is_column = (column < in_features - start)[None, :]
            values = tl.load(x, mask=exists & is_column, other=0.0)
            w = tl.load(weight, mask=is_column, other=0.0)
        total = tl.dot(values, tl.trans(w), total, input_precision="ieee")
        if GATED:
            below = weight + out_features.to(tl.int64) * in_features
            if IS_EVEN:
                w = tl.load(below)
            else:
                w = tl.load(below, mask=is_column, other=0.0)
            second = tl.dot(values, tl.trans(w), second, input_precision="ieee")
        weight += BLOCK_K
        x += BLOCK_K
    if bias_ptr is not None:
        total += tl.load(bias_ptr + read).to(tl.float32)[None, :]
    result = total.to(out_ptr.dtype.element_ty)
    if GATED:
        result = silu_times(result, second.to(result.dtype))
    out = out_ptr + row[:, None].to(tl.int64) * out_features + feature[None, :]
    tl.store(out, result, mask=exists & (feature < out_features)[None, :])


class Tile(NamedTuple):
    """The part of a result that a program computes, and how. Of gated products `block_n` features
    are of two tiles, half of them from each."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(
        cls, num_rows: int, num_features: int, item_bytes: int, shared_bytes: int, is_gated: bool
    ) -> Tile:
        """Chooses the largest tile that leaves enough programs, by times on an H100.

        Args:
            num_features: rows of the weight.
            shared_bytes: of shared memory that a program may take; with less than an H100's, fewer
                stages.
        """
        if INTERPRETED or item_bytes > 2:  # the latter without tensor cores
            return cls(32, 32, 32, 4, 1)
        tiles = [cls(128, 128, 64, 8, 4), cls(128, 64, 64, 4, 5), cls(64, 64, 128, 4, 4)]
        if is_gated:
            tiles.insert(0, cls(128, 256, 64, 8, 3))
        chosen = next(
            (tile for tile in tiles if tile.num_programs(num_rows, num_features) >= LEAST_PROGRAMS),
            tiles[-1],
        )
        stage_bytes = (chosen.block_m + chosen.block_n) * chosen.block_k * item_bytes
        return chosen._replace(
            num_stages=max(1, min(chosen.num_stages, shared_bytes // stage_bytes))
        )

    def num_programs(self, num_rows: int, num_features: int) -> int:
        """Returns the number of tiles of a product."""
        return triton.cdiv(num_rows, self.block_m) * triton.cdiv(num_features, self.block_n)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows start..end of a product, and whether the library computes them."""

    start: int
    end: int
    by_library: bool


class OrderedProducts:
    """Computes such products.

    Args:
        shared_bytes: see `Tile.choose`.
    """

    def __init__(self, shared_bytes: int) -> None:
        self._shared_bytes = shared_bytes
        self._library: dict[tuple[torch.Size, torch.dtype], dict[int, bool]] = {}

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As `LayerOps.linear`."""
        x = x.contiguous()
        out = x.new_empty((x.shape[0], weight.shape[0]))
        pieces = _whole(x) if bias is not None else self._pieces(x, weight)
        for piece in pieces:
            part = slice(piece.start, piece.end)
            if piece.by_library:
                torch.mm(x[part], weight.t(), out=out[part])
            else:
                self._by_tiles(x[part], weight, bias, out[part], is_gated=False)
        return out

    def gated_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """As `LayerOps.gated_linear` without a bias; None where `linear` is faster."""
        x = x.contiguous()
        if any(piece.by_library for piece in self._pieces(x, weight)):
            return None
        out = x.new_empty((x.shape[0], weight.shape[0] // 2))
        self._by_tiles(x, weight, None, out, is_gated=True)
        return out

    def _by_tiles(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        is_gated: bool,
    ) -> None:
        (num_rows, out_features), (num_features, in_features) = out.shape, weight.shape
        if num_rows == 0:
            return
        tile = Tile.choose(num_rows, num_features, x.itemsize, self._shared_bytes, is_gated)
        block_n = tile.block_n // 2 if is_gated else tile.block_n
        is_even = out_features % block_n == 0 and in_features % tile.block_k == 0
        num_programs = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(out_features, block_n)
        tile_kernel[(num_programs,)](
            x, weight, bias, out, num_rows, out_features, in_features,
            BLOCK_M=tile.block_m, BLOCK_N=block_n, BLOCK_K=tile.block_k, GATED=is_gated,
            IS_EVEN=is_even, BAND=BAND, num_warps=tile.num_warps, num_stages=tile.num_stages,
            **dependent_launch(x.device, num_programs),
        )  # fmt: skip

    def _pieces(self, x: torch.Tensor, weight: torch.Tensor) -> list[_Piece]:
        """Divides the rows of a product among the library and `tile_kernel`."""
        num_rows = x.shape[0]
        is_aligned = not (x.data_ptr() % ADDRESS_BYTES or weight.data_ptr() % ADDRESS_BYTES)
        if not (x.is_cuda and is_aligned and num_rows >= LIBRARY_ROWS[-1]):
            return _whole(x)
        return divide(num_rows, self._equal_rows(num_rows, weight))

    def _equal_rows(self, most_rows: int, weight: torch.Tensor) -> frozenset[int]:
        """Returns the numbers of rows for which the library gives the same bits, of `LIBRARY_ROWS`
        up to `most_rows`. Those are compared when first asked for, but not while a graph is
        captured, which cannot wait, nor for good while the weight is nearly 0."""
        known = self._library.setdefault((weight.shape, weight.dtype), {})
        sizes = [size for size in LIBRARY_ROWS if size <= most_rows]
        if not torch.cuda.is_current_stream_capturing():
            for size in sizes:
                if size not in known and (found := self._are_equal(size, weight)) is not None:
                    known[size] = found
        return frozenset(size for size in sizes if known.get(size, False))

    def _are_equal(self, num_rows: int, weight: torch.Tensor) -> bool | None:
        """Compares the library with `tile_kernel`; None: the weight is nearly 0, which tells
        nothing."""
        generator = torch.Generator(weight.device).manual_seed(num_rows)
        shape = num_rows, weight.shape[1]
        x = torch.randn(shape, dtype=weight.dtype, device=weight.device, generator=generator)
        out = x.new_empty((num_rows, weight.shape[0]))
        self._by_tiles(x, weight, None, out, is_gated=False)
        if float(out.count_nonzero()) < LEAST_NONZERO * out.numel():
            return None
        return torch.equal(out, torch.mm(x, weight.t(), out=torch.empty_like(out)))


def divide(num_rows: int, by_library: frozenset[int]) -> list[_Piece]:
    """Divides rows into numbers that the library may compute, and a rest; all of them or LARGE_ROWS
    at least, since others would be slower than tiles.

    Args:
        by_library: numbers of rows that it may compute.
    """
    pieces, start = list[_Piece](), 0
    while start < num_rows:
        left = num_rows - start
        large = (size for size in LIBRARY_ROWS if LARGE_ROWS <= size <= left and size in by_library)
        size = left if left in by_library else next(large, 0)
        pieces.append(_Piece(start, start + (size or left), size > 0))
        start = pieces[-1].end
    return pieces


def _whole(x: torch.Tensor) -> list[_Piece]:
    return [_Piece(0, x.shape[0], by_library=False)]
