"""Keeps a process from sockets and from other programs, without privileges: seccomp of Linux."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

# Of Linux: prctl(2), seccomp(2), and the numbers of socket, connect, execve, execveat and
# io_uring_setup.
SET_SECCOMP, SET_NO_NEW_PRIVILEGES, FILTER_MODE = 22, 38, 2
FORBIDDEN = {
    "x86_64": (0xC000003E, (41, 42, 59, 322, 425)),
    "aarch64": (0xC00000B7, (198, 203, 221, 281, 425)),
}
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_AT, ARCHITECTURE_AT, OTHER_ABI = 0, 4, 0x40000000
ALLOW, FAIL_WITH_EPERM = 0x7FFF0000, 0x00050001


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (
        ("length", ctypes.c_uint16),
        ("instructions", ctypes.POINTER(_Instruction)),
    )


def forbid_sockets_and_programs() -> None:
    """Keeps this process, from here on, from opening a socket and starting a program.

    Raises:
        OSError: where that cannot be had.
    """
    if sys.platform != "linux" or platform.machine() not in FORBIDDEN:
        raise OSError("it is done on Linux for x86_64 and aarch64 alone")
    architecture, numbers = FORBIDDEN[platform.machine()]
    checks = [(IF_AT_LEAST, OTHER_ABI), *((IF_EQUAL, number) for number in numbers)]
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, FAIL_WITH_EPERM),
        (LOAD, 0, 0, NUMBER_AT),
        *((code, len(checks) - index, 0, value) for index, (code, value) in enumerate(checks)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, FAIL_WITH_EPERM),
    ]
    program = _Program(
        len(lines), (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    )
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for call in (
        (SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        (SET_SECCOMP, FILTER_MODE, ctypes.byref(program), 0, 0),
    ):
        if prctl(*call):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
