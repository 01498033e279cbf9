# SPDX-License-Identifier: Apache-2.0
"""Whether giving up the least recently used first is good enough. Pure.

Where the tier is large enough that hardly an evicted chunk is ever wanted again, nothing can be won over least recent
use, and what was learnt from few reuses can only err. So that order holds until it is seen to lose.
"""

from __future__ import annotations

from .settings import Settings


class RecencyGuard:
    """Counts chunks that were wanted: held, or given up too early."""

    def __init__(self, capacity: int, settings: Settings) -> None:
        self.suffices = True
        self._held = self._lost = 0.0
        self._leave = settings.recency_until_lost * capacity
        self._return = settings.recency_again_below * capacity
        self._watched = settings.watched * capacity

    def wanted(self, *, held: bool) -> None:
        """A known chunk was asked for."""
        if held:
            self._held += 1
        else:
            self._lost += 1

    def decide(self) -> None:
        """Sets `suffices`; forgets half of what it counted when that is much."""
        self.suffices = self._lost <= self._leave if self.suffices else self._lost < self._return
        if self._held + self._lost > self._watched:
            self._held, self._lost = self._held / 2, self._lost / 2
