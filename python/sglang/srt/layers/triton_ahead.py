"""Compiles Triton kernels side by side before they are launched. A launch that meets a kernel that
is not compiled compiles it itself, so what was not foreseen only takes longer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
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
        self._compiling: Future[None] | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Launches no kernel in this block that is not compiled yet, but notes it. So what steps
        compute here is arbitrary, and no kernel may take it for a place in memory."""

        def note(*, fn: JitFunctionInfo, compile: Mapping[str, Any], **_: object) -> bool:
            function: JITFunction[Any] = fn.jit_function
            name = f"{function.__module__}.{function.__qualname__}"
            self._noted[name, compile["key"]] = function, compile["specialization_data"]
            return True  # Triton then goes on without it

        hooks = triton.knobs.runtime
        before, hooks.jit_cache_hook = hooks.jit_cache_hook, note
        try:
            yield
        finally:
            hooks.jit_cache_hook = before

    def start(self) -> None:
        """Starts to compile what was noted."""
        background = ThreadPoolExecutor(1, "triton")
        self._compiling = background.submit(self._compile)
        background.shutdown(wait=False)

    def wait(self) -> None:
        """Waits until all is compiled."""
        if self._compiling is not None:
            with start_phase(f"Waiting for {len(self._noted)} kernels"):
                self._compiling.result()

    def _compile(self) -> None:
        if not self._noted:
            return
        first, *others = self._noted.values()
        _compile(*first)  # finds out once what all have in common, such as the compiler's version
        with ThreadPoolExecutor(min(MAX_THREADS, num_cores()), "triton") as pool:
            for compiled in [pool.submit(_compile, *each) for each in others]:
                compiled.result()


def _compile(function: JITFunction[Any], specialization: str) -> None:
    """Compiles a kernel and what launches it, and loads both."""
    kernel = function.preload(specialization)
    assert kernel is not None, "A hook kept Triton from compiling."
    kernel.run  # noqa: B018
