"""The HTTP application for a launcher that serves it by a web server of its own, as verl does, on
the event loop of the parts that it has started (`launcher_parts`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.connection_limits import LimitedRequests
from sglang.srt.entrypoints.http_io import OutermostApp
from sglang.srt.entrypoints.launcher_parts import LauncherManager
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.managers.tokenizer_manager import SHUTDOWN_MESSAGE


@dataclass(frozen=True)
class GlobalState:
    """Holds what a launcher gives to `set_global_state`: the parts as it got them."""

    tokenizer_manager: LauncherManager
    template_manager: None = None
    scheduler_info: Any = None


class LauncherApp:
    """The HTTP application that a launcher serves itself. It may set attributes of any name.

    Args:
        make_app: makes the application with all routes.
    """

    def __init__(self, make_app: Callable[[ServerState], ASGIApp]) -> None:
        self._make_app = make_app
        self._global_state: GlobalState | None = None  # whoever has the manager keeps the server
        self._routes: ASGIApp | None = None
        self._limited: ASGIApp | None = None

    def set_global_state(self, global_state: GlobalState) -> None:
        """Gives the application the parts that it answers from.

        Raises:
            LaunchError: if a flag about access or chats makes no sense.
        """
        self._global_state, state = global_state, global_state.tokenizer_manager.state
        self._routes = self._make_app(state)
        args = state.server_args
        self._limited = OutermostApp(
            LimitedRequests(self._routes, args.max_header_bytes),
            lambda: state.ready_manager.failure or SHUTDOWN_MESSAGE,
            args.max_label_chars,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._limited if scope["type"] == "http" else self._routes
        if app is None:
            raise RuntimeError("The application has no server yet: call set_global_state.")
        await app(scope, receive, send)
