# SPDX-License-Identifier: Apache-2.0
"""The eviction policy over plain dicts, walking everything for every answer: what the fast one is compared with.

Shares with it only the parts that count and compute: reuse model, recency guard, rebuild cost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_ext.vllm.eviction.rebuild import RebuildCost
from engine_ext.vllm.eviction.recency import RecencyGuard
from engine_ext.vllm.eviction.reuse import ReuseModel
from engine_ext.vllm.eviction.settings import Settings
from engine_ext.vllm.plan import EvictHints


@dataclass(eq=False)
class Read:
    """One request."""

    turn: int
    factor: float
    hints: EvictHints
    end: int = 0
    last: str | None = None
    serials: dict[int, int] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False)
class Known:
    end: int
    parent: str | None
    read: Read
    kind: int
    forks: int = 0
    status: Any = None
    evictable: bool = False
    evicted: bool = False


class PlainEviction:
    def __init__(self, capacity: int, settings: Settings) -> None:
        self.capacity, self.settings = capacity, settings
        self.model = ReuseModel(capacity, settings)
        self.guard = RecencyGuard(capacity, settings)
        self.rebuild = RebuildCost(settings.attention_per_token)
        self.known: dict[str, Known] = {}
        self.ghosts: list[str] = []
        self.now = 0.0
        self.serial = 0
        self.unrefreshed = 0
        self.by_recency = True

    def bucket(self, read: Read, kind: int) -> int:
        return bisect_right(self.model.ends_s, self.now - read.since[kind])

    def advance(self, now: float) -> None:
        sizes = Counter((one.read, one.kind) for one in self.known.values())
        before = {visit: self.bucket(*visit) for visit in sizes}
        self.now = max(self.now, now)
        for visit, size in sizes.items():
            for bucket in range(before[visit] + 1, self.bucket(*visit) + 1):
                self.model.reached(visit[1], bucket, size)

    def visit(self, chain: Sequence[tuple[str, int]], now: float, hints: EvictHints) -> Read:
        self.advance(now)
        while len(self.ghosts) > int(self.settings.ghosts * self.capacity):
            gone = self.ghosts.pop(0)
            del self.known[gone]
            for one in self.known.values():
                one.parent = None if one.parent == gone else one.parent
        turn = 0
        last = None
        for key, _ in chain:
            if key not in self.known:
                break
            last = self.known[key]
        if last is not None and last.end >= self.settings.continues_from * last.read.end:
            turn = last.read.turn + 1
        share = self.settings.pull_share
        factor = share + (1 - share) * self.settings.copy_lost**hints.peer_copies
        read = Read(turn, factor, hints)
        self.read(read, chain)
        return read

    def extend(self, read: Read, chain: Sequence[tuple[str, int]], now: float) -> None:
        self.advance(now)
        self.read(read, chain)

    def read(self, read: Read, chain: Sequence[tuple[str, int]]) -> None:
        for key, end in chain:
            one = self.known.get(key)
            if one is not None and one.read is read:
                continue
            if one is not None:
                one.forks += not read.turn
                self.model.reused(one.kind, self.bucket(one.read, one.kind))
                if one.status is not None or one.evicted:
                    self.guard.wanted(held=one.status is not None)
            private = read.hints.private_from_token
            if end <= read.hints.pinned_tokens:
                kind = self.model.pinned_class
            elif private is not None and read.end >= private:
                kind = self.model.private_class
            else:
                kind = self.model.class_of(read.turn, 0 if one is None else one.forks)
            if kind not in read.serials:
                self.serial += 1
                read.serials[kind], read.since[kind] = self.serial, self.now
            if one is None:
                one = self.known[key] = Known(end, read.last, read, kind)
                self.ghosts.append(key)
            one.read, one.kind, one.parent = read, kind, read.last
            self.model.reached(kind, 0, 1)
            read.last, read.end = key, max(read.end, end)
        self.unrefreshed += len(chain)
        if self.unrefreshed >= max(512, int(self.settings.refresh * self.capacity)):
            self.unrefreshed = 0
            self.model.refresh()
            self.guard.decide()
            self.by_recency = self.guard.suffices

    def finish(self, read: Read, now: float) -> None:
        self.advance(now)
        for kind, since in read.since.items():
            size = sum(one.read is read and one.kind == kind for one in self.known.values())
            if since != self.now and size:
                for bucket in range(self.bucket(read, kind) + 1):
                    self.model.reached(kind, bucket, -size)
                read.since[kind] = self.now
                self.model.reached(kind, 0, size)

    def insert(self, key: str, status: Any) -> None:
        self.known[key].status = status
        self.ghosts.remove(key)

    def evict(self, count: int, protected: Iterable[str]) -> list[str] | None:
        free = {key for key, one in self.known.items() if one.evictable} - set(protected)
        if len(free) < count:
            return None
        evicted = []
        for _ in range(count):
            key = min(self.deepest(free), key=self.rank)
            free.remove(key)
            one = self.known[key]
            one.status, one.evictable, one.evicted = None, False, True
            self.ghosts.append(key)
            evicted.append(key)
        return evicted

    def deepest(self, free: Iterable[str]) -> list[str]:
        found: dict[tuple[Read, int], str] = {}
        for key in free:
            one = self.known[key]
            best = found.get((one.read, one.kind))
            if best is None or self.known[best].end < one.end:
                found[one.read, one.kind] = key
        return list(found.values())

    def rank(self, key: str) -> tuple[Any, ...]:
        one = self.known[key]
        since, serial = one.read.since[one.kind], one.read.serials[one.kind]
        bucket = self.bucket(one.read, one.kind)
        edges = (0.0, *self.model.ends_s)
        pinned = one.kind == self.model.pinned_class and edges[bucket] < self.settings.pin_s
        if any(other.status is not None and other.parent == key for other in self.known.values()):
            return (2, 0.0, 0, 0, 0.0, since, serial)
        if self.by_recency:
            tier = 0 if one.kind == self.model.private_class else 1
            return (int(pinned), float(tier), 0, 0, 0.0, since, serial)
        cost = one.read.factor * self.rebuild.weight(one.end)
        worth = self.model.rates[one.kind][bucket] * cost
        return (int(pinned), worth, one.kind, bucket, cost, since, serial)
