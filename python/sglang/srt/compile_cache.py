"""The folder where a start keeps what the next one need not do again: compiled kernels and prices.

`SGLANG_CACHE_DIR` (default: `sglang-adaptive/kernels` in `XDG_CACHE_HOME` or ~/.cache) has a folder
for each GPU, torch, Triton and set of kernels. Triton and sgl-kernel keep what they compile in it
with caches of their own, which know what each file was compiled from; TRITON_CACHE_DIR and
SGL_KERNEL_CACHE_DIR say otherwise. If it cannot be written, what it holds is read all the same, and
what is new goes to a private folder that ends with the server. What it holds is run, so nothing is
read that a user other than this one and root may have written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

PARTS = {"TRITON_CACHE_DIR": "triton", "SGL_KERNEL_CACHE_DIR": "sgl_kernel"}
PRICES = "prices"
GROUP = "__grp__"  # how Triton's files begin that name the other files of a kernel


@dataclass(frozen=True, slots=True)
class CompileCache:
    """Names a folder that can be written.

    Attributes:
        kept: the folder of `SGLANG_CACHE_DIR` that it stands for.
        problem: why that one is not used itself; empty if it is.
    """

    folder: Path
    kept: Path
    problem: str = ""

    @property
    def is_private(self) -> bool:
        """Tells whether it ends with the server."""
        return bool(self.problem)

    @property
    def prices(self) -> Path:
        """Names the folder of prices of steps."""
        return self.folder / PRICES

    def use(self, environ: MutableMapping[str, str]) -> None:
        """Has Triton and sgl-kernel keep there what they compile from now on."""
        for variable, part in PARTS.items():
            environ.setdefault(variable, str(self.folder / part))


def folder_of(gpu: str) -> Path:
    """Gives the folder of a GPU, of the versions that are installed and of this set of kernels."""
    if not (root := os.environ.get("SGLANG_CACHE_DIR")):
        cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = os.path.join(cache_home, "sglang-adaptive", "kernels")
    return Path(root) / folder_name(gpu, version_of("torch"), version_of("triton"), kernel_digest())


def version_of(package: str) -> str:
    """Returns the version of a package that may not be installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def folder_name(gpu: str, torch: str, triton: str, digest: str) -> str:
    """Names the folder of a GPU, of versions and of a set of kernels."""
    names = (gpu, f"torch-{torch}", f"triton-{triton}", digest)
    return "_".join(plain_name(name) for name in names)


def plain_name(name: str) -> str:
    """Makes a name of a file or folder, or a part of one, of any text."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", name).strip("-.")[:100] or "unnamed"


@cache
def kernel_digest() -> str:
    """Gives the digest of the sources of all kernels; they are read once in a process."""
    root, found = Path(__file__).resolve().parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if b"triton" in (source := path.read_bytes()):
            found.update(path.relative_to(root).as_posix().encode() + source)
    return found.hexdigest()[:16]


def open_cache(kept: Path, private: Path) -> CompileCache:
    """Opens a folder, or `private`, which is made then, with links to what is complete in it.

    Raises:
        OSError: if neither can be written.
    """
    can_be_written, is_safe = _can_be_written(kept), _is_safe(kept)
    if can_be_written and is_safe:
        return CompileCache(kept, kept)
    private.mkdir(mode=0o700)
    for part in (*PARTS.values(), PRICES):
        (private / part).mkdir()
        for entry in _entries(kept / part) if is_safe else ():
            if _is_complete(entry):
                (private / part / entry.name).symlink_to(entry.absolute())
    problem = "cannot be written" if is_safe else "cannot be read, or others may write to it"
    return CompileCache(private, kept, problem)


def _is_safe(kept: Path) -> bool:
    """Tells whether none but this user and root may have written to a folder, if it is there. In a
    root such as /tmp everyone may write, and no user replaces another's folder."""
    try:
        if not kept.exists():
            return True
        root = kept.parent.stat()
        parts = [kept / part for part in (*PARTS.values(), PRICES)]
        own = [place.stat() for place in (kept, *parts) if place.exists()]
    except OSError:
        return False
    is_open = root.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
    is_open |= any(each.st_mode & stat.S_IWOTH for each in own)
    return not is_open and all(each.st_uid in (0, os.geteuid()) for each in (root, *own))


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _entries(folder: Path) -> list[Path]:
    """Lists a folder; none where there is none or another user's, who alone may read it."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_complete(entry: Path) -> bool:
    """Tells whether an entry of a cache can be read and no process would write to it: a file is
    whole, and a folder of Triton's has a file that names others, by the paths that they had when
    they were written. What launches kernels lies alone in its folder."""
    if os.path.isfile(entry):  # no error where it may not be looked at
        return True
    files = _entries(entry)
    try:
        groups = [json.loads(file.read_bytes()) for file in files if file.name.startswith(GROUP)]
        paths = [path for group in groups for path in group["child_paths"].values()]
    except (OSError, ValueError, KeyError):
        return False
    if groups:
        return all(os.access(path, os.R_OK) for path in paths)
    return any(file.suffix == ".so" and os.access(file, os.R_OK) for file in files)
