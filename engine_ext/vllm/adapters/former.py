# SPDX-License-Identifier: Apache-2.0
"""Which stored blocks belong to which weights of an adapter, so that those of former weights can be given up.

No request finds them any more, and whoever follows the events (a router) would count on them until they are evicted:
it knows an adapter by its name alone. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Place = TypeVar("Place", bound=Hashable)
Content = TypeVar("Content")


class Weights(NamedTuple):
    """Of one adapter at one time: two are equal only if their blocks have the same hashes."""

    name: str
    path: str
    word: str


class AdapterBlocks(Generic[Place, Content]):
    """Places (of HBM, of RAM) that hold blocks of adapters, and what they held when that was noted.

    At most one entry per place. Every operation is O(1), but for `loaded`, which is O(entries).
    """

    def __init__(self) -> None:
        self._held: dict[Place, tuple[Content, Weights]] = {}
        self._now: dict[str, Weights] = {}

    def __len__(self) -> int:
        return len(self._held)

    def note(self, place: Place, content: Content, weights: Weights) -> bool:
        """A block was stored. False: the adapter has other weights by now, so that it is of no use already."""
        if self._now.get(weights.name, weights) != weights:
            self._held.pop(place, None)
            return False
        self._held[place] = (content, weights)
        return True

    def gone(self, place: Place) -> None:
        """It was evicted."""
        self._held.pop(place, None)

    def loaded(self, now: Weights) -> list[tuple[Place, Content]]:
        """An adapter of this name was loaded; what is held of its former weights, and is not noted any more."""
        self._now[now.name] = now
        former = [
            (place, content)
            for place, (content, weights) in self._held.items()
            if weights.name == now.name and weights != now
        ]
        for place, _ in former:
            del self._held[place]
        return former

    def clear(self) -> None:
        """Everything was evicted."""
        self._held.clear()
