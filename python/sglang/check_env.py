"""`python -m sglang.check_env [flags of a server]`: would a server with these flags start here?

Without flags it looks at the bundled model at the usual port. Exit code 1 if it would not start.
"""

from __future__ import annotations

import os
import platform as python_platform
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from sglang.srt.server_args import ServerArgs, parse_cli
from sglang.srt.version import __version__

if TYPE_CHECKING:
    from sglang.srt.platform import Platform

DISTRIBUTION = "sglang-adaptive"
OPTIONAL = ("triton", "transformers", "flashinfer-python", "matplotlib")
NAME = re.compile(r"[\w.-]+")


@dataclass
class Findings:
    """Holds what was found.

    Attributes:
        problems: that would prevent a start, each with its remedy.
        notes: of what would be slower or less, each with its remedy.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def row(self, name: str, text: str) -> None:
        """Prints a line."""
        print(f"{name:<12}{text}", flush=True)

    def conclude(self, good: str) -> int:
        """Prints notes and problems, or `good` where there is no problem; returns the exit code."""
        for note in self.notes:
            print(f"note: {note}")
        for problem in self.problems:
            print(f"PROBLEM: {problem}")
        if not self.problems:
            print(good)
        return int(bool(self.problems))


def main(argv: list[str] | None = None) -> int:
    """Prints what a start would find; returns 1 if it would fail, else 0."""
    given = sys.argv[1:] if argv is None else argv
    server_args = parse_cli(["--model-path", "demo", *given], prog="sglang check-env")
    findings = Findings()
    _look_at_packages(findings)
    for look in () if findings.problems else (_look_at_devices, _look_at_start, _look_at_system):
        look(findings, server_args)
    return findings.conclude("A server with these flags should start.")


def _look_at_packages(findings: Findings) -> None:
    """Names versions; a needed package that is missing is a problem."""
    findings.row("sglang", f"{__version__}, Python {python_platform.python_version()}")
    findings.row("platform", python_platform.platform())
    if sys.platform != "linux":
        findings.problems.append(f"{sys.platform} has no server; use Linux, or WSL on Windows.")
    found, missing = [], []
    for name in (*_needed(), *OPTIONAL):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            if name not in OPTIONAL:
                missing.append(name)
    findings.row("packages", ", ".join(found))
    if missing:
        names = " ".join(missing)
        findings.problems.append(f"{names} missing: pip install {names}, or install sglang again.")


def _needed() -> Iterator[str]:
    """Gives what the install needs, by its own metadata; nothing where sources run uninstalled."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return
    for text in requirements:
        name = NAME.match(text)
        if name is not None and "extra ==" not in text:
            yield name.group()


def _look_at_devices(findings: Findings, server_args: ServerArgs) -> None:
    """Names the device and its free memory, and where its kernels come from."""
    import torch

    from sglang.srt.host import driver_version
    from sglang.srt.platform import Platform, free_bytes

    platform = Platform.probe()
    memory = f"{platform.available_host_bytes / 2**30:.1f} GiB of host memory free"
    findings.row("processor", f"{platform.num_cores} cores, {memory}")
    if platform.device == "cuda" and server_args.device != "cpu":
        free = f"{free_bytes('cuda') / 2**30:.1f} GiB free"
        findings.row("GPU", f"{platform.device_name}, {free}, {driver_version()}")
        _look_at_kernels(findings, platform)
        return
    findings.row("GPU", "none that torch can use" if platform.device == "cpu" else "not used")
    findings.row("kernels", "those of torch, as no GPU is used")
    if driver_version() and platform.device == "cpu":
        why = "is built for CPUs" if torch.version.cuda is None else "cannot use it"
        findings.notes.append(
            f"There is an NVIDIA driver, and torch {torch.__version__} {why}: install a torch with"
            " CUDA that suits the driver (`nvidia-smi` shows it)."
        )


def _look_at_kernels(findings: Findings, platform: Platform) -> None:
    """Says where the CUDA library comes from; without it torch samples."""
    from sgl_kernel import KernelUnavailableError
    from sgl_kernel._build import architecture_of, library_state
    from sglang.srt.compile_cache import CompileCache, folder_of

    if platform.capability is None:
        return
    kept = folder_of(platform.device_name)
    CompileCache(kept, kept).use(os.environ)
    try:
        findings.row("kernels", library_state(architecture_of(platform.capability)))
    except KernelUnavailableError as error:
        findings.row("kernels", "those of torch")
        findings.notes.append(f"Sampling is slower without the CUDA kernels. {error}")


def _look_at_start(findings: Findings, server_args: ServerArgs) -> None:
    """Resolves the flags, reads the model's files and takes the port, as a start does first."""
    from sglang.srt.entrypoints.server_process import REFUSALS, BindError, check_start, listen
    from sglang.srt.environ import Environ
    from sglang.srt.model_config import load_model_config
    from sglang.srt.platform import Platform
    from sglang.srt.processes.runtime_config import resolve

    def configure() -> str:
        args = check_start(server_args)[0].args
        model = load_model_config(args.model_path, impl=args.model_impl)
        execution = resolve(args, Platform.probe(), model, Environ.read()).execution
        return (
            f"{args.served_model_name} on {execution.device}, {execution.attention_backend}"
            f" attention, {execution.num_threads} threads"
        )

    def bind() -> str:
        with listen(server_args.host, server_args.port) as listener:
            return f"{server_args.host}:{listener.getsockname()[1]} is free"

    steps: dict[str, Callable[[], str]] = {"model": configure, "port": bind}
    for name, step in steps.items():
        try:
            findings.row(name, step())
        except (*REFUSALS, BindError) as error:
            findings.row(name, "see below")
            findings.problems.append(" ".join(str(error).split()))


def _look_at_system(findings: Findings, server_args: ServerArgs) -> None:
    """Looks at the limit of open files, and at the folder of the processes' sockets."""
    from sglang.srt.entrypoints.server_process import OTHER_FILES

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wished = server_args.max_connections + OTHER_FILES
    findings.row("open files", f"{soft} (ulimit -n), up to {hard}; the server takes {wished}")
    if hard != resource.RLIM_INFINITY and hard < wished:
        findings.notes.append(
            f"{hard} open files do not suffice for {server_args.max_connections} connections: raise"
            f" the hard limit (ulimit -Hn {wished} as root), or lower --max-connections."
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            findings.row("temporary", f"{folder.rpartition('/')[0]} can be written")
    except OSError as error:
        findings.problems.append(
            f"No folder for temporary files ({error}): the processes' sockets lie there. Name one"
            " in TMPDIR."
        )


if __name__ == "__main__":
    raise SystemExit(main())
