# SPDX-License-Identifier: Apache-2.0
"""The order in which visits give up their deepest chunk.

Visits of one class and one age bucket share a rate of reuse, so they lie in one cell, cheapest first; the worth of a
cell's first is rate * cost, and rates may change without touching any visit. While least recent use suffices, all lie
in three cells, oldest first: private ones go before all others, pinned ones after them. A visit whose deepest chunk
still has held chunks behind it waits in a cell of its own kind and goes only when nothing else is left.
"""

from __future__ import annotations

import heapq
from typing import Generic

from sortedcontainers import SortedDict

from .rebuild import RebuildCost
from .reuse import ReuseModel
from .settings import Settings
from .visits import S, Visit

Cell = tuple[int, int]

PINNED_WORTH = 1e12
_BLOCKED: Cell = (1 << 30, 0)
_BLOCKED_WORTH = 1e15
_RECENCY = -1
_RECENCY_WORTHS = (0.0, 1.0, PINNED_WORTH)


class Order(Generic[S]):
    """Placing a visit is O(log visits); `first` is O(cells) for the first of a batch, then O(log cells)."""

    def __init__(self, model: ReuseModel, rebuild: RebuildCost, settings: Settings) -> None:
        self._model = model
        self._rebuild = rebuild
        self._by_recency = True
        self._cells: dict[Cell, SortedDict[tuple[float, float, int], Visit[S]]] = {}
        self._heap: list[tuple[float, Cell]] | None = None
        ends_s = (0.0, *model.ends_s)
        self._pinned_buckets = sum(end_s < settings.pin_s for end_s in ends_s)

    def rank_by_recency(self, by_recency: bool) -> None:
        """Changes the order of all; nothing if it is that one already."""
        if by_recency == self._by_recency:
            return
        self._by_recency = by_recency
        placed = [visit for cell in self._cells.values() for visit in cell.values()]
        self._cells.clear()
        for visit in placed:
            visit.place = None
            self.put(visit)

    def put(self, visit: Visit[S]) -> None:
        """Where it belongs now; nowhere if it has nothing to give up."""
        if visit.place is not None:
            cell, place = visit.place
            places = self._cells[cell]
            del places[place]
            if not places:
                del self._cells[cell]
            else:
                self._offer(cell)
            visit.place = None
        if not visit.evictable:
            return
        cell, cost = self._cell(visit)
        place = (cost, visit.since_s, visit.serial)
        visit.place = (cell, place)
        places = self._cells.get(cell)
        if places is None:
            places = self._cells[cell] = SortedDict()
        places[place] = visit
        self._offer(cell)

    def begin(self) -> None:
        """A batch of evictions: until `end`, rates do not change."""
        self._heap = [(self._worth(cell), cell) for cell in self._cells]
        heapq.heapify(self._heap)

    def first(self) -> Visit[S] | None:
        """Whose deepest chunk goes next; None if there is none. Within a batch only."""
        heap = self._heap
        while heap:
            worth, cell = heap[0]
            if cell in self._cells and self._worth(cell) == worth:
                visit: Visit[S] = self._cells[cell].peekitem(0)[1]
                return visit
            heapq.heappop(heap)
        return None

    def end(self) -> None:
        """Of the batch."""
        self._heap = None

    def _offer(self, cell: Cell) -> None:
        if self._heap is not None:
            heapq.heappush(self._heap, (self._worth(cell), cell))

    def _cell(self, visit: Visit[S]) -> tuple[Cell, float]:
        deepest = visit.evictable[-1]
        if deepest.children:
            return _BLOCKED, 0.0
        if self._by_recency:
            return (_RECENCY, self._tier(visit)), 0.0
        cost = visit.request.cost_factor * self._rebuild.weight(deepest.end_token)
        return (visit.reuse_class, visit.bucket), cost

    def _tier(self, visit: Visit[S]) -> int:
        if visit.reuse_class == self._model.private_class:
            return 0
        pinned = visit.reuse_class == self._model.pinned_class and visit.bucket < self._pinned_buckets
        return 2 if pinned else 1

    def _worth(self, cell: Cell) -> float:
        if cell == _BLOCKED:
            return _BLOCKED_WORTH
        first, second = cell
        if first == _RECENCY:
            return _RECENCY_WORTHS[second]
        cost: float = self._cells[cell].peekitem(0)[0][0]
        worth = self._model.rates[first][second] * cost
        if first == self._model.pinned_class and second < self._pinned_buckets:
            return worth + PINNED_WORTH
        return worth
