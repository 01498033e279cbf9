# SPDX-License-Identifier: Apache-2.0
"""A few threads that may hang: daemons, so that a dead file system does not keep the process alive."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Task = Callable[[], None]


class Workers:
    """Tasks run in the order in which they were put, and must not raise."""

    def __init__(self, name: str, count: int) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._began_s: list[float | None] = [None] * count
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"pointsman_storage_{name}{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: Task) -> None:
        self._tasks.put(task)

    def stuck(self, limit_s: float) -> bool:
        """Whether every thread has been in one task for longer than that."""
        limit = time.monotonic() - limit_s
        return all(began_s is not None and began_s < limit for began_s in self._began_s)

    def stop(self, wait_s: float) -> bool:
        """No task begins after those that are queued; False if a thread is still in one after `wait_s`."""
        for _ in self._threads:
            self._tasks.put(None)
        deadline_s = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, index: int) -> None:
        while (task := self._tasks.get()) is not None:
            self._began_s[index] = time.monotonic()
            task()
            self._began_s[index] = None
