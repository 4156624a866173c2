"""Waits for the answers of workers, and for their ends. Part of rlstruct.batchers."""

from __future__ import annotations

import math
import select

from rlstruct.batchers.worker_handle import Worker

_LONGEST = 1e6  # seconds; poll() counts milliseconds in 32 bits


class Watch:
    """Says which workers have answered or ended.

    `multiprocessing.connection.wait` does so too, but makes a selector for each call, which takes longer than the call.
    """

    def __init__(self) -> None:
        """Watch nobody."""
        self._poll = select.poll()
        self._workers: dict[int, Worker] = {}  # by file descriptor

    def add(self, worker: Worker) -> None:
        """Watch a worker whose process has been started."""
        for source in (worker.connection.fileno(), worker.process.sentinel):
            self._workers[source] = worker
            self._poll.register(source, select.POLLIN)

    def remove(self, worker: Worker) -> None:
        """Forget a worker, before its connection is closed."""
        for source in [source for source, one in self._workers.items() if one is worker]:
            del self._workers[source]
            self._poll.unregister(source)

    def wait(self, timeout: float) -> list[Worker]:
        """Return the workers that have something to say or have ended, as soon as there are any.

        Args:
            timeout: seconds after which nobody is returned; 0 or less to look only.
        """
        ready = self._poll.poll(math.ceil(min(max(0.0, timeout), _LONGEST) * 1000))
        return list({self._workers[source].index: self._workers[source] for source, _ in ready}.values())
