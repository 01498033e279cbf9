# SPDX-License-Identifier: Apache-2.0
"""Signals to processes of a test."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

PATIENCE_S = 60.0
_STOPPED = frozenset("TtZX")


def send_signal(pid: int, number: int) -> None:
    """Of a stop nothing is certain until every thread has stopped: one that runs goes on for some microseconds."""
    os.kill(pid, number)
    if number != signal.SIGSTOP:
        return
    stop_s = time.monotonic() + PATIENCE_S
    while not _states(pid) <= _STOPPED:
        if time.monotonic() > stop_s:
            raise TimeoutError(f"process {pid} does not stop")
        time.sleep(0.001)


def _states(pid: int) -> set[str]:
    """Of its threads, as in proc(5)."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add((thread / "stat").read_text().rpartition(") ")[2][:1])
    return found
