# SPDX-License-Identifier: Apache-2.0
"""What a stored block is worth, and how that is kept in its file's modification time. Pure.

The worth of a block is the sum over its uses of the seconds that rebuilding it would have taken, each halved for every
half-life since that use. At a use at time t with weight w:

    worth = worth * 2 ** -((t - last_use) / half_life) + w

The half-life is that of the directory (`Pace`), not of a clock on the wall: with one that is long beside the time in which
as much is written as fits, blocks that were used twice long ago keep out everything new. Worths fade alike, so their order changes only with uses, and

    score = log2(worth / bytes) + last_use / half_life

orders blocks without a clock, equally in every worker. Of equal blocks the one deeper in its prompt goes first: it is
of no use without those before it.

A file's modification time carries both, so that a restart and other workers know them without a journal:

    seconds      of the last use
    nanoseconds  (q * 1000 + depth) * 100, q = (log2(worth) + 32) * 128 rounded, in 0..9999; depth in 0..999

A file system that keeps whole seconds only, or ticks coarser than 100 ns, loses worth and depth, never the order of last uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = 128
_OFFSET = 32
_HIGHEST = 9999
_DEEPEST = 999
_TICK_NS = 100
_SECOND_NS = 10**9

SMALLEST_WORTH = 2.0**-_OFFSET
PINNED_FACTOR = 64.0
"""A block of a prefix that the router asks to pin weighs as so many."""


@dataclass(frozen=True, slots=True)
class Use:
    """The last use of a block, and its worth at that moment."""

    last_use_s: int
    """Seconds since the epoch."""
    worth: float
    """Seconds of recomputation."""
    depth: int
    """Blocks before it in its prompt, as far as known."""

    def again(self, now_s: float, weight_s: float, half_life_s: float) -> Use:
        """After another use."""
        now = max(int(now_s), self.last_use_s)
        faded = self.worth * 2.0 ** -((now - self.last_use_s) / half_life_s)
        return Use(now, faded + weight_s, self.depth)

    def score(self, size_bytes: int, half_life_s: float) -> float:
        return math.log2(max(self.worth, SMALLEST_WORTH) / max(size_bytes, 1)) + self.last_use_s / half_life_s

    def to_mtime_ns(self) -> int:
        steps = round((math.log2(max(self.worth, SMALLEST_WORTH)) + _OFFSET) * _STEPS)
        field = min(max(steps, 0), _HIGHEST) * (_DEEPEST + 1) + min(max(self.depth, 0), _DEEPEST)
        return self.last_use_s * _SECOND_NS + field * _TICK_NS

    @classmethod
    def from_mtime_ns(cls, mtime_ns: int) -> Use:
        seconds, rest_ns = divmod(mtime_ns, _SECOND_NS)
        steps, depth = divmod(rest_ns // _TICK_NS, _DEEPEST + 1)
        return cls(seconds, 2.0 ** (steps / _STEPS - _OFFSET), depth)


@dataclass(frozen=True, slots=True)
class Weight:
    """What one use of a block counts, and where in its prompt the block lies."""

    rebuild_s: float
    depth: int = 0


def weights_of(
    depths: Sequence[int], rebuild_s: float, *, expected_uses: float = 0.0, pinned_blocks: int = 0
) -> list[Weight]:
    """The weights of blocks that are stored now: `rebuild_s` each, times itself and the uses that the router expects."""
    plain = rebuild_s * (1.0 + expected_uses)
    return [Weight(plain * (PINNED_FACTOR if depth < pinned_blocks else 1.0), depth) for depth in depths]


class Pace:
    """The half-life, from how fast the directory turns over. Pure; not thread-safe.

    On the Mooncake traces (conversation at 1/4 and 1/10 of the blocks, synthetic at 1/4) half a turnover has 0.2 to 2.8 %
    more hits than LRU; a fixed half-life of a day loses up to 30 %.
    """

    def __init__(self, capacity_bytes: int, turnovers: float, most_s: float) -> None:
        """`turnovers` of the capacity are one half-life, `most_s` at most; 0 turnovers: `most_s` always."""
        self.half_life_s = most_s
        self._capacity_bytes = capacity_bytes
        self._turnovers = turnovers
        self._most_s = most_s
        self._began: tuple[float, int] | None = None

    def note(self, now_s: float, written_bytes: int) -> bool:
        """All that was ever written, at this moment; True if the half-life is another now."""
        if not self._turnovers:
            return False
        if self._began is None or written_bytes < self._began[1]:
            self._began = now_s, written_bytes
        grown = written_bytes - self._began[1]
        if grown < self._capacity_bytes / 8:
            return False
        turnover_s = self._capacity_bytes * max(now_s - self._began[0], 0.0) / grown
        self._began = now_s, written_bytes
        half_life_s = min(max(turnover_s * self._turnovers, 1.0), self._most_s)
        if 0.8 < half_life_s / self.half_life_s < 1.25:
            return False
        self.half_life_s = half_life_s
        return True
