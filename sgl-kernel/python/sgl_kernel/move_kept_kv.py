"""Moves the KV of a tree's kept rows to the front, in all layers of all pools at once."""

from __future__ import annotations

import torch

from sgl_kernel import reference
from sgl_kernel._checks import check_matrix, check_vector
from sgl_kernel._library import library_for
from sgl_kernel.kv_addresses import KVAddresses


def move_kept_kv(
    kv: KVAddresses,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    committed: torch.Tensor,
    path: torch.Tensor,
    num_confirmed: torch.Tensor,
) -> None:
    """Copies what position committed + path[k] of each request holds to position committed + k,
    for k = 1 .. num_confirmed, so that the kept rows lie where a chain's would.

    All layers and pools are one launch, whatever the page size: every position goes through the
    page table. Nothing is copied where nothing moves (chains, requests without confirmed drafts),
    nor for numbers outside of their range. Nothing waits for the device.

    Args:
        kv: the pools; they are changed in place.
        page_table: [N, W] int32; slot of each position of each table row. No two of a request's
            positions from `committed` on share a slot, nor do those of two requests.
        table_rows: [R] int64; each request's row of the page table.
        committed: [R] int64; position of each request's pending row 0.
        path, num_confirmed: [R, M] int32 and [R] int64, as `confirm_drafts` returned them.

    Raises:
        ValueError: an argument that the op does not take.
        KernelUnavailableError: the KV is on a GPU that no kernel can be had for.
    """
    if path.dim() != 2 or page_table.dim() != 2:
        raise ValueError("path must be [R, M] and page_table [N, W]; reshape them")
    device, (num_requests, path_width) = kv.table.device, path.shape
    num_table_rows, table_width = page_table.shape
    check_matrix("page_table", page_table, torch.int32, (num_table_rows, table_width), device)
    check_matrix("path", path, torch.int32, (num_requests, path_width), device)
    check_vector("table_rows", table_rows, torch.int64, num_requests, device)
    check_vector("committed", committed, torch.int64, num_requests, device)
    check_vector("num_confirmed", num_confirmed, torch.int64, num_requests, device)
    if kv.table.is_cpu:
        reference.move_kept_kv(kv, page_table, table_rows, committed, path, num_confirmed)
    elif path.numel():
        library = library_for(kv.table.get_device())
        status = library.move_kept_kv(
            *(kv.table.get_device(), kv.table.data_ptr(), len(kv.tensors)),
            *(page_table.data_ptr(), num_table_rows, table_width),
            *(tensor.data_ptr() for tensor in (table_rows, committed, path, num_confirmed)),
            *(num_requests, path_width, torch.cuda.current_stream(device).cuda_stream),
        )
        library.check(status)
