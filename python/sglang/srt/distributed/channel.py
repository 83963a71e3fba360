"""Frames from the first rank to the others, over sockets in a private folder."""

from __future__ import annotations

from collections.abc import Sequence

import zmq


class FrameSender:
    """The first rank's end: each frame goes to all other ranks, in order.

    Args:
        addresses: of the others' receivers.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._sockets = [_connected(address) for address in addresses]

    def send(self, frame: bytes) -> None:
        for each in self._sockets:
            each.send(frame)


class FrameReceiver:
    """Another rank's end.

    Attributes:
        num_turns, is_waiting: as those of the sockets of messages (`TurnLimit`).
    """

    def __init__(self, address: str) -> None:
        self.num_turns = 0
        self.is_waiting = False
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)

    def receive(self) -> bytes:
        """Waits for the next frame."""
        self.is_waiting = True
        frame = self._socket.recv()
        self.is_waiting = False
        self.num_turns += 1
        return frame


def _connected(address: str) -> zmq.Socket[bytes]:
    found: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    found.setsockopt(zmq.SNDHWM, 0)
    found.setsockopt(zmq.LINGER, 0)
    found.connect(address)
    return found
