"""torch's profiler over the steps of this process. The operator chooses the folder of traces."""

from __future__ import annotations

import time
from pathlib import Path

import torch

DIRECTORY_VARIABLE = "SGLANG_TORCH_PROFILER_DIR"


class StepProfiler:
    """One profile at a time. To be used by the thread that runs the steps, with none in flight.

    Args:
        root: the folder that traces go to, or to a folder inside; None allows no profile.
        sees_gpu: whether steps run on a GPU.
    """

    def __init__(self, root: str | None, sees_gpu: bool) -> None:
        self._root = root
        self._sees_gpu = sees_gpu
        self._profile: torch.profiler.profile | None = None
        self._directory = Path()

    @property
    def is_running(self) -> bool:
        return self._profile is not None

    def start(
        self, output_dir: str, activities: list[str], with_stack: bool, record_shapes: bool
    ) -> None:
        """Begins a profile.

        Args:
            output_dir: a folder inside the root, or empty for the root.
            activities: of CPU and GPU; a GPU that is not there is left out beside the CPU.

        Raises:
            ValueError: if the folder is not inside, or there is nothing to look at.
            OSError: if it cannot be made.
        """
        directory = self._directory_for(output_dir)
        kinds = []
        if "CPU" in activities:
            kinds.append(torch.profiler.ProfilerActivity.CPU)
        if "GPU" in activities and self._sees_gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        if not kinds:
            raise ValueError("activities: this server runs on no GPU; ask for CPU.")
        directory.mkdir(parents=True, exist_ok=True)
        profile = torch.profiler.profile(
            activities=kinds, with_stack=with_stack, record_shapes=record_shapes
        )
        profile.start()
        self._profile, self._directory = profile, directory

    def stop(self) -> str:
        """Ends the profile and writes it; returns the path.

        Raises:
            RuntimeError: if none runs.
            OSError: if it cannot be written.
        """
        profile, self._profile = self._profile, None
        if profile is None:
            raise RuntimeError("No profile runs.")
        profile.stop()
        path = self._directory / f"{time.time_ns() // 1_000_000}-TP-0.trace.json.gz"
        profile.export_chrome_trace(str(path))
        return str(path)

    def _directory_for(self, output_dir: str) -> Path:
        if self._root is None:
            raise ValueError(
                f"Start the server with {DIRECTORY_VARIABLE} set to a folder for profiles."
            )
        root = Path(self._root).resolve()
        directory = (root / output_dir).resolve()
        if not directory.is_relative_to(root):
            raise ValueError(
                f"output_dir: must be inside {DIRECTORY_VARIABLE} of the server; leave it out."
            )
        return directory
