# SPDX-License-Identifier: Apache-2.0
"""What waits for one router, and what an answer of it means. Pure: time and chance are arguments."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from http import HTTPStatus
from random import Random

from engine_ext.vllm.reports.messages import BOUNDS, encode_batch

BATCH_BYTES = BOUNDS.batch_bytes // 2
BATCH_REPORTS = BOUNDS.reports // 4
_BACKOFF_MIN_S = 0.5
_BACKOFF_MAX_S = 30.0
_HOPELESS = {HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY}


class Answered(enum.Enum):
    """What became of a batch."""

    TAKEN = "taken"
    LATER = "later"
    """The router is away, refuses us, or is overloaded: the batch is sent again."""
    NEVER = "never"
    """The router does not understand it, and never will."""


@dataclass(slots=True)
class Mailing:
    """The queue of one router. Reports are encoded; a batch is taken off only once it is answered."""

    capacity: int
    random: Random
    dropped: int = 0
    """Lost since the engine began: too many waited, or the router would not have them."""
    sent: int = 0
    failures: int = 0
    """Calls in a row that were to be repeated."""
    _waiting: deque[bytes] = field(default_factory=deque)
    _under_way: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    def add(self, report: bytes) -> None:
        """The oldest that is not under way is lost when too many wait."""
        if len(self) >= self.capacity:
            self.dropped += 1
            if not self._waiting:
                return
            self._waiting.popleft()
        self._waiting.append(report)

    def batch(self, engine: str, block_tokens: int) -> bytes | None:
        """The body of the next call, the one that failed first; None when nothing waits. At least one report."""
        if not self._under_way:
            size = 0
            while self._waiting and len(self._under_way) < BATCH_REPORTS:
                size += len(self._waiting[0])
                if self._under_way and size > BATCH_BYTES:
                    break
                self._under_way.append(self._waiting.popleft())
        if not self._under_way:
            return None
        return encode_batch(engine, block_tokens, self._under_way, self.dropped)

    def answered(self, status: int | None) -> Answered:
        """`status` of the answer, None where there was none."""
        if status is not None and 200 <= status < 300:
            self.sent += len(self._under_way)
            self.failures = 0
            self._under_way = []
            return Answered.TAKEN
        if status in _HOPELESS:
            self.dropped += len(self._under_way)
            self.failures = 0
            self._under_way = []
            return Answered.NEVER
        self.failures += 1
        return Answered.LATER

    def pause_s(self) -> float:
        """Before the next call: nothing after a success, else longer with each failure, and never the same twice."""
        if not self.failures:
            return 0.0
        longest = min(_BACKOFF_MIN_S * 2.0 ** min(self.failures - 1, 16), _BACKOFF_MAX_S)
        return longest * self.random.uniform(0.5, 1.0)
