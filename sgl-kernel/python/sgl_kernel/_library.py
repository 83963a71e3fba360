"""Loads the compiled library and types its functions, once per process and GPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sgl_kernel import _build
from sgl_kernel._errors import KernelUnavailableError

# Values of the C functions' `dtype` argument; include/sgl_kernel/launch.cuh has the same.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
PARTIAL_BYTES = 32  # of one chunk of one row in a workspace, at most

_ArgumentType = type[ctypes.c_int] | type[ctypes.c_int64] | type[ctypes.c_void_p]

_INT = ctypes.c_int
_LONG = ctypes.c_int64
_POINTER = ctypes.c_void_p
_LOGITS: list[_ArgumentType] = [_INT, _INT, _POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG]
_SIGNATURES: dict[str, Sequence[_ArgumentType]] = {
    "sgl_argmax_logprob": [*_LOGITS, *(_POINTER,) * 5],
    "sgl_topk_logprob": [*_LOGITS, _LONG, *(_POINTER,) * 4],
    "sgl_sample_tokens": [*_LOGITS, *(_POINTER,) * 5],
    "sgl_penalize_logits": [
        *(_INT, _INT, _POINTER, _LONG, _LONG, _LONG),
        *(_POINTER,) * 5,
        *(_LONG, _POINTER, _POINTER),
    ],
    "sgl_uniform_noise": [_INT, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER],
    "sgl_confirm_drafts": [_INT, *(_POINTER,) * 6, *(_LONG,) * 4, *(_POINTER,) * 4],
    "sgl_move_kept_kv": [
        *(_INT, _POINTER, _LONG, _POINTER, _LONG, _LONG),
        *(_POINTER,) * 4,
        *(_LONG, _LONG, _POINTER),
    ],
    "sgl_build_tree": [
        *(_INT, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG),
        *(_POINTER, _LONG, _LONG),
        *(_POINTER,) * 5,
    ],
    "sgl_build_ragged_trees": [_INT, *(_POINTER,) * 3],
    "sgl_verify_trees": [_INT, _POINTER, _POINTER, _LONG, _POINTER, _POINTER],
    "sgl_verify_ragged_trees": [_INT, _POINTER, _POINTER, _LONG, _POINTER, _POINTER],
    "sgl_sample_trees": [_INT, _POINTER, _POINTER, _LONG, _POINTER, _POINTER],
    "sgl_sample_ragged_trees": [_INT, _POINTER, _POINTER, _LONG, _POINTER, _POINTER],
    "sgl_preload_argmax_logprob": [_INT],
    "sgl_preload_topk_logprob": [_INT],
    "sgl_preload_sample_tokens": [_INT],
    "sgl_preload_penalize_logits": [_INT],
    "sgl_preload_uniform_noise": [_INT],
    "sgl_preload_confirm_drafts": [_INT],
    "sgl_preload_move_kept_kv": [_INT],
    "sgl_preload_build_tree": [_INT],
    "sgl_preload_build_ragged_trees": [_INT],
    "sgl_preload_verify_trees": [_INT],
    "sgl_preload_sample_trees": [_INT],
}


class KernelLibrary:
    """The functions of one compiled library.

    Attributes:
        argmax_logprob, topk_logprob, sample_tokens, penalize_logits, uniform_noise,
            confirm_drafts, move_kept_kv, build_tree, build_ragged_trees, verify_trees,
            verify_ragged_trees, sample_trees, sample_ragged_trees: C functions that return a
            cudaError.
        num_chunks: the workspace's partial results per row, by vocabulary size.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelUnavailableError(
                f"{path} does not load: {error}. Build it again on this machine: "
                "`python -m sgl_kernel.build`."
            ) from error
        self.argmax_logprob = self._function("sgl_argmax_logprob")
        self.topk_logprob = self._function("sgl_topk_logprob")
        self.sample_tokens = self._function("sgl_sample_tokens")
        self.penalize_logits = self._function("sgl_penalize_logits")
        self.uniform_noise = self._function("sgl_uniform_noise")
        self.confirm_drafts = self._function("sgl_confirm_drafts")
        self.move_kept_kv = self._function("sgl_move_kept_kv")
        self.build_tree = self._function("sgl_build_tree")
        self.build_ragged_trees = self._function("sgl_build_ragged_trees")
        self.verify_trees = self._function("sgl_verify_trees")
        self.verify_ragged_trees = self._function("sgl_verify_ragged_trees")
        self.sample_trees = self._function("sgl_sample_trees")
        self.sample_ragged_trees = self._function("sgl_sample_ragged_trees")
        self._error_string = self._library["sgl_error_string"]
        self._error_string.argtypes = [_INT]
        self._error_string.restype = ctypes.c_char_p
        num_chunks = self._library["sgl_num_chunks"]
        num_chunks.argtypes = [_LONG]
        num_chunks.restype = _LONG
        self.num_chunks: Callable[[int], int] = num_chunks

    def check(self, status: int) -> None:
        """Raises a RuntimeError for a launch that failed."""
        if status != 0:
            message = self._error_string(status).decode()
            raise RuntimeError(f"CUDA error {status} at a sgl_kernel launch: {message}")

    def preload(self, device: int) -> None:
        """Loads all kernels' code on a GPU, so that a graph capture finds it there."""
        for name in _SIGNATURES:
            if name.startswith("sgl_preload_"):
                self.check(self._function(name)(device))

    def _function(self, name: str) -> Callable[..., int]:
        function = self._library[name]
        function.argtypes = _SIGNATURES[name]
        function.restype = _INT
        return function

    def run(
        self,
        function: Callable[..., int],
        logits: torch.Tensor,
        banned_ids: torch.Tensor | None,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        numbers: Sequence[int] = (),
        partial_bytes: int = PARTIAL_BYTES,
    ) -> None:
        """Launches a function of logits [S, V], S > 0, that works on chunks of rows.

        Args:
            banned_ids: [B] int64.
            tensors: its other arguments, if any: it gets one array of their addresses, which C
                reads as a struct of pointers. Then come `numbers`, the workspace and `results`.
            partial_bytes: of one chunk of one row in the workspace.
        """
        rows, size = logits.shape
        index = logits.get_device()
        num_bytes = rows * self.num_chunks(size) * partial_bytes
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=logits.device)
        status = function(
            index,
            DTYPE_CODES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            rows,
            size,
            None if banned_ids is None else banned_ids.data_ptr(),
            0 if banned_ids is None else banned_ids.shape[0],
            *((address_array(tensors),) if tensors else ()),
            *numbers,
            *(tensor.data_ptr() for tensor in (workspace, *results)),
            torch.cuda.current_stream(index).cuda_stream,
        )
        self.check(status)


def address_array(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """The tensors' addresses, in host memory."""
    return (_POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


@functools.cache
def load_library(path: Path) -> KernelLibrary:
    """The library of a file, opened once."""
    return KernelLibrary(path)


@functools.cache
def library_for(device: int) -> KernelLibrary:
    """The library that serves a GPU; the first call compiles it where the install has none.

    Raises:
        KernelUnavailableError: with the remedy in its message.
    """
    architecture = _build.architecture_of(torch.cuda.get_device_capability(device))
    library = load_library(_build.find_library(architecture))
    library.preload(device)
    return library


def warm_up(device: torch.device | int | None = None) -> None:
    """Builds or loads the kernels of a GPU (the current one) now instead of at the first call.

    Call it before a CUDA graph capture, and to learn early whether the kernels can run.

    Raises:
        KernelUnavailableError: with the remedy in its message.
    """
    if not torch.cuda.is_available():
        raise KernelUnavailableError(
            "There is no CUDA GPU here. On CPU tensors all ops run their torch references."
        )
    index = torch.cuda.current_device() if device is None else torch.device(device).index
    library_for(torch.cuda.current_device() if index is None else index)
