# SPDX-License-Identifier: Apache-2.0
"""Which of our blocks may be written by a transfer: those of open pulls, and those in quarantine."""

from __future__ import annotations

from collections.abc import Iterable


class Ledger:
    """Two disjoint sets of block numbers. Every operation is O(blocks named)."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def open_blocks(self) -> int:
        return len(self._open)

    @property
    def quarantined_blocks(self) -> int:
        return len(self._quarantined)

    def busy(self, blocks: Iterable[int]) -> bool:
        """Whether any of these may still be written by a transfer."""
        blocks = set(blocks)
        return not (self._open.isdisjoint(blocks) and self._quarantined.isdisjoint(blocks))

    def take_if_free(self, blocks: set[int]) -> bool:
        """For an open pull; False: some of them are busy, and nothing has changed."""
        if self._open.isdisjoint(blocks) and self._quarantined.isdisjoint(blocks):
            self._open |= blocks
            return True
        return False

    def give_back(self, blocks: set[int]) -> None:
        """Of an open pull that is over, to whoever owns the region; those that went to quarantine stay there."""
        self._open -= blocks

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Of a pull that failed, with a transfer that is not known to be over."""
        blocks = tuple(blocks)
        self._open.difference_update(blocks)
        self._quarantined.update(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """From quarantine."""
        self._quarantined.difference_update(blocks)
