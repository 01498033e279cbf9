# SPDX-License-Identifier: Apache-2.0
"""How long to wait between two polls: at once while parts keep ending, then ever longer up to a bound."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Pacing:
    """Doubles its pause with every poll in which nothing moved.

    A transfer that takes t seconds is noticed at most t seconds late (the pause never exceeds the time already
    waited, plus `first_s`), and after log2(longest_s / first_s) polls the rate is 1 / longest_s.
    """

    first_s: float
    longest_s: float
    pause_s: float = field(default=0.0, init=False)

    def moved(self) -> None:
        """Something ended or began."""
        self.pause_s = 0.0

    def rested(self) -> None:
        """A poll in which nothing moved."""
        self.pause_s = min(max(self.pause_s * 2, self.first_s), self.longest_s)
