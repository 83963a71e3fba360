"""Do unmodified clients of OpenAI's API work with a server of this runtime?

    python test/clients/check_clients.py
    python test/clients/check_clients.py --only openai litellm

Each version of a client gets an environment of its own in build/clients, and the file of its
checks runs there. A server is started for it, with parsers of calls and reasoning: of the bundled
model, or of one that says given texts, calls of tools among them. Writes
benchmark/results/clients.json, and exits with 1 if a check fails.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _client_checks import (
    BUILD,
    ROOT,
    client_python,
    demo_server,
    installed_version,
    plain_environ,
)

from benchmark.command import make_parser, store
from benchmark.environment import describe_environment

SCRIPTED = str(ROOT / "test/support/scripted_model")
FLAGS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
FLAGS += ("--max-total-tokens", "8192")


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        checks: the file beside this one that has them.
        versions: as pip takes them behind the name.
        extra: of the package.
        model: that is served.
    """

    checks: str
    versions: tuple[str, ...] = ("",)
    extra: str = ""
    model: str = SCRIPTED


CLIENTS = {
    # The one that SGLang 0.5.23 pins, and the newest of each major version.
    "openai": Client("_openai_client_checks.py", ("==2.8.0", "==2.*", "==3.*"), model="demo"),
    "litellm": Client("_litellm_checks.py"),
    "langchain-openai": Client("_langchain_checks.py"),
    "pydantic-ai-slim": Client("_pydantic_ai_checks.py", extra="[openai]"),
    "instructor": Client("_instructor_checks.py"),
}


def main() -> int:
    parser = make_parser(__doc__, "clients")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    arguments = parser.parse_args()
    result = describe_environment()
    result["clients"] = [
        check_version(name, version)
        for name in arguments.only
        for version in CLIENTS[name].versions
    ]
    store(arguments.out, result)
    failed = [
        f"{client['client']} {client['version']}: {name}"
        for client in result["clients"]
        for name, outcome in client["checks"].items()
        if outcome != "ok"
    ]
    print(f"Failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def check_version(name: str, version: str) -> dict[str, Any]:
    """All checks with one version: each `ok`, or what was raised."""
    client = CLIENTS[name]
    directory = BUILD / f"{name}{version.replace('*', 'x')}"
    python = client_python(directory, f"{name}{client.extra}{version}")
    with demo_server(*FLAGS, model=client.model) as url:
        answer = subprocess.run(
            [str(python), str(Path(__file__).with_name(client.checks)), "--url", url],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            env=plain_environ(),
        )
    checks = json.loads(answer.stdout)
    found = installed_version(python, name)
    print(f"{name} {found}: {json.dumps(checks, indent=2)}", flush=True)
    return {"client": name, "version": found, "checks": checks}


if __name__ == "__main__":
    raise SystemExit(main())
