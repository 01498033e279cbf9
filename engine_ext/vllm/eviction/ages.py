# SPDX-License-Identifier: Apache-2.0
"""Moves visits from one age bucket to the next: a queue per bucket, each in the order of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic

from .visits import S, Visit


class Ages(Generic[S]):
    """Every visit crosses every bucket at most once, so its cost is constant."""

    def __init__(self, ends_s: Sequence[float]) -> None:
        self._ends_s = ends_s
        self._queues: list[deque[tuple[float, Visit[S]]]] = [deque() for _ in ends_s]

    def add(self, visit: Visit[S]) -> None:
        """A visit that begins now, or begins again: what is queued of it under another time does not count."""
        visit.bucket = 0
        self._queues[0].append((visit.since_s, visit))

    def advance(self, now_s: float) -> Iterator[Visit[S]]:
        """Visits that came into a new bucket, once for each; `bucket` is that one. Those without chunks are dropped."""
        for bucket, (end_s, queue) in enumerate(zip(self._ends_s, self._queues, strict=True)):
            while queue and (queue[0][0] != queue[0][1].since_s or now_s - queue[0][0] >= end_s):
                since_s, visit = queue.popleft()
                if since_s != visit.since_s or not visit.known:
                    continue
                visit.bucket = bucket + 1
                if bucket + 1 < len(self._queues):
                    self._queues[bucket + 1].append((since_s, visit))
                yield visit
