"""Do unmodified `openai` packages of several versions work with a server of this runtime?

    python scripts/check_openai_client.py
    python scripts/check_openai_client.py --versions 2.8.0 --url http://127.0.0.1:30000

Each version gets an environment of its own in build/clients. Without --url a server of the bundled
model is started, with parsers of calls and reasoning. Writes benchmark/results/openai_clients.json,
and exits with 1 if a check fails. What is checked: scripts/_openai_client_checks.py.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

from _client_checks import BUILD, client_python, demo_server, installed_version, plain_environ

from benchmark.command import make_parser, store
from benchmark.environment import describe_environment

# The one that SGLang 0.5.23 pins, and the newest of each major version.
VERSIONS = ("2.8.0", "2.*", "3.*")
CHECKS = Path(__file__).with_name("_openai_client_checks.py")
PARSERS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


def main() -> int:
    parser = make_parser(__doc__, "openai_clients")
    parser.add_argument("--versions", nargs="+", default=VERSIONS, help="as pip takes them")
    parser.add_argument("--url", help="a running server; by default one is started")
    arguments = parser.parse_args()
    result = describe_environment()
    with contextlib.ExitStack() as stack:
        url = arguments.url or stack.enter_context(demo_server(*PARSERS))
        result["clients"] = [check_version(version, url) for version in arguments.versions]
    store(arguments.out, result)
    failed = [
        f"{client['openai']}: {name}"
        for client in result["clients"]
        for name, outcome in client["checks"].items()
        if outcome != "ok"
    ]
    print(f"Failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def check_version(version: str, url: str) -> dict[str, Any]:
    """All checks with one version: each `ok`, or what was raised."""
    directory = BUILD / f"openai-{version.replace('*', 'x')}"
    python = client_python(directory, f"openai=={version}")
    command = [str(python), str(CHECKS), "--url", url]
    answer = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, env=plain_environ()
    )
    checks = json.loads(answer.stdout)
    found = installed_version(python, "openai")
    print(f"openai {found}: {json.dumps(checks, indent=2)}", flush=True)
    return {"openai": found, "checks": checks}


if __name__ == "__main__":
    raise SystemExit(main())
