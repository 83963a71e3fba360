"""Runs the RUN lines of Dockerfile's CPU image in a clean folder, then what the image starts.

    python scripts/check_dockerfile.py

It needs no Docker, so it also shows less than a build: the base image is this machine, paths below
WORKDIR lie in the folder, and the lines of the CUDA image alone are not run. pip asks the indexes
that this machine is set to.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmark.server_process import running_server  # noqa: E402

START_LIMIT_S = 120.0
BUILD_ARGUMENTS = {"DEVICE": "cpu"}
OF_THIS_MACHINE = ("PIP_EXTRA_INDEX_URL",)
VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


@dataclass
class Image:
    """Holds what the instructions so far have made.

    Attributes:
        folder: stands for WORKDIR.
        arguments: of the build, by name.
        command: ENTRYPOINT and CMD.
    """

    folder: Path
    workdir: str = "/"
    arguments: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)

    def variables(self) -> dict[str, str]:
        """The environment of a RUN line: this machine's, without Python paths of ours."""
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return {**outside, **self.arguments, **self.environ}

    def expanded(self, text: str) -> str:
        """Puts values in the place of variables, and the folder in that of WORKDIR."""
        values = self.variables()
        text = VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)
        return text if self.workdir == "/" else text.replace(self.workdir, str(self.folder))


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Gives each instruction with its text, in one line."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield word, rest.strip()


def stage_of(found: list[tuple[str, str]], arguments: dict[str, str]) -> list[tuple[str, str]]:
    """Gives the instructions of the last stage and of the stages that it stands on."""
    stages: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for word, rest in found:
        if word == "FROM":
            base, *name = VARIABLE.sub(lambda match: arguments[match[1] or match[2]], rest).split()
            current = [*stages.get(base, [])]
            stages[name[1] if name else ""] = current
        elif stages:
            current.append((word, rest))
    return current


def execute(image: Image, word: str, rest: str, context: Path) -> None:
    """Does one instruction.

    Raises:
        subprocess.CalledProcessError: a RUN line failed.
        ValueError: for an instruction that this script does not know.
    """
    print(f"{word} {rest}", flush=True)
    match word:
        case "ARG":
            name, _, default = rest.partition("=")
            given = BUILD_ARGUMENTS.get(name, shlex.split(default)[0] if default else "")
            image.arguments[name] = given
        case "ENV":
            name, _, value = rest.partition("=")
            if name not in OF_THIS_MACHINE:
                image.environ[name] = image.expanded(value)
        case "WORKDIR":
            image.workdir = rest
        case "COPY":
            source, target = rest.split()
            shutil.copytree(context / source, image.folder / target)
        case "RUN":
            subprocess.run(
                ["sh", "-e", "-c", rest], cwd=image.folder, env=image.variables(), check=True
            )
        case "ENTRYPOINT" | "CMD":
            image.command += json.loads(rest)
        case "EXPOSE":
            pass
        case _:
            raise ValueError(f"Dockerfile: {word} is new; teach scripts/check_dockerfile.py.")


def build_context(folder: Path) -> Path:
    """Copies what git would commit: what a clean checkout holds."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def answer_of_started(image: Image) -> str:
    """Starts what the image starts, and gives the text of one answer."""
    program = shutil.which(image.command[0], path=image.variables()["PATH"])
    if program is None or image.folder not in Path(program).parents:
        raise ValueError(f"ENTRYPOINT: {image.command[0]} is not in the image.")
    body = {"text": "import ", "sampling_params": {"max_new_tokens": 8}}
    environ = {**image.environ, "PYTHONPATH": ""}
    with running_server([program, *image.command[1:]], environ, START_LIMIT_S) as server:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = json.load(answer)["text"]
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
    return str(text)


def main() -> int:
    found = list(instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")))
    print("RUN lines in a clean folder; whether Docker builds the image is not tested.")
    with tempfile.TemporaryDirectory() as name:
        context = Path(name, "context")
        image = Image(Path(name, "image"))
        image.folder.mkdir()
        build_context(context)
        for word, rest in stage_of(found, BUILD_ARGUMENTS):
            execute(image, word, rest, context)
        text = answer_of_started(image)
    if not text:
        print("FAILED: the server's answer is empty.")
        return 1
    print(f"The image's command serves: {text!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
