# SPDX-License-Identifier: Apache-2.0
"""Learns which prompts have tails that nobody reads again, so that only their shared beginning is offloaded. Pure.

Requests of one kind (tenant, model, call) that share a system prompt and nothing else find all the same number of
leading tokens somewhere in the fleet; a request that goes on where another ended finds more. So where nearly all
find the same number and hardly any finds more, what lies behind it is private: offloading it costs bandwidth and
drives blocks out of RAM that would be read again. A few requests are left as they are, so that a change is seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from random import Random

LEAST_REQUESTS = 200
"""Before anything is concluded."""
LARGEST_SHARE_READ_AGAIN = 0.01
LEAST_SHARE_ALIKE = 0.5
LEFT_ALONE = 1 / 16
_MEMORY = 2000
_MOST_LENGTHS = 64
_MOST_KINDS = 1024


class _Lengths:
    """How many leading tokens requests of one kind found, newer ones counting more."""

    __slots__ = ("total", "weights")

    def __init__(self) -> None:
        self.total = 0.0
        self.weights: dict[int, float] = {}

    def add(self, tokens: int) -> None:
        self.weights[tokens] = self.weights.get(tokens, 0.0) + 1.0
        self.total += 1.0
        if self.total > _MEMORY or len(self.weights) > _MOST_LENGTHS:
            halved = {length: weight / 2 for length, weight in self.weights.items() if weight > 0.5}
            kept = sorted(halved, key=lambda length: -halved[length])[: _MOST_LENGTHS // 2]
            self.weights = {length: halved[length] for length in kept}
            self.total /= 2

    def shared(self) -> int | None:
        """Tokens that are shared, where what follows them is read again by hardly anyone."""
        if self.total < LEAST_REQUESTS:
            return None
        most = max(self.weights, key=lambda length: self.weights[length])
        shorter = sum(weight for length, weight in self.weights.items() if length < most)
        # What was dropped as rare may have been longer.
        longer = self.total - shorter - self.weights[most]
        alike = self.weights[most] >= LEAST_SHARE_ALIKE * self.total
        return most if alike and longer < LARGEST_SHARE_READ_AGAIN * self.total else None


class TailReuse:
    """By kind of request. ``note`` and ``shared_tokens`` cost O(64) at most; memory is bounded."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, _Lengths] = OrderedDict()

    def note(self, kind: Hashable, known_tokens: int) -> None:
        """A request of that kind came, and the fleet held that many of its leading tokens, wherever."""
        lengths = self._kinds.pop(kind, None) or _Lengths()
        self._kinds[kind] = lengths
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        lengths.add(known_tokens)

    def shared_by_all(self, kind: Hashable) -> int | None:
        """Leading tokens that requests of that kind share, where hardly anyone reads what follows; None: unknown."""
        lengths = self._kinds.get(kind)
        return lengths.shared() if lengths is not None else None

    def shared_tokens(self, kind: Hashable, random: Random) -> int | None:
        """Leading tokens worth offloading; None: all of them, as far as is known."""
        shared = self.shared_by_all(kind)
        return None if shared is None or random.random() < LEFT_ALONE else shared
