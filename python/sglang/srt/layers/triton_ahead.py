"""Compiles Triton kernels in parallel before they are launched. The launch of a kernel that is not
compiled compiles it, so a kernel that was not foreseen only takes longer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction, JitFunctionInfo

from sglang.srt.host import num_cores
from sglang.srt.observability.start_log import start_phase

logger = logging.getLogger(__name__)

MAX_THREADS = 16


class KernelsAhead:
    """Notes the kernels that steps would launch, then compiles them, or reads them from Triton's
    cache, in threads."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, str], tuple[JITFunction[Any], str]] = {}
        self._background = ThreadPoolExecutor(1, "triton")
        self._compiled: list[Future[CompiledKernel]] = []
        self._loaded: Future[None] | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """In this block, notes kernels that are not compiled yet instead of launching them. So the
        results of steps are arbitrary here, and no kernel may use them as an address."""

        noting = threading.get_ident()

        def note(*, fn: JitFunctionInfo, compile: Mapping[str, Any], **_: object) -> bool:
            if threading.get_ident() != noting:
                return False
            function: JITFunction[Any] = fn.jit_function
            name = f"{function.__module__}.{function.__qualname__}"
            self._noted[name, compile["key"]] = noted = function, compile["specialization_data"]
            if not self._compiled:
                # Finds out properties that all kernels share, such as the compiler's version.
                self._compiled.append(self._background.submit(_compile, *noted))
            return True  # Triton then goes on without it

        hooks = triton.knobs.runtime
        before, hooks.jit_cache_hook = hooks.jit_cache_hook, note
        try:
            yield
        finally:
            hooks.jit_cache_hook = before

    def start(self) -> None:
        """Starts to compile the noted kernels."""
        self._loaded = self._background.submit(self._load)
        self._background.shutdown(wait=False)

    def wait(self) -> None:
        """Waits until all kernels are compiled."""
        if self._loaded is not None:
            with start_phase(f"Waiting for {len(self._noted)} kernels"):
                self._loaded.result()

    def _load(self) -> None:
        with ThreadPoolExecutor(min(MAX_THREADS, num_cores()), "triton") as pool:
            others = [*self._noted.values()][1:]
            self._compiled += [pool.submit(_compile, *each) for each in others]
        # Triton gives all its launchers one name in `sys.modules`, so threads that load them at the
        # same time may get each other's: threads only build them, and they are loaded here.
        for compiled in self._compiled:
            compiled.result().run  # noqa: B018


def _compile(function: JITFunction[Any], specialization: str) -> CompiledKernel:
    """Compiles a kernel, and builds its launcher in Triton's cache."""
    kernel = function.preload(specialization)
    assert kernel is not None, "A hook kept Triton from compiling."
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel
