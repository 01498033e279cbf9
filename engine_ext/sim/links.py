# SPDX-License-Identifier: Apache-2.0
"""Links whose transfers share them: each of n gets 1/n of the bandwidth, and what one frees goes to the others.

Processor sharing, kept as one number per link: the bytes that any transfer has been given since the link was last
idle. A transfer ends when that number has grown by its size, so a change costs O(log transfers).
"""

from __future__ import annotations

import heapq

from engine_ext.sim.agenda import Action, Agenda, Plan


class SharedLink:
    """One direction of one link inside an engine; its transfers end on the engine's agenda."""

    __slots__ = ("_agenda", "_bytes_per_s", "_ends", "_given_bytes", "_next", "_number", "_since_s")

    def __init__(self, bytes_per_s: float, agenda: Agenda) -> None:
        self._bytes_per_s = bytes_per_s
        self._agenda = agenda
        self._ends: list[tuple[float, int, Action]] = []
        """(``_given_bytes`` at its end, number, what to do then)."""
        self._given_bytes = 0.0
        self._since_s = 0.0
        self._number = 0
        self._next: Plan | None = None

    def carry(self, size_bytes: float, done: Action, now_s: float) -> None:
        """Begin a transfer; ``done`` is called when its last byte has arrived."""
        self._give(now_s)
        heapq.heappush(self._ends, (self._given_bytes + size_bytes, self._number, done))
        self._number += 1
        self._plan()

    def _give(self, now_s: float) -> None:
        if self._ends:
            self._given_bytes += (now_s - self._since_s) * self._bytes_per_s / len(self._ends)
        else:
            self._given_bytes = 0.0
        self._since_s = now_s

    def _plan(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._ends:
            left_bytes = max(self._ends[0][0] - self._given_bytes, 0.0)
            end_s = self._since_s + left_bytes * len(self._ends) / self._bytes_per_s
            self._next = self._agenda.at(end_s, self._end)

    def _end(self, now_s: float) -> None:
        self._next = None
        self._since_s = now_s
        self._given_bytes = self._ends[0][0]
        over: list[Action] = []
        while self._ends and self._ends[0][0] <= self._given_bytes:
            over.append(heapq.heappop(self._ends)[2])
        self._plan()
        for done in over:
            done(now_s)


class QueuedLink:
    """A link of which only the end of its last transfer is known: they follow each other."""

    __slots__ = ("_bytes_per_s", "free_at_s")

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.free_at_s = 0.0

    def reserve(self, size_bytes: float, start_s: float) -> float:
        """Reserve it; returns when the first byte goes."""
        begins_s = max(start_s, self.free_at_s)
        self.free_at_s = begins_s + size_bytes / self._bytes_per_s
        return begins_s
