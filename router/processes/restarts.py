# SPDX-License-Identifier: Apache-2.0
"""When a process that died is started again. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 0.1
LONGEST_S = 30.0
STEADY_S = 60.0
"""A process that lived so long is no longer one that keeps dying."""


@dataclass(slots=True)
class Restarts:
    """Of one process: the pause doubles while it keeps dying."""

    count: int = 0
    """How often it died."""
    pause_s: float = 0.0
    """The latest pause."""
    started_s: float = 0.0

    def started(self, now_s: float) -> None:
        """It was started."""
        self.started_s = now_s

    def died(self, now_s: float) -> float:
        """It is dead; returns when to start it again."""
        self.count += 1
        if now_s - self.started_s >= STEADY_S:
            self.pause_s = 0.0
        self.pause_s = min(self.pause_s * 2, LONGEST_S) if self.pause_s else FIRST_S
        return now_s + self.pause_s
