from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sglang_router.router_args import RouterArgs


def launch_router(args: RouterArgs) -> None:
    answer = json.dumps({"status": "ready", "healthy_workers": len(args.worker_urls)}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
