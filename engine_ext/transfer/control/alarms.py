# SPDX-License-Identifier: Apache-2.0
"""Times at which something is to be looked at again."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Alarms(Generic[Name]):
    """One alarm per name, the earliest that was asked for. Whoever it wakes looks at the truth and sets it again.

    Costs O(log n) per change, and holds no more than one entry for each name but for those that were moved forward.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Name]] = []
        self._set: dict[Name, float] = {}
        self._count = 0

    def at(self, time_s: float, name: Name) -> None:
        """Wakes `name` at this time, or earlier where it has an earlier alarm."""
        if time_s < self._set.get(name, float("inf")):
            self._set[name] = time_s
            self._count += 1
            heapq.heappush(self._heap, (time_s, self._count, name))

    def drop(self, name: Name) -> None:
        """No alarm for this name."""
        self._set.pop(name, None)
        self._tidy()

    def ring(self, now_s: float) -> Iterator[Name]:
        """Names that are due, each once; their alarms are off by then."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            time_s, _, name = heapq.heappop(self._heap)
            if self._set.get(name) == time_s:
                del self._set[name]
                due.append(name)
        yield from due

    def next_s(self) -> float | None:
        """When the next one rings."""
        self._tidy()
        return self._heap[0][0] if self._heap else None

    def _tidy(self) -> None:
        while self._heap and self._set.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if len(self._heap) > 64 + 2 * len(self._set):
            self._heap = [entry for entry in self._heap if self._set.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
