"""Names that launchers import from SGLang to run a server's parts in their own process.

Here a server is a process tree of its own, whose parts nobody else holds. The names can be
imported, so that a launcher's other parts work, and whoever uses one is told what to use instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

NO_PARTS = (
    "A server's parts do not run in a launcher's process. Start a whole one:"
    " launch_server(ServerArgs(...)) of sglang.srt.entrypoints.http_server, HttpServerEngineAdapter"
    " of sglang.srt.entrypoints.http_server_engine, or Engine."
)


class RefusedName:
    """Stands for a function, class or object that is not here.

    Raises:
        NotImplementedError: with the name and the remedy, when it is called, or an attribute of it
            is read or set.
    """

    def __init__(self, name: str, remedy: str = NO_PARTS) -> None:
        object.__setattr__(self, "_line", f"{name} is not here. {remedy}")

    def __repr__(self) -> str:
        return f"<{self._line}>"

    def __call__(self, *args: Any, **fields: Any) -> NoReturn:
        raise NotImplementedError(self._line)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # whoever looks at an object asks for these, and may go without
            raise AttributeError(name)
        raise NotImplementedError(self._line)

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotImplementedError(self._line)


launch_subprocesses = RefusedName("_launch_subprocesses")
GlobalState = RefusedName("_GlobalState")
set_global_state = RefusedName("set_global_state")
app = RefusedName("app")
ServerStatus = RefusedName(
    "ServerStatus", "Ask a server: GET /health says whether it works, GET /ready whether it is up."
)
