# SPDX-License-Identifier: Apache-2.0
"""Whether a process that lives still turns: it is asked about once a second, and one question is open at most. Pure.

Only time in which the asker itself was awake counts against the asked: after a pause of the whole machine, or of the
supervisor alone, nobody is taken for hung.
"""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_PERIOD_S = 1.0
_PERIODS = 4  # within the limit at least


@dataclass(slots=True)
class Heartbeat:
    """Of one process in one of its lives. ``tick`` every ``period_s``."""

    limit_s: float
    silent_s: float = 0.0
    """How long the open question has not been answered."""
    number: int = 0
    """Of the newest question."""
    answered: int = 0
    _ticked_s: float | None = None

    @property
    def period_s(self) -> float:
        return min(_LONGEST_PERIOD_S, self.limit_s / _PERIODS)

    @property
    def is_hung(self) -> bool:
        return self.silent_s >= self.limit_s

    def tick(self, now_s: float) -> int | None:
        """A period has passed; returns the number of a question that is to be asked now."""
        passed_s = 0.0 if self._ticked_s is None else min(now_s - self._ticked_s, 2 * self.period_s)
        self._ticked_s = now_s
        if self.answered < self.number:
            self.silent_s += passed_s
            return None
        self.silent_s = 0.0
        self.number += 1
        return self.number

    def heard(self, number: int) -> None:
        """It answered this question."""
        self.answered = max(self.answered, number)
        if self.answered >= self.number:
            self.silent_s = 0.0
