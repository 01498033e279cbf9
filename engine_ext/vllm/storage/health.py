# SPDX-License-Identifier: Apache-2.0
"""Named states in which the store is left alone for a while. Pure; thread-safe."""

from __future__ import annotations

import threading
from enum import Enum

IO_ERRORS_IN_A_ROW = 3


class Degraded(Enum):
    """The values are labels of the metric."""

    DISK_FULL = "disk_full"
    """Nothing is stored; loads go on."""
    IO_ERRORS = "io_errors"
    """Several errors in a row: neither loads nor stores."""
    LEDGER_BUSY = "ledger_busy"
    """A frozen worker holds the ledger's lock: nothing is stored; loads go on."""
    HUNG = "hung"
    """All threads that read, or all that write, are in one call past its deadline: neither loads nor stores."""


_STOPS_LOADS = (Degraded.IO_ERRORS, Degraded.HUNG)


class Health:
    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._until_s: dict[Degraded, float] = {}
        self._errors_in_a_row = 0
        self._lock = threading.Lock()

    def good(self) -> None:
        """An operation succeeded."""
        self._errors_in_a_row = 0

    def io_error(self, now_s: float) -> None:
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= IO_ERRORS_IN_A_ROW:
            self.enter(Degraded.IO_ERRORS, now_s)

    def enter(self, state: Degraded, now_s: float) -> None:
        with self._lock:
            self._until_s[state] = now_s + self._retry_s

    def leave(self, state: Degraded) -> None:
        with self._lock:
            self._until_s.pop(state, None)

    def states(self, now_s: float) -> frozenset[Degraded]:
        with self._lock:
            return frozenset(state for state, until_s in self._until_s.items() if now_s < until_s)

    def loads(self, now_s: float) -> bool:
        return not self.states(now_s).intersection(_STOPS_LOADS)

    def stores(self, now_s: float) -> bool:
        return not self.states(now_s)
