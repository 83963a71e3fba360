"""Tells a client whose path or method no route has what there is instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from sglang.srt.frontend.errors import shorten

MAIN_PATHS = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/models")
NUM_NEAR, LEAST_LIKENESS = 3, 0.55  # `difflib`'s ratio, of 1 for equal paths
LEAST_BEGINNING = 4  # characters of a path that may stand for the whole
MAX_COMPARED_CHARS = 100  # no route's path is nearly as long
LIST = "GET /openapi.json lists all routes."


def no_route_message(path: str, routes: Iterable[BaseRoute]) -> str:
    """Names the routes whose paths are nearest, or else the main ones."""
    paths = [route.path for route in routes if isinstance(route, Route)]
    asked = path[:MAX_COMPARED_CHARS].lower()
    near = difflib.get_close_matches(asked, paths, NUM_NEAR, LEAST_LIKENESS)
    if len(asked) >= LEAST_BEGINNING:
        near += [other for other in paths if other.startswith(asked)]
    offered = list(dict.fromkeys(near))[:NUM_NEAR] or MAIN_PATHS
    return f"There is no route {shorten(path)}; there is {', '.join(offered)}. {LIST}"


def methods_of(scope: Scope, routes: Iterable[BaseRoute]) -> list[str]:
    """Finds the methods of all routes that have the path of a request."""
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


def wrong_method_message(scope: Scope, methods: Iterable[str]) -> str:
    """Names the methods that a path takes."""
    return f"{shorten(scope['path'])} takes {', '.join(methods)}, not {scope['method']}. {LIST}"
