"""The calls of an engine that trainers use, in this process or over HTTP."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class EngineBase(Protocol):
    """`Engine` and `HttpServerEngineAdapter` are both such."""

    def generate(self, *args: Any, **fields: Any) -> Any: ...

    def flush_cache(self) -> Any: ...

    def update_weights_from_tensor(self, *args: Any, **options: Any) -> Any: ...

    def release_memory_occupation(self, tags: list[str] | None = None) -> Any: ...

    def resume_memory_occupation(self, tags: list[str] | None = None) -> Any: ...

    def shutdown(self) -> None: ...
