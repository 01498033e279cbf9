# SPDX-License-Identifier: Apache-2.0
"""Chunks of the host tier that something outside may still write: freed or not, nobody gets them. Pure.

A pull that failed at its deadline cannot be called back, so its late bytes land in the chunks that it was given. vLLM
frees those chunks as soon as it hears of the failure. Whoever hears of it first (the tier) holds them here; whoever
hands chunks out (the primary tier) asks here before a freed chunk becomes free. `PointsmanOffloadingSpec.quarantine`
is the one object that both see. For one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Quarantine:
    """Holds are counted: a chunk that was held twice is free after two releases. All operations O(chunks named)."""

    def __init__(self) -> None:
        self._holds: dict[int, int] = {}
        self._parked: set[int] = set()
        self._reusable: list[int] = []

    def hold(self, chunks: Iterable[int]) -> None:
        """Late writes may land in these; call it before anyone hears that their pull failed."""
        for chunk in chunks:
            self._holds[chunk] = self._holds.get(chunk, 0) + 1

    def release(self, chunks: Iterable[int]) -> None:
        """Nothing can write them any more. Those that were freed meanwhile come from `reclaim`. Unknown ones are ignored."""
        for chunk in chunks:
            holds = self._holds.get(chunk, 0)
            if holds > 1:
                self._holds[chunk] = holds - 1
            elif holds == 1:
                del self._holds[chunk]
                if chunk in self._parked:
                    self._parked.remove(chunk)
                    self._reusable.append(chunk)

    def free(self, chunks: Iterable[int]) -> list[int]:
        """Chunks that their owner gave up: those that may be reused now. The rest is kept until released."""
        usable = []
        for chunk in chunks:
            if chunk in self._holds:
                self._parked.add(chunk)
            else:
                usable.append(chunk)
        return usable

    def reclaim(self) -> list[int]:
        """Chunks that were freed while held and have been released since; each is returned once."""
        reusable, self._reusable = self._reusable, []
        return reusable

    def all_freed(self, chunks: Iterable[int]) -> list[int]:
        """Every chunk of the pool was given up at once (a reset): those that may be reused now, in the order given."""
        self._reusable.clear()
        return self.free(chunks)

    @property
    def held(self) -> Collection[int]:
        """Chunks that may still be written, whoever owns them."""
        return self._holds.keys()

    @property
    def parked(self) -> int:
        """Freed chunks that wait for their release: what the pool is short of."""
        return len(self._parked)
