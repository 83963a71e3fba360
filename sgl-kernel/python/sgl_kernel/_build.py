"""Compiles the CUDA sources with nvcc into one library, at most once per machine and setting."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sgl_kernel._errors import KernelUnavailableError

LIBRARY_NAME = "libsgl_kernel.so"
MANIFEST_NAME = "libsgl_kernel.json"
PACKAGE_DIR = Path(__file__).resolve().parent
PACKAGED_LIBRARY_DIR = PACKAGE_DIR / "lib"

_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC")
_MAX_MESSAGE_CHARS = 4000
_REMEDY = (
    "Install the CUDA toolkit (nvcc) and put it on PATH or set CUDA_HOME, or build ahead of time "
    "on a machine that has it: `python -m sgl_kernel.build --arch ARCH`"
)


@dataclass(frozen=True, slots=True)
class Toolchain:
    """An nvcc and what it says of its version."""

    nvcc: Path
    version: str


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """Everything that the compiled library depends on.

    Attributes:
        architectures: as nvcc names them after `sm_`, for example ("80", "90a").
        source_root: the folder that holds csrc/ and include/.
    """

    toolchain: Toolchain
    architectures: tuple[str, ...]
    source_root: Path

    def flags(self) -> list[str]:
        """The compiler's flags but for paths."""
        targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in self.architectures]
        return [*_FLAGS, *targets]

    def key(self) -> str:
        """Names the result in the cache: sources, flags, architectures and nvcc's version."""
        parts = [source_hash(self.source_root), self.toolchain.version, *self.flags()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def find_toolchain() -> Toolchain:
    """The nvcc of CUDA_HOME or CUDA_PATH, else the one on PATH.

    Raises:
        KernelUnavailableError: there is none, or it does not run.
    """
    roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [Path(root) / "bin" / "nvcc" for root in roots]
    on_path = shutil.which("nvcc")
    if on_path is not None:
        candidates.append(Path(on_path))
    for nvcc in candidates:
        if nvcc.is_file():
            return Toolchain(nvcc, _run([str(nvcc), "--version"]))
    looked = ", ".join(str(candidate) for candidate in candidates) or "PATH"
    raise KernelUnavailableError(f"No nvcc found (looked at: {looked}). {_REMEDY}.")


def find_source_root() -> Path:
    """The folder with csrc/ and include/: in an install the package, else the repository's."""
    for root in (PACKAGE_DIR, PACKAGE_DIR.parent.parent):
        if (root / "csrc").is_dir() and (root / "include").is_dir():
            return root
    raise KernelUnavailableError(
        f"The CUDA sources are missing beside {PACKAGE_DIR}; install the package again."
    )


def architecture_of(capability: tuple[int, int]) -> str:
    """nvcc's name for a GPU's compute capability; Hopper's has the features of `90a`.

    Raises:
        KernelUnavailableError: the GPU is older than Ampere.
    """
    major, minor = capability
    if major < 8:
        raise KernelUnavailableError(
            f"Compute capability {major}.{minor} is too old: the kernels need 8.0 (Ampere) or "
            "newer. Use the torch references (sgl_kernel.reference) on this GPU."
        )
    return "90a" if capability == (9, 0) else f"{major}{minor}"


def is_covered(architecture: str, built: tuple[str, ...]) -> bool:
    """Tells whether code for one of `built` runs on a GPU of `architecture`.

    Code runs on later minor versions of its major version; an `a` ties it to one version.
    """
    if architecture in built:
        return True
    if not architecture.isdigit():
        return is_covered(architecture[:-1], built)
    return any(
        name.isdigit() and name[:-1] == architecture[:-1] and name[-1] <= architecture[-1]
        for name in built
    )


def cuda_sources(source_root: Path) -> list[Path]:
    """The files that nvcc compiles, those in folders of csrc/ too."""
    return sorted((source_root / "csrc").rglob("*.cu"))


def source_hash(source_root: Path) -> str:
    """Digest of the names and the bytes of all sources."""
    digest = hashlib.sha256()
    for path in _source_files(source_root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(source_root).as_posix()}:{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def cache_root() -> Path:
    """$SGL_KERNEL_CACHE_DIR or ~/.cache/sgl_kernel."""
    configured = os.environ.get("SGL_KERNEL_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "sgl_kernel"


def cached_library(plan: BuildPlan) -> Path:
    """The compiled library of `plan`, built if it is not in the cache.

    Of several processes that need it one compiles and the others wait.
    """
    folder = cache_root() / plan.key()
    library = folder / LIBRARY_NAME
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with _file_lock(folder / "build.lock"):
        if not library.is_file():
            compile_library(plan, folder)
    return library


def compile_library(plan: BuildPlan, out: Path) -> Path:
    """Compiles all sources in parallel and puts library and manifest into `out`, each atomically.

    Raises:
        KernelUnavailableError: the compiler failed; the message ends with what it said.
    """
    out.mkdir(parents=True, exist_ok=True)
    sources = cuda_sources(plan.source_root)
    command = [str(plan.toolchain.nvcc), *plan.flags()]
    include = f"-I{plan.source_root / 'include'}"
    with tempfile.TemporaryDirectory(dir=out, prefix="build-") as name:
        scratch = Path(name)
        objects = [scratch / f"{number}-{source.stem}.o" for number, source in enumerate(sources)]
        compiles = [
            [*command, include, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=len(compiles)) as pool:
            list(pool.map(_run, compiles))
        library = scratch / LIBRARY_NAME
        _run([*command, "-shared", *map(str, objects), "-o", str(library)])
        manifest = scratch / MANIFEST_NAME
        manifest.write_text(
            json.dumps(
                {
                    "architectures": list(plan.architectures),
                    "source_hash": source_hash(plan.source_root),
                    "nvcc": plan.toolchain.version.strip().splitlines(),
                },
                indent=2,
            )
        )
        os.replace(manifest, out / MANIFEST_NAME)
        os.replace(library, out / LIBRARY_NAME)
    return out / LIBRARY_NAME


def find_library(architecture: str) -> Path:
    """The library for a GPU: the one that the install carries, else a compiled one.

    Raises:
        KernelUnavailableError: neither is possible.
    """
    reason = _reason_against_packaged(architecture)
    if reason is None:
        return PACKAGED_LIBRARY_DIR / LIBRARY_NAME
    try:
        plan = BuildPlan(find_toolchain(), (architecture,), find_source_root())
        return cached_library(plan)
    except KernelUnavailableError as error:
        raise KernelUnavailableError(f"{reason} {error}") from error


def library_state(architecture: str) -> str:
    """Says where the library for a GPU comes from at the next start, and compiles nothing.

    Raises:
        KernelUnavailableError: there will be none.
    """
    reason = _reason_against_packaged(architecture)
    if reason is None:
        return "compiled, in the install"
    try:
        plan = BuildPlan(find_toolchain(), (architecture,), find_source_root())
    except KernelUnavailableError as error:
        raise KernelUnavailableError(f"{reason} {error}") from error
    library = cache_root() / plan.key() / LIBRARY_NAME
    if os.path.isfile(library):  # unlike `Path.is_file` also of folders that may not be looked into
        return f"compiled, in {library.parent}"
    return f"{plan.toolchain.nvcc} compiles them at the first start"


def _reason_against_packaged(architecture: str) -> str | None:
    """Why the library in the package cannot serve; None where it can."""
    manifest_path = PACKAGED_LIBRARY_DIR / MANIFEST_NAME
    if not (PACKAGED_LIBRARY_DIR / LIBRARY_NAME).is_file() or not manifest_path.is_file():
        return "The install carries no compiled kernels."
    manifest = json.loads(manifest_path.read_text())
    built = tuple(manifest["architectures"])
    if not is_covered(architecture, built):
        return f"The install carries kernels for sm_{', sm_'.join(built)}, not sm_{architecture}."
    if manifest["source_hash"] != source_hash(find_source_root()):
        return "The install's compiled kernels are older than its sources."
    return None


def _source_files(source_root: Path) -> list[Path]:
    headers = (source_root / "include").rglob("*.cuh")
    return sorted([*cuda_sources(source_root), *headers])


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise KernelUnavailableError(f"{command[0]} does not run: {error}. {_REMEDY}.") from error
    if result.returncode != 0:
        message = (result.stdout + result.stderr).strip()[-_MAX_MESSAGE_CHARS:]
        raise KernelUnavailableError(
            f"nvcc failed with status {result.returncode}: {' '.join(command)}\n{message}\n"
            "Check that the host compiler suits this nvcc, or set CUDA_HOME to another toolkit."
        )
    return result.stdout


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
