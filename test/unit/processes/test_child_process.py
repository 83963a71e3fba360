"""A child process of a server ends with its standard input."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from sglang.srt.messages.ipc import ChildConfig, IpcAddresses

CHILD = (
    "import time; from sglang.srt.processes.child_process import start_child_process;"
    " start_child_process(); print('started', flush=True); time.sleep(60)"
)


def test_sockets_stay_while_the_parent_lives() -> None:
    """Another child may be about to bind one."""
    addresses, directory = IpcAddresses.create()
    sockets = [Path(each.removeprefix("ipc://")) for each in msgspec.structs.astuple(addresses)]
    try:
        for socket in sockets:
            socket.touch()
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(ChildConfig({}, addresses)) + b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"started\n"
        child.send_signal(signal.SIGHUP)
        child.stdin.close()
        assert child.wait(20) == 0
        assert all(socket.exists() for socket in sockets)
    finally:
        shutil.rmtree(directory)


STUCK = (
    "import os, time; from sglang.srt.processes.child_process import start_beats;"
    " from sglang.srt.messages.ipc import ChildConfig; from types import SimpleNamespace;"
    " child = ChildConfig({}, None, int(os.environ['BEATS']));"
    " start_beats(child, SimpleNamespace(num_turns=1, is_waiting=False), 0.5); time.sleep(60)"
)


def test_a_step_that_never_ends_ends_its_process_which_says_where_it_was() -> None:
    reading, writing = os.pipe()
    child = subprocess.run(
        [sys.executable, "-c", STUCK],
        env={**os.environ, "BEATS": str(writing)},
        pass_fds=(writing,),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    os.close(writing)
    with open(reading, "rb") as beats:
        assert len(beats.read()) >= 2
    assert child.returncode == 1
    assert "--watchdog-timeout" in child.stderr
    assert 'File "<string>", line 1' in child.stderr
