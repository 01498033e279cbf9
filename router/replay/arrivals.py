# SPDX-License-Identifier: Apache-2.0
"""Where the requests of a replay come from: a trace with its own times, or clients that wait for their answers.

An open loop sends whatever the fleet does; a closed loop sends the next question of a conversation when the answer
to the last one is complete, so a slow fleet is asked less.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from router.replay.traces import TraceRequest


class Arrivals(Protocol):
    """A source of requests. ``finished`` may make the next arrival earlier than it was, never before its time."""

    @property
    def next_s(self) -> float | None:
        """When the next request arrives, as far as known now; None while nothing is to come."""

    def take(self) -> TraceRequest:
        """The next request, at ``next_s``. Its ``index`` is unique within the replay."""

    def finished(self, index: int, now_s: float) -> None:
        """The answer to a request is complete."""


class TraceArrivals:
    """Requests at the times they carry."""

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        self._waiting = deque(sorted(requests, key=lambda one: one.arrival_s))

    @property
    def next_s(self) -> float | None:
        return self._waiting[0].arrival_s if self._waiting else None

    def take(self) -> TraceRequest:
        return self._waiting.popleft()

    def finished(self, index: int, now_s: float) -> None:
        """Changes nothing."""


class ClosedLoop:
    """At most ``concurrent`` conversations at a time, each asking again as soon as it is answered.

    The first ones begin ``apart_s`` after one another, from 0 on; each that has ended makes room for the next one.
    """

    def __init__(
        self,
        conversations: Sequence[Sequence[TraceRequest]],
        concurrent: int,
        apart_s: float = 0.0,
    ) -> None:
        """The times and indices of the requests do not count; conversations begin in their order."""
        self._waiting = deque(deque(turns) for turns in conversations)
        self._due: list[tuple[float, int, TraceRequest, deque[TraceRequest]]] = []
        self._asked: dict[int, deque[TraceRequest]] = {}
        self._next_index = 0
        for place in range(min(concurrent, len(self._waiting))):
            self._begin(place * apart_s)

    @property
    def next_s(self) -> float | None:
        return self._due[0][0] if self._due else None

    def take(self) -> TraceRequest:
        at_s, index, turn, rest = heapq.heappop(self._due)
        self._asked[index] = rest
        return replace(turn, arrival_s=at_s, index=index)

    def finished(self, index: int, now_s: float) -> None:
        rest = self._asked.pop(index)
        if rest:
            self._ask(now_s, rest)
        elif self._waiting:
            self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._ask(now_s, self._waiting.popleft())

    def _ask(self, at_s: float, turns: deque[TraceRequest]) -> None:
        heapq.heappush(self._due, (at_s, self._next_index, turns.popleft(), turns))
        self._next_index += 1
