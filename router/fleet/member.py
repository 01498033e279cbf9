# SPDX-License-Identifier: Apache-2.0
"""One worker as the fleet knows it: what polls and requests say of it, and the health that follows. No I/O."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace

from router.fleet.breaker import Breaker, BreakerState
from router.fleet.poller import PollResult, Reach
from router.fleet.worker import Health, WorkerStatus

_log = logging.getLogger(__name__)

_SAME_START_S = 1.0
"""Two readings of a process's start time that differ by less are the same process."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a poll brought that others must hear of."""

    joined: bool
    """It answers from now on and did not before."""
    new_process_start_s: float | None
    """The start time of a process that was not known before."""


@dataclass(slots=True)
class Member:
    """A worker's status with what it is made of; every change ends in :meth:`refresh`."""

    status: WorkerStatus
    breaker: Breaker
    draining: bool = False
    ready: bool = True
    """What discovery says; True where nobody does."""
    reach: Reach | None = None
    silent_polls: int = 0
    answers: bool = False
    polled: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    _facts: object = None
    """What lists of workers were made of."""

    def apply(self, result: PollResult, now_s: float, failure_threshold: int) -> Change:
        """Take over one poll; ``refresh`` comes after it."""
        joined = self._apply_reach(result, failure_threshold)
        self.status.last_error = result.error
        if result.models is not None:
            self.status.models = dict(result.models)
        if result.event_ranks and not self.status.spec.ranks_given:
            self.status.spec = replace(self.status.spec, ranks=result.event_ranks)
        new_process = self._apply_metrics(result, now_s)
        return Change(joined, self.status.process_start_time_s if new_process else None)

    def refresh(self, now_s: float) -> bool:
        """Derive the health; whether anything that planning looks at has changed."""
        status, breaker = self.status, self.breaker
        status.consecutive_failures = breaker.consecutive_failures
        status.retry_at_s = breaker.retry_at_s
        status.answering = self.answers
        status.health = self._health(now_s)
        facts = (
            status.spec,
            status.models,
            status.block_size_tokens,
            status.hbm_blocks,
            status.cache_dtype,
            status.asleep,
            status.answering,
            status.health,
            self.draining,
            self.ready,
            bool(breaker.pause_s),
        )
        changed = facts != self._facts
        self._facts = facts
        return changed

    def _health(self, now_s: float) -> Health:
        if self.draining:
            return Health.DRAINING
        if self.reach is None:
            return Health.UNKNOWN
        if not self.answers:
            return Health.UNHEALTHY
        if not self.ready:
            return Health.NOT_READY
        if self.breaker.state(now_s) is not BreakerState.CLOSED:
            return Health.BACKOFF
        return Health.HEALTHY

    def _apply_reach(self, result: PollResult, failure_threshold: int) -> bool:
        before = self.answers
        self.silent_polls = self.silent_polls + 1 if result.reach is Reach.SILENT else 0
        if result.reach is Reach.SILENT:
            # A loaded worker misses a poll now and then; a refused connection leaves no doubt.
            self.answers = before and self.silent_polls < failure_threshold
        else:
            self.answers = result.reach is Reach.OK
        self.reach = result.reach
        if before and not self.answers:
            _log.warning("worker %s left: %s", self.status.spec.id, result.error)
        return self.answers and not before and result.reach is Reach.OK

    def _apply_metrics(self, result: PollResult, now_s: float) -> bool:
        """Take over the gauges; whether the process was not known before."""
        metrics, status = result.metrics, self.status
        if metrics is None:
            return False
        if metrics.running is not None or metrics.waiting is not None:
            status.running = metrics.running or 0
            status.waiting = metrics.waiting or 0
            status.sampled_at_s = now_s
        if metrics.kv_cache_usage is not None:
            status.kv_cache_usage = metrics.kv_cache_usage
        if metrics.block_size_tokens is not None:
            status.block_size_tokens = metrics.block_size_tokens
        if metrics.cache_dtype is not None:
            status.cache_dtype = metrics.cache_dtype
        if metrics.hbm_blocks is not None:
            status.hbm_blocks = metrics.hbm_blocks
        if metrics.kv_bytes_per_token is not None:
            status.kv_bytes_per_token = metrics.kv_bytes_per_token
        if metrics.asleep is not None:
            status.asleep = metrics.asleep
        old, new = status.process_start_time_s, metrics.process_start_time_s
        if new is None or (old is not None and abs(old - new) < _SAME_START_S):
            return False
        if old is not None:
            self.breaker.reset()  # the failures were those of a process that is gone
        status.process_start_time_s = new
        return True
