# SPDX-License-Identifier: Apache-2.0
"""Memory of failed requests, one per worker, shared by all requests.

    CLOSED --threshold worker errors in a row--> OPEN --pause over--> HALF_OPEN --ok--> CLOSED
                                                  ^                      |
                                                  +------ error ---------+   the pause doubles

Only worker errors count, and only a request that was served heals. A 4xx is the client's fault: it
comes from the HTTP front, which may well live while its engine does not. 408 and 429 say busy, and a
client that went away says nothing. In HALF_OPEN one
request at a time is let through; an offer that nobody reports on lapses after the shortest pause, so
a request that was lost cannot lock the worker out.

Pure: the time is an argument (seconds of one monotonic clock).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from router.request import Outcome


class BreakerState(enum.Enum):
    """Whether requests may go to the worker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerMemory(NamedTuple):
    """What a breaker remembers; the fields are those of ``Breaker``."""

    consecutive_failures: int
    pause_s: float
    retry_at_s: float
    trial: bool
    busy_count: int


@dataclass(slots=True)
class Breaker:
    """Failure memory of one worker. Not thread-safe: one event loop owns it. Every call is O(1)."""

    failure_threshold: int
    backoff_min_s: float
    backoff_max_s: float
    consecutive_failures: int = 0
    pause_s: float = 0.0
    """Length of the current or latest pause; 0 when the worker is trusted."""
    retry_at_s: float = 0.0
    """No request before this time, unless CLOSED."""
    trial: bool = False
    """One request was let through in HALF_OPEN and has not been reported."""
    busy_count: int = 0
    """408 and 429 answers, for display."""

    def state(self, now_s: float) -> BreakerState:
        """The state at ``now_s``; does not change anything."""
        if not self.pause_s:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self.retry_at_s else BreakerState.HALF_OPEN

    def admit(self, now_s: float) -> bool:
        """Whether one more request may be sent; in HALF_OPEN the answer is yes once per lapse."""
        state = self.state(now_s)
        if state is BreakerState.HALF_OPEN:
            self.trial = True
            self.retry_at_s = now_s + self.backoff_min_s
        return state is not BreakerState.OPEN

    def record(self, outcome: Outcome, now_s: float) -> None:
        """Learn how one request ended."""
        if outcome is Outcome.WORKER_ERROR:
            self._fail(now_s)
        elif outcome is Outcome.BUSY:
            self.busy_count += 1
        elif outcome is Outcome.OK:
            self.reset()

    def reset(self) -> None:
        """Trust the worker again: it served a request, or it is a new process."""
        self.consecutive_failures = 0
        self.pause_s = 0.0
        self.retry_at_s = 0.0
        self.trial = False

    def memory(self) -> BreakerMemory:
        """What to give to ``recall`` of another, which then is as this one."""
        return BreakerMemory(
            self.consecutive_failures, self.pause_s, self.retry_at_s, self.trial, self.busy_count
        )

    def recall(self, memory: BreakerMemory) -> None:
        """Be as another one was, in whatever process; monotonic clocks of one host are one clock."""
        self.consecutive_failures, self.pause_s, self.retry_at_s, self.trial, self.busy_count = memory

    def _fail(self, now_s: float) -> None:
        self.consecutive_failures += 1
        if self.consecutive_failures < self.failure_threshold:
            return
        # Requests that were under way when the pause began end in it: they do not lengthen it.
        if self.pause_s and now_s < self.retry_at_s and not self.trial:
            return
        self.trial = False
        doubled = self.pause_s * 2 if self.pause_s else self.backoff_min_s
        self.pause_s = min(self.backoff_max_s, doubled)
        self.retry_at_s = now_s + self.pause_s
