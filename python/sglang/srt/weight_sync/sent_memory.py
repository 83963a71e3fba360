"""Opens the memory of tensors that a trainer has sent by it: a file's, or a GPU's by CUDA IPC."""

from __future__ import annotations

import ctypes
import itertools
import os
import stat
from collections.abc import Iterator

import torch

from sglang.srt.sent_tensors import (
    DTYPE_BYTES,
    MAX_COUNTERS,
    SHARED_MEMORY,
    DeviceMemory,
    HostMemory,
    SentTensor,
    SentTensors,
)
from sglang.srt.weight_sync.weight_reader import WeightUpdateError, first_line

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
COUNTER_FILE_BYTES = 64 + MAX_COUNTERS * 8  # torch's head, and an int64 each
ONE_ALLOCATION = b"\x01c"  # before CUDA's own handle: the oldest form of torch's, which all read


def opened_tensors(sent: SentTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and tensors by their memory: each is given back before the next is opened.

    A tensor may be used until the next one is asked for.

    Raises:
        WeightUpdateError: if a memory cannot be opened, or a tensor is not within it.
    """
    file = torch.empty(0, dtype=torch.uint8)
    if sent.path:
        num_bytes = os.path.getsize(sent.path)
        file = torch.from_file(sent.path, size=num_bytes, dtype=torch.uint8)
    by_memory = sorted(sent.tensors, key=lambda tensor: tensor.memory)
    for index, tensors in itertools.groupby(by_memory, key=lambda tensor: tensor.memory):
        contents = contents_of(sent.memories[index], file)
        for tensor in tensors:
            yield tensor.name, view_of(contents, tensor)
        del contents


def contents_of(memory: HostMemory | DeviceMemory, file: torch.Tensor) -> torch.Tensor:
    """Gives [num_bytes] uint8; of the host, a part of `file`, [num_bytes] uint8."""
    if isinstance(memory, DeviceMemory):
        return _opened_on_device(memory)
    return file[memory.first_byte : memory.first_byte + memory.num_bytes]


def view_of(contents: torch.Tensor, tensor: SentTensor) -> torch.Tensor:
    """Views [num_bytes] uint8 as a tensor; over a copy if it begins between two values."""
    if not tensor.lies_within(len(contents)):
        raise WeightUpdateError(f"The weight {tensor.name!r} is not within its memory.")
    part = contents[tensor.first_byte : tensor.first_byte + tensor.num_bytes]
    if (part.storage_offset() | part.data_ptr()) % DTYPE_BYTES[tensor.dtype]:
        part = part.clone()
    return part.view(DTYPES[tensor.dtype]).as_strided(tensor.shape, tensor.strides)


def _opened_on_device(memory: DeviceMemory) -> torch.Tensor:
    """Opens [num_bytes] uint8 on the GPU. When it is freed, torch tells the owner of the memory."""
    device = _device_index(memory.device)
    _check_counter_file(memory.counter_file)
    try:
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(
            device,
            ONE_ALLOCATION + memory.handle,
            memory.num_bytes,
            memory.first_byte,
            memory.counter_file.encode(),
            memory.counter,
            memory.event or b"",
            memory.event is not None,
        )
    except RuntimeError as error:
        raise WeightUpdateError(
            f"Memory of the GPU cannot be opened: {first_line(error)}; keep the tensors until the"
            " answer, and send them from another process than the server's."
        ) from None
    contents = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device))
    contents.set_(storage)
    if not _is_allocated(device, contents.data_ptr(), memory.num_bytes):
        raise WeightUpdateError("The weights are not within the memory that was sent.")
    return contents


def _device_index(device: int | str) -> int:
    """Finds the index here of a GPU that the trainer calls by its own index, or by its UUID."""
    count = torch.cuda.device_count()
    if isinstance(device, int):
        if device < count:
            return device
    else:
        for index in range(count):
            if str(torch.cuda.get_device_properties(index).uuid) == device:
                return index
    raise WeightUpdateError(
        f"The weights are on GPU {device!r}, and this server sees {count} GPUs, not that one; send"
        " them from one of its GPUs, with monkey_patch_torch_reductions() of"
        " sglang.srt.utils.patch_torch if the trainer numbers them otherwise, or from the CPU."
    )


def _check_counter_file(name: str) -> None:
    """Looks whether torch can count in that file without changing anything else."""
    try:
        found = (SHARED_MEMORY / name.removeprefix("/")).lstat()
    except OSError:
        found = None
    if (
        found is None
        or not stat.S_ISREG(found.st_mode)
        or found.st_uid != os.getuid()
        or found.st_size != COUNTER_FILE_BYTES
    ):
        raise WeightUpdateError(
            "The trainer's memory has no counter here; run trainer and server with one /dev/shm and"
            " as one user, and keep the tensors until the answer."
        )


def _is_allocated(device: int, address: int, num_bytes: int) -> bool:
    """Asks the driver whether one allocation has all these bytes."""
    begin, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the device is this thread's from here on
        status = driver.cuMemGetAddressRange_v2(
            ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address)
        )
    return status == 0 and address + num_bytes <= begin.value + size.value
