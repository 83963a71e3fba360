"""A watch of processes whose looks, beats and clock a test sets."""

from __future__ import annotations

import os
from dataclasses import replace

from sglang.srt.process_watch import LOOK_S, ProcessLook, ProcessWatch

SCHEDULER, DETOKENIZER = "scheduler", "detokenizer"
LIMIT_S = 60.0
SLEEPING = ProcessLook("S", 3.0)


class WatchedProcesses:
    """A server's processes; none has beaten yet.

    Attributes:
        looks: by role, what the system says.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.looks = {SCHEDULER: SLEEPING, DETOKENIZER: SLEEPING}
        self.now_s = 0.0
        by_pid = dict(enumerate(self.looks))
        self.watch = ProcessWatch(limit_s, lambda pid: self.looks[by_pid[pid]], lambda: self.now_s)
        self._writing = {}
        for pid, role in by_pid.items():
            reading, self._writing[role] = os.pipe()
            self.watch.add(role, pid, reading)

    def set_state(self, role: str, state: str) -> None:
        self.looks[role] = replace(self.looks[role], state=state)

    def beat(self, *roles: str) -> None:
        """A beat of these, or of all."""
        for role in roles or self.looks:
            os.write(self._writing[role], b".")

    def pass_s(self, seconds: float, beats: bool = False, uses_cpu: float = 0.0) -> None:
        """Lets time pass and looks every quarter of a second.

        Args:
            uses_cpu: share of a processor that each process uses meanwhile.
        """
        for _ in range(int(seconds / LOOK_S)):
            self.now_s += LOOK_S
            if beats:
                self.beat()
            for role, look in self.looks.items():
                self.looks[role] = replace(look, cpu_s=look.cpu_s + uses_cpu * LOOK_S)
            self.watch.overdue()

    def close(self) -> None:
        self.watch.close()
        for descriptor in self._writing.values():
            os.close(descriptor)
