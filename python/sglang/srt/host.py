"""Asks the machine about itself without torch."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

CUDA_DRIVER = "libcuda.so.1"  # torch has no CUDA without it


@dataclass(frozen=True, slots=True)
class Host:
    """Holds what is known of this machine before torch is loaded.

    Attributes:
        devices: those that torch may find; `cuda` is there unless it is sure that there is no GPU.
        num_cores: processor cores that this process may use.
        available_bytes: host memory that can be taken without swapping.
    """

    devices: frozenset[str]
    num_cores: int
    available_bytes: int

    @classmethod
    def probe(cls) -> Host:
        """Looks at the machine."""
        devices = {"cpu", "cuda"} if may_have_cuda() else {"cpu"}
        return cls(frozenset(devices), num_cores(), available_bytes())


def num_cores() -> int:
    """Counts the processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def may_have_cuda() -> bool:
    """Tells whether torch may find a CUDA GPU; False is sure."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-")):
        return False
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True


def gpu_bytes() -> int | None:
    """Asks the driver how much memory the first visible GPU has; None without one."""
    if not may_have_cuda():
        return None
    driver, device, total = ctypes.CDLL(CUDA_DRIVER), ctypes.c_int(), ctypes.c_size_t()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    )
    return None if failed else total.value


def available_bytes() -> int:
    """Gives the smaller of MemAvailable and what the control group leaves."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = _first_numbers(meminfo.read_text()).get("MemAvailable:", available >> 10) << 10
    return min(available, bytes_left(Path("/sys/fs/cgroup"), available))


def bytes_left(group: Path, without_limit: int) -> int:
    """Reads what a control group may still take. Pages of files are counted as its use, and given
    back when others are needed: those of a checkpoint just read may fill it."""
    limit = group / "memory.max"
    if not limit.exists() or not (text := limit.read_text().strip()).isdigit():
        return without_limit
    pages = _first_numbers((group / "memory.stat").read_text())
    of_files = pages.get("inactive_file", 0) + pages.get("active_file", 0)
    return int(text) - int((group / "memory.current").read_text()) + of_files


def _first_numbers(text: str) -> dict[str, int]:
    """Reads the number after the first word of each line."""
    lines = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in lines}


def driver_version() -> str:
    """Names the version of NVIDIA's kernel module; empty where nothing says it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.split("\n")[0].strip()
