"""Tests that a start finds what an earlier one compiled, also where it cannot write."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang.srt import compile_cache
from sglang.srt.compile_cache import CompileCache, folder_name, kernel_digest, open_cache

NAMED = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130", "triton": "3.6.0", "digest": "ab"}
KERNEL = {"kernel.json": "{}", "kernel.cubin": "code"}


@pytest.mark.parametrize("name", NAMED)
def test_each_part_of_the_name_counts(name: str) -> None:
    first, second = folder_name(**NAMED), folder_name(**{**NAMED, name: "other"})
    assert first != second
    assert "/" not in first
    assert first == folder_name(**NAMED)


def test_names_of_gpus_stay_within_the_root() -> None:
    assert "/" not in folder_name(**{**NAMED, "gpu": "../../x y"})
    assert not folder_name(**{**NAMED, "gpu": "../../x y"}).startswith(".")


def test_the_digest_is_of_kernels_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel, other = tmp_path / "kernel.py", tmp_path / "other.py"
    monkeypatch.setattr(compile_cache, "__file__", str(tmp_path / "compile_cache.py"))
    found = []
    for kernel_text, other_text in (
        ("import triton", "1"),
        ("import triton", "2"),
        ("triton", "2"),
    ):
        kernel.write_text(kernel_text)
        other.write_text(other_text)
        kernel_digest.cache_clear()
        found.append(kernel_digest())
    kernel_digest.cache_clear()
    assert found[0] == found[1] != found[2]


def test_a_folder_that_can_be_written_is_used_itself(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "root" / "gpu", tmp_path / "private")
    assert cache == CompileCache(tmp_path / "root" / "gpu", tmp_path / "root" / "gpu")
    assert not cache.is_private
    assert not (tmp_path / "private").exists()
    environ = {"SGL_KERNEL_CACHE_DIR": "mine"}
    cache.use(environ)
    wanted = str(tmp_path / "root" / "gpu" / "triton")
    assert environ == {"SGL_KERNEL_CACHE_DIR": "mine", "TRITON_CACHE_DIR": wanted}


class Caches:
    """Triton's own cache in the folders that a start uses."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._private, self._patch = tmp_path / "root", tmp_path / "private", monkeypatch
        self.kept = self.root / "gpu"
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)

    def open(self) -> CompileCache:
        cache = open_cache(self.kept, self._private)
        self._patch.setenv("TRITON_CACHE_DIR", str(cache.folder / "triton"))
        return cache

    def open_read_only(self) -> CompileCache:
        def refuse(**_: Any) -> None:
            raise OSError("Read-only file system")

        with self._patch.context() as patch:  # a test's user may write everywhere
            patch.setattr(compile_cache.tempfile, "TemporaryFile", refuse)
            cache = self.open()
        assert cache.is_private
        return cache

    def files(self) -> dict[str, float]:
        return {str(path): path.lstat().st_mtime for path in self.kept.rglob("*")}


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caches:
    return Caches(tmp_path, monkeypatch)


def put(key: str, is_whole: bool = True) -> None:
    """Puts a kernel as Triton does; without its last file if it is not whole."""
    from triton.runtime.cache import FileCacheManager

    manager = FileCacheManager(key)
    paths = {name: manager.put(content, name) for name, content in KERNEL.items()}
    if is_whole:
        manager.put_group("kernel.json", paths)


def found(key: str) -> dict[str, str]:
    """The kernel as Triton reads it."""
    from triton.runtime.cache import FileCacheManager

    group = FileCacheManager(key).get_group("kernel.json") or {}
    return {name: Path(path).read_text() for name, path in group.items()}


def test_a_read_only_folder_is_read_and_nothing_is_written_to_it(caches: Caches) -> None:
    caches.open()
    put("A")
    put("B", is_whole=False)
    (caches.kept / "prices").mkdir()
    (caches.kept / "prices" / "x.json").write_text("1")
    before = caches.files()
    cache = caches.open_read_only()
    assert found("A") == KERNEL
    assert (cache.prices / "x.json").read_text() == "1"
    for key in ("B", "C"):
        assert found(key) == {}
        put(key)
        assert found(key) == KERNEL
    (cache.prices / "y.json").write_text("2")
    assert caches.files() == before


def test_what_may_not_be_read_counts_as_missing(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where root has made the folder, and the server's user is another one."""
    caches.open()
    put("A")
    put("B")
    (caches.kept / "prices").mkdir()
    hidden = [caches.kept / "prices", *(caches.kept / "triton").glob("*/kernel.cubin")][:2]

    def may_read(path: Path | str) -> bool:
        return not any(Path(path).is_relative_to(each) for each in hidden)

    def list_folder(path: Path) -> Iterator[Path]:
        if not may_read(path):
            raise PermissionError("Permission denied")
        return (path / name for name in os.listdir(path))

    monkeypatch.setattr(Path, "iterdir", list_folder)
    monkeypatch.setattr(compile_cache.os, "access", lambda path, _: may_read(path))
    assert list(caches.open_read_only().prices.glob("*")) == []
    assert sorted(bool(found(key)) for key in "AB") == [False, True]


def test_kernels_that_were_moved_are_compiled_anew(caches: Caches) -> None:
    """Triton keeps absolute paths."""
    caches.open()
    put("A")
    caches.root.rename(caches.root.with_name("moved"))
    caches.root = caches.root.with_name("moved")
    caches.kept = caches.root / "gpu"
    before = caches.files()
    caches.open_read_only()
    assert found("A") == {}
    put("A")
    assert found("A") == KERNEL
    assert caches.files() == before


OTHER_USER = 12345


@contextmanager
def as_other_user() -> Iterator[None]:
    """Has the rights of another user, if this one is root, whom no mode stops."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(OTHER_USER)
    try:
        yield
    finally:
        os.seteuid(mine)


def test_a_folder_that_may_not_be_looked_into_is_left_alone(tmp_path: Path) -> None:
    """As of a container whose user is not the one whose home is named."""
    for folder in (tmp_path / "home" / "root" / "gpu", tmp_path / "root" / "gpu"):
        (folder / "triton" / "A").mkdir(parents=True)
    tmp_path.chmod(0o755)
    (tmp_path / "home").chmod(0)
    (tmp_path / "root" / "gpu").chmod(0)
    with as_other_user(), tempfile.TemporaryDirectory() as private:
        for number, root in enumerate((tmp_path / "home" / "root", tmp_path / "root")):
            cache = open_cache(root / "gpu", Path(private, str(number)))
            assert cache.is_private
            assert not list((cache.folder / "triton").iterdir())
    (tmp_path / "home").chmod(0o700)
    (tmp_path / "root" / "gpu").chmod(0o700)


@pytest.mark.parametrize("place", [".", "gpu", "gpu/triton"])
@pytest.mark.parametrize("by", ["owner", "mode"])
def test_what_others_may_have_written_is_not_run(
    caches: Caches, monkeypatch: pytest.MonkeyPatch, place: str, by: str
) -> None:
    caches.open()
    put("A")
    if by == "mode":
        (caches.root / place).chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(caches.root / place, OTHER_USER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    before = caches.files()
    cache = caches.open()
    assert cache.is_private
    assert found("A") == {}
    put("A")
    assert found("A") == KERNEL
    assert caches.files() == before


def test_a_root_in_which_nobody_replaces_what_is_another_s_may_be_open_to_all(
    caches: Caches,
) -> None:
    caches.open()
    caches.root.chmod(0o1777)
    assert not caches.open().is_private
    caches.kept.chmod(0o1777)
    assert caches.open().is_private
