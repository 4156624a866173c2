"""Messages between a batcher and one of its workers; neither side can make the other wait for ever."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")


class Channel:
    """One end of a socket pair that carries pickled objects.

    `multiprocessing.connection.Connection` would read a message to its end, however long the other process stops in
    the middle of it; and torch would put each tensor of a message into a file and start a thread that serves it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray(_LENGTH.size)
        self._filled = 0
        self._has_length = False

    def fileno(self) -> int:
        """Return the file descriptor, for whoever waits for messages."""
        return self._socket.fileno()

    def send(self, message: Any, seconds: float | None = None) -> None:  # noqa: ANN401 - whatever can be pickled
        """Send a message, never None, that the other process must read within ``seconds``; None waits for ever.

        Raises:
            TimeoutError, BlockingIOError: it has not been read in time. The channel is of no use any more.
            ConnectionError: the other process is gone.
        """
        pickled = pickle.dumps(message)
        self._socket.settimeout(seconds)
        self._socket.sendall(_LENGTH.pack(len(pickled)) + pickled)

    def receive(self, wait: bool) -> Any:  # noqa: ANN401 - what was sent
        """Return the next message; None unless all of it is there or ``wait`` is set. What has come is kept."""
        self._socket.setblocking(wait)
        while True:
            while self._filled < len(self._buffer):
                try:
                    n = self._socket.recv_into(memoryview(self._buffer)[self._filled :])
                except BlockingIOError:
                    return None
                if n == 0:
                    raise EOFError
                self._filled += n
            read, self._filled, self._has_length = self._buffer, 0, not self._has_length
            self._buffer = bytearray(_LENGTH.unpack(read)[0] if self._has_length else _LENGTH.size)
            if not self._has_length:
                return pickle.loads(read)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
