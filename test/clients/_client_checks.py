"""Holds what the checks of real clients share: an environment for a client, and a server of the
bundled model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmark.server_process import running_server  # noqa: E402

BUILD = ROOT / "build" / "clients"
DEMO_MODEL = ROOT / "python/sglang/demo_models/tiny-code"
START_LIMIT_S = 120.0


def client_python(directory: Path, *packages: str) -> Path:
    """The interpreter of an environment that has these packages, made if need be.

    Args:
        packages: as pip takes them.

    Raises:
        subprocess.CalledProcessError: pip cannot install them; it has said why.
    """
    python = directory / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
    return python


def plain_environ() -> dict[str, str]:
    """This process's environment without our packages: a client's own `sglang` is another one."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@contextmanager
def demo_server(
    *flags: str, environ: dict[str, str] | None = None, model: str = "demo"
) -> Iterator[str]:
    """The URL of a server of the bundled model; it is gone when the block ends.

    Args:
        model: another one, or its folder.
        environ: for the server, beside this process's own.

    Raises:
        StartError: with the end of its log, if it does not start or does not end as it should.
    """
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *flags]
    paths = f"{ROOT / 'python'}{os.pathsep}{ROOT / 'sgl-kernel/python'}"
    with running_server(command, {"PYTHONPATH": paths, **(environ or {})}, START_LIMIT_S) as server:
        yield f"http://127.0.0.1:{server.port}"
        server.stop()


def installed_version(python: Path, package: str) -> str:
    """The version of a package in an environment."""
    code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    command = [str(python), "-c", code, package]
    answer = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, env=plain_environ()
    )
    return answer.stdout.strip()
