"""Runs the RUN lines of Dockerfile's CPU image in a clean folder, then what the image starts.

    python scripts/check_dockerfile.py

It needs no Docker, so it also shows less than a build: the base image is this machine, paths below
WORKDIR lie in the folder, and the lines of the CUDA image alone are not run. pip asks the indexes
that this machine is set to.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmark.server_process import running_server  # noqa: E402

START_LIMIT_S = 120.0
DEVICE = "cpu"
OTHER_STAGE = "cuda"
OF_THIS_MACHINE = ("PIP_EXTRA_INDEX_URL",)


def shell_of(dockerfile: str, context: Path, folder: Path) -> tuple[str, list[str]]:
    """Translates a Dockerfile.

    Args:
        context: of the build.
        folder: stands for WORKDIR.

    Returns:
        What a shell does, and ENTRYPOINT and CMD.

    Raises:
        ValueError: for an instruction that this script does not know.
    """
    lines, command, stage, workdir = [f"export DEVICE={DEVICE}"], list[str](), "", ""
    text = "\n".join(line for line in dockerfile.splitlines() if not line.startswith("#"))
    for line in filter(str.strip, text.replace("\\\n", " ").splitlines()):
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word == "FROM":
            stage = rest.rpartition(" AS ")[2]
        if stage == OTHER_STAGE or word in ("FROM", "EXPOSE"):
            continue
        lines.append(f"echo {shlex.quote(line)}")
        match word:
            case "ARG":
                lines += [f"export {rest}"] if "=" in rest else []
            case "ENV":
                lines += [f"export {rest}"] if not rest.startswith(OF_THIS_MACHINE) else []
            case "WORKDIR":
                workdir = rest
                lines.append(f"mkdir {workdir}; cd {workdir}")
            case "COPY":
                source, target = rest.split()
                lines.append(f"cp -r {context / source}/. {target}")
            case "RUN":
                lines.append(f"({rest})")
            case "ENTRYPOINT" | "CMD":
                command += json.loads(rest)
            case _:
                raise ValueError(f"Dockerfile: {word} is new; teach scripts/check_dockerfile.py.")
    return "\n".join(lines).replace(workdir, str(folder)), command


def build_context(folder: Path) -> Path:
    """Copies what git would commit: what a clean checkout holds."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def answer_of_started(command: list[str], folder: Path, path: str) -> str:
    """Starts what the image starts, and gives the text of one answer.

    Args:
        path: the image's PATH.
    """
    program = shutil.which(command[0], path=path)
    if program is None or folder not in Path(program).parents:
        raise ValueError(f"ENTRYPOINT: {command[0]} is not in the image.")
    body = {"text": "import ", "sampling_params": {"max_new_tokens": 8}}
    environ = {"PATH": path, "PYTHONPATH": ""}
    with running_server([program, *command[1:]], environ, START_LIMIT_S) as server:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = json.load(answer)["text"]
        server.stop()
    return str(text)


def main() -> int:
    print("RUN lines in a clean folder; whether Docker builds the image is not tested.", flush=True)
    with tempfile.TemporaryDirectory() as name:
        context, folder = Path(name, "context"), Path(name, "image")
        build_context(context)
        dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
        shell, command = shell_of(dockerfile, context, folder)
        shell += f'\nprintf %s "$PATH" >{name}/path\n'
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run(["sh", "-e", "-c", shell], env=environ, check=True)
        text = answer_of_started(command, folder, Path(name, "path").read_text())
    if not text:
        print("FAILED: the server's answer is empty.")
        return 1
    print(f"The image's command serves: {text!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
