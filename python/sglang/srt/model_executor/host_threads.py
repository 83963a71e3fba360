"""Sets how many torch threads a step on a CPU uses."""

from __future__ import annotations

import torch


class HostThreads:
    """Torch threads by the size of a step: waking a second thread for each small operation costs
    more than it computes."""

    MIN_ROWS_PER_THREAD = 4

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        torch.set_num_threads(max_threads)

    def use_for(self, num_rows: int) -> None:
        wanted = max(1, min(self._max_threads, num_rows // self.MIN_ROWS_PER_THREAD))
        if wanted != torch.get_num_threads():  # which a step of another runner may have changed
            torch.set_num_threads(wanted)
