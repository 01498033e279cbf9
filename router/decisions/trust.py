# SPDX-License-Identifier: Apache-2.0
"""How far the map of a worker is to be believed. Pure: time is an argument.

    trust = (kept + G) / (promised + G), and never below ``LEAST``

``promised`` and ``kept`` are the cached tokens that plans counted on and those of them that were there. Both are
forgotten as more is promised (by half over 430,000 tokens) and as time passes (by half in three and a half minutes),
so a worker that nothing is planned on is believed again in the end. ``G`` tokens of good faith see to it that one
stale plan costs little: 8,000 tokens promised in vain lower a trust of 1 to 0.8.

Blocks evicted without an event, lost events and a process that restarted unseen all show here, whatever their cause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST = 0.05
_GOOD_FAITH_TOKENS = 32_768.0
_MEMORY_TOKENS = 622_592.0  # nineteen times the good faith: a map that is never right ends at LEAST
_MEMORY_S = 300.0


@dataclass(slots=True)
class _Record:
    promised: float = 0.0
    kept: float = 0.0
    at_s: float = 0.0


_CLEAN = _Record()


class Trust:
    """By worker; those that never disappointed are not kept. All operations are O(1)."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._watches: list[set[str]] = []

    def observe(self, worker: str, promised_tokens: int, kept_tokens: int, now_s: float) -> None:
        """Of the tokens that a plan counted on, those that were there; ``now_s`` does not go back."""
        if promised_tokens <= 0:
            return
        kept_tokens = min(max(kept_tokens, 0), promised_tokens)
        record = self._records.get(worker)
        if record is None:
            if kept_tokens == promised_tokens:
                return
            record = self._records[worker] = _Record(at_s=now_s)
        left = math.exp(-(now_s - record.at_s) / _MEMORY_S - promised_tokens / _MEMORY_TOKENS)
        record.promised = record.promised * left + promised_tokens
        record.kept = record.kept * left + kept_tokens
        record.at_s = now_s
        self._changed(worker)

    def correct(self, worker: str, before: tuple[int, int], after: tuple[int, int], now_s: float) -> None:
        """What was observed a moment ago as ``before`` (promised, kept) is known better now."""
        record = self._records.get(worker)
        if record is None:  # nothing had been held against it
            self.observe(worker, *after, now_s)
            return
        record.promised = max(record.promised + after[0] - before[0], 0.0)
        record.kept = min(max(record.kept + after[1] - before[1], 0.0), record.promised)
        self._changed(worker)

    def of(self, worker: str, now_s: float) -> float:
        """Share of the blocks promised at ``worker`` to be expected there, from ``LEAST`` to 1."""
        record = self._records.get(worker)
        if record is None:
            return 1.0
        left = math.exp(-max(now_s - record.at_s, 0.0) / _MEMORY_S)
        share = (record.kept * left + _GOOD_FAITH_TOKENS) / (record.promised * left + _GOOD_FAITH_TOKENS)
        return max(share, LEAST)

    def forget(self, worker: str) -> None:
        """It left the fleet, or is another process: what it promises now is another map."""
        if self._records.pop(worker, None) is not None:
            self._changed(worker)

    @property
    def formula(self) -> tuple[float, float, float]:
        """(tokens of good faith, seconds of memory, least trust)."""
        return _GOOD_FAITH_TOKENS, _MEMORY_S, LEAST

    def watch(self) -> set[str]:
        """Workers whose record has changed since; who asked for the set takes out those it has read."""
        watch = set(self._records)
        self._watches.append(watch)
        return watch

    def record(self, worker: str) -> tuple[float, float, float]:
        """(tokens promised, tokens kept, when) of the formula; zeros where nothing is held against the worker."""
        record = self._records.get(worker, _CLEAN)
        return record.promised, record.kept, record.at_s

    def set_record(self, worker: str, promised: float, kept: float, at_s: float) -> None:
        """Take over what another process has observed, as its ``record`` tells it."""
        if promised:
            self._records[worker] = _Record(promised, kept, at_s)
        else:
            self._records.pop(worker, None)
        self._changed(worker)

    def _changed(self, worker: str) -> None:
        for watch in self._watches:
            watch.add(worker)


def blame(lost_tokens: int, pulled_tokens: int) -> tuple[int, int]:
    """(of the source, of the worker) of ``lost_tokens``, of which ``pulled_tokens`` were to be pulled.

    The engine reports one total. A pull can fail in more ways than a block can vanish, so its source comes first.
    """
    of_source = min(lost_tokens, pulled_tokens)
    return of_source, lost_tokens - of_source
