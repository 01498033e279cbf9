# SPDX-License-Identifier: Apache-2.0
"""Chunks of one tier, what is known of each, and which go when room is needed. Pure: time comes as an argument.

A chunk is worth the seconds that computing it again takes, times how soon it is expected to be read again; all chunks
of a tier have the same bytes. Only chunks without held chunks behind them go, as far as there is a choice: one whose
beginning is gone is of no use. Every operation is O(log n) in the chunks held, per chunk named.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic

from engine_ext.vllm.plan import EvictHints

from .ages import Ages
from .order import Order
from .rebuild import RebuildCost
from .recency import RecencyGuard
from .reuse import ReuseModel
from .settings import Settings
from .visits import Chunk, Request, S, Visit

NO_HINTS = EvictHints()
_LEAST_REFRESH = 512
_LEAST_CHUNKS = 8
"""Of a prompt whose predicted seconds are learnt from: of a shorter one, what is not a whole chunk is too large a part."""


class EvictionCore(Generic[S]):
    """`capacity` is in chunks, above 0."""

    def __init__(self, capacity: int, settings: Settings | None = None) -> None:
        self._capacity = capacity
        self._settings = settings or Settings()
        self.clear()

    def clear(self) -> None:
        """Forget everything: chunks, ghosts and what was learnt."""
        settings = self._settings
        self._known: dict[Hashable, Chunk[S]] = {}
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._ghosts_allowed = int(settings.ghosts * self._capacity)
        self._evictable = 0
        self._serial = 0
        self._now_s = 0.0
        self._unrefreshed = 0
        self._refresh = max(_LEAST_REFRESH, int(settings.refresh * self._capacity))
        self._changed: set[Visit[S]] = set()
        self._usual_reuse = 0.0
        """Of the requests with that hint: a fading mean of log(1 + reuses per hour)."""
        self._rebuild = RebuildCost(settings.attention_per_token)
        self._model = ReuseModel(self._capacity, settings)
        self._guard = RecencyGuard(self._capacity, settings)
        self._ages: Ages[S] = Ages(self._model.ends_s)
        self._order: Order[S] = Order(self._model, self._rebuild, settings)

    @property
    def held(self) -> int:
        """Chunks in the tier."""
        return len(self._known) - len(self._ghosts)

    @property
    def evictable(self) -> int:
        """Chunks that may be given up."""
        return self._evictable

    @property
    def ghosts(self) -> int:
        """Chunks that are only remembered; bounded by `ghosts` of the settings and one request."""
        return len(self._ghosts)

    @property
    def by_recency(self) -> bool:
        """Whether the least recently used go first at present."""
        return self._guard.suffices

    def get(self, key: Hashable) -> S | None:
        """What was inserted for a chunk that is held."""
        chunk = self._known.get(key)
        return None if chunk is None else chunk.status

    # Requests

    def visit(
        self, chain: Sequence[tuple[Hashable, int]], now_s: float, hints: EvictHints = NO_HINTS
    ) -> Request[S]:
        """A request reads these chunks, (key, end token) from the beginning on, held or not."""
        self._advance(now_s)
        self._forget_ghosts()
        last_known = self._last_known(chain)
        turn = 0
        if last_known is not None:
            before = last_known.visit.request
            if last_known.end_token >= self._settings.continues_from * before.end_token:
                turn = before.turn + 1
        if hints.rebuild_s and len(chain) >= _LEAST_CHUNKS:
            # The seconds are of the whole prompt, of which whole chunks are known: half a chunk is missing on average.
            self._rebuild.observe(chain[-1][1] + chain[0][1] // 2, hints.rebuild_s)
        request: Request[S] = Request(
            turn, self._cost_factor(hints), hints.pinned_tokens, hints.private_from_token
        )
        self._read(request, chain)
        return request

    def extend(self, request: Request[S], chain: Sequence[tuple[Hashable, int]], now_s: float) -> None:
        """The same request reads, or has computed, these as well: behind what it has read so far."""
        self._advance(now_s)
        self._read(request, chain)

    def finish(self, request: Request[S], now_s: float) -> None:
        """The request is done: its chunks are as young as if it had read them now."""
        self._advance(now_s)
        for visit in request.visits.values():
            if visit.since_s == self._now_s or not visit.known:
                continue
            for bucket in range(visit.bucket + 1):
                self._model.reached(visit.reuse_class, bucket, -visit.known)
            visit.since_s = self._now_s
            self._model.reached(visit.reuse_class, 0, visit.known)
            self._ages.add(visit)
            self._changed.add(visit)

    # The tier

    def insert(self, key: Hashable, status: S, *, evictable: bool = False) -> None:
        """A chunk that is not held comes into the tier."""
        chunk = self._known.get(key)
        if chunk is None:
            self._read(Request(0, 1.0, 0, None), ((key, 0),))
            chunk = self._known[key]
        chunk.status = status
        self._ghosts.pop(key, None)
        if chunk.parent is not None:
            self._count_child(chunk.parent, 1)
        if evictable:
            self._release(chunk)

    def remove(self, key: Hashable) -> None:
        """A held chunk leaves the tier without having been of use.

        Raises:
            KeyError: it is not held.
        """
        chunk = self._known[key]
        if chunk.status is None:
            raise KeyError(key)
        if chunk.evictable:
            self._hold(chunk)
        self._drop(chunk)

    def mark_evictable(self, key: Hashable) -> None:
        """Nobody reads or writes a held chunk any more."""
        chunk = self._known.get(key)
        if chunk is not None and chunk.status is not None and not chunk.evictable:
            self._release(chunk)

    def mark_non_evictable(self, key: Hashable) -> None:
        """Somebody reads it."""
        chunk = self._known.get(key)
        if chunk is not None and chunk.evictable:
            self._hold(chunk)

    def evict(self, count: int, protected: Iterable[Hashable] = ()) -> list[tuple[Hashable, S]] | None:
        """Give up exactly `count` chunks, none of `protected`; None, and nothing changes, where that cannot be."""
        kept = [
            chunk for key in set(protected) if (chunk := self._known.get(key)) is not None and chunk.evictable
        ]
        if self._evictable - len(kept) < count:
            return None
        for chunk in kept:
            self._hold(chunk)
        self._settle()
        self._order.begin()
        evicted = [self._evict_one() for _ in range(count)]
        self._order.end()
        for chunk in kept:
            self._release(chunk)
        return evicted

    # Inside

    def _advance(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        for visit in self._ages.advance(self._now_s):
            self._model.reached(visit.reuse_class, visit.bucket, visit.known)
            self._changed.add(visit)

    def _last_known(self, chain: Sequence[tuple[Hashable, int]]) -> Chunk[S] | None:
        last = None
        for key, _ in chain:
            chunk = self._known.get(key)
            if chunk is None:
                break
            last = chunk
        return last

    def _cost_factor(self, hints: EvictHints) -> float:
        """What losing a chunk costs, relative to one that no peer holds and that is reused as usual."""
        settings = self._settings
        alone = settings.copy_lost ** min(hints.peer_copies, 16)
        factor = settings.pull_share + (1 - settings.pull_share) * alone
        if hints.reuse is None:
            return factor
        level = math.log1p(hints.reuse)
        self._usual_reuse += settings.reuse_fades * (level - self._usual_reuse)
        return factor * math.exp(settings.reuse_trust * (level - self._usual_reuse))

    def _read(self, request: Request[S], chain: Sequence[tuple[Hashable, int]]) -> None:
        for key, end_token in chain:
            self._read_one(request, key, end_token)
        self._unrefreshed += len(chain)
        if self._unrefreshed >= self._refresh:
            self._unrefreshed = 0
            self._model.refresh()
            self._guard.decide()
            self._order.rank_by_recency(self._guard.suffices)

    def _read_one(self, request: Request[S], key: Hashable, end_token: int) -> None:
        chunk = self._known.get(key)
        forks = 0
        if chunk is not None:
            if chunk.visit.request is request:
                return
            if not request.turn:
                chunk.forks += 1
            forks = chunk.forks
            self._leave(chunk)
        visit = self._visit(request, self._class(request, end_token, forks))
        if chunk is None:
            chunk = self._known[key] = Chunk(key, end_token, request.last, visit)
            self._ghosts[key] = None
        elif chunk.parent is not request.last:
            self._hang(chunk, request.last)
        chunk.visit = visit
        visit.known += 1
        self._model.reached(visit.reuse_class, 0, 1)
        if chunk.evictable:
            insort(visit.evictable, chunk, key=_depth)
            self._changed.add(visit)
        request.last = chunk
        request.end_token = max(request.end_token, end_token)

    def _leave(self, chunk: Chunk[S]) -> None:
        visit = chunk.visit
        self._model.reused(visit.reuse_class, visit.bucket)
        if chunk.status is not None or chunk.evicted:
            self._guard.wanted(held=chunk.status is not None)
        visit.known -= 1
        if chunk.evictable:
            _take_out(visit.evictable, chunk)
            self._changed.add(visit)

    def _class(self, request: Request[S], end_token: int, forks: int) -> int:
        if end_token <= request.pinned_tokens:
            return self._model.pinned_class
        begin = request.end_token
        if request.private_from_token is not None and begin >= request.private_from_token:
            return self._model.private_class
        return self._model.class_of(request.turn, forks)

    def _visit(self, request: Request[S], reuse_class: int) -> Visit[S]:
        visit = request.visits.get(reuse_class)
        if visit is None:
            self._serial += 1
            visit = request.visits[reuse_class] = Visit(request, reuse_class, self._now_s, self._serial)
            self._ages.add(visit)
        return visit

    def _release(self, chunk: Chunk[S]) -> None:
        chunk.evictable = True
        self._evictable += 1
        insort(chunk.visit.evictable, chunk, key=_depth)
        self._changed.add(chunk.visit)

    def _hold(self, chunk: Chunk[S]) -> None:
        chunk.evictable = False
        self._evictable -= 1
        _take_out(chunk.visit.evictable, chunk)
        self._changed.add(chunk.visit)

    def _drop(self, chunk: Chunk[S]) -> None:
        chunk.status = None
        self._ghosts[chunk.key] = None
        if chunk.parent is not None:
            self._count_child(chunk.parent, -1)

    def _count_child(self, parent: Chunk[S], change: int) -> None:
        parent.children += change
        if parent.evictable and parent.children == max(change, 0):
            self._changed.add(parent.visit)

    def _hang(self, chunk: Chunk[S], parent: Chunk[S] | None) -> None:
        """Behind another parent: the one that was known of it has been forgotten meanwhile."""
        if chunk.status is not None and chunk.parent is not None:
            self._count_child(chunk.parent, -1)
        chunk.parent = parent
        if chunk.status is not None and parent is not None:
            self._count_child(parent, 1)

    def _settle(self) -> None:
        for visit in self._changed:
            self._order.put(visit)
        self._changed.clear()

    def _evict_one(self) -> tuple[Hashable, S]:
        visit = self._order.first()
        assert visit is not None, "fewer evictable chunks than counted"  # noqa: S101
        chunk = visit.evictable.pop()
        status = chunk.status
        assert status is not None  # noqa: S101
        chunk.evictable = False
        chunk.evicted = True
        self._evictable -= 1
        self._changed.add(visit)
        self._drop(chunk)
        self._settle()
        return chunk.key, status

    def _forget_ghosts(self) -> None:
        while len(self._ghosts) > self._ghosts_allowed:
            key, _ = self._ghosts.popitem(last=False)
            chunk = self._known.pop(key)
            chunk.visit.known -= 1
            chunk.parent = None


def _depth(chunk: Chunk[S]) -> int:
    return chunk.end_token


def _take_out(chunks: list[Chunk[S]], chunk: Chunk[S]) -> None:
    place = bisect_left(chunks, chunk.end_token, key=_depth)
    while chunks[place] is not chunk:
        place += 1
    del chunks[place]
