"""The page at `/` and `/docs`: one answer with its style and its script, which needs no other file.

It is the same for everybody and holds no data: what it shows it asks for by the routes, with the
keys that somebody has typed into it. Its policy lets it run its own script alone and reach its own
server alone.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

PATHS = ("/", "/docs")
FILES = Path(__file__).parent / "page_files"
SCRIPTS = ("connection.js", "playground.js", "live.js", "control.js", "operations.js")


def add_page(app: FastAPI) -> None:
    """Adds the page, which neither needs the scheduler nor says anything of it."""
    style = (FILES / "style.css").read_text(encoding="utf-8")
    script = "\n".join((FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    html = (FILES / "index.html").read_text(encoding="utf-8")
    html = html.replace("<style></style>", f"<style>\n{style}</style>")
    html = html.replace("<script></script>", f"<script>\n{script}</script>")
    headers = {
        "Content-Security-Policy": _policy(f"\n{script}", f"\n{style}"),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }

    async def page() -> Response:
        return Response(html, media_type="text/html", headers=headers)

    for path in PATHS:
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)


def _policy(script: str, style: str) -> str:
    """Writes the content security policy of a page with this script and this style."""
    rules = (
        "default-src 'none'",
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text becomes markup or code
        "trusted-types 'none'",
    )
    return "; ".join(rules)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
