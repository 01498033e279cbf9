# SPDX-License-Identifier: Apache-2.0
"""Things that happen at a known time, in time order and, at one instant, in the order they were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[float], None]
"""Called with the time it was planned for."""


@dataclass(order=True, slots=True)
class Plan:
    """One planned action; ``cancel`` takes it back."""

    time_s: float
    number: int
    action: Action | None = field(compare=False)

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class Agenda:
    """A heap of plans. O(log n) per plan."""

    def __init__(self) -> None:
        self._heap: list[Plan] = []
        self._planned = 0

    @property
    def next_s(self) -> float | None:
        """When the next plan is due."""
        while self._heap and self._heap[0].action is None:
            heapq.heappop(self._heap)
        return self._heap[0].time_s if self._heap else None

    def at(self, time_s: float, action: Action) -> Plan:
        """Plan an action."""
        plan = Plan(time_s, self._planned, action)
        self._planned += 1
        heapq.heappush(self._heap, plan)
        return plan

    def run(self, now_s: float) -> bool:
        """Do everything due by ``now_s``, also what that plans for no later than ``now_s``.

        Returns whether there was anything.
        """
        ran = False
        while (due_s := self.next_s) is not None and due_s <= now_s:
            action = heapq.heappop(self._heap).action
            if action is not None:
                action(due_s)
                ran = True
        return ran
