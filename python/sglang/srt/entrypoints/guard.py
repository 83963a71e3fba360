"""The gate in front of the routes: one ASGI middleware that asks `access.py`."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.access import ROUTE_ACCESS, Access, AccessRules, refusal_of
from sglang.srt.entrypoints.http_io import error_response
from sglang.srt.request_id import HEADER

POLICY_VIOLATION = 1008  # close code of a websocket


def add_guard(app: FastAPI, rules: AccessRules) -> None:
    """Puts the gate in front of every route; pages of allowed origins may read what they ask for.

    Without allowed origins no answer has a CORS header, so no other page can read one.
    """
    app.add_middleware(Guard, routes=app.routes, rules=rules)
    if rules.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(rules.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER.decode()],
        )


class Guard:
    """Answers what is refused and hands everything else on as it is, streams too."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], rules: AccessRules) -> None:
        self._app = app
        self._routes = routes
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there is no such route
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            return
        if scope["type"] == "http":
            refusal = refusal_of(self._rules, self._access(scope), scope["headers"])
            if refusal is not None:
                challenge = {"WWW-Authenticate": "Bearer"} if refusal.status_code == 401 else None
                answer = error_response(refusal.message, refusal.status_code, headers=challenge)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _access(self, scope: Scope) -> Access:
        """The class of the route that will answer, whatever the method; no route: as a user's."""
        access = ROUTE_ACCESS.get(scope["path"])
        if access is not None:
            return access
        # Routes match more than their own path: parameters, and a line feed at its end.
        for route in self._routes:
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
                return ROUTE_ACCESS[route.path]
        return Access.USER
