# SPDX-License-Identifier: Apache-2.0
"""What the owner of a PullThread sees: its own deadlines, whatever the thread is doing.

The thread may be inside the library (a copy, a wire-up) when a deadline passes. The pull fails here at once, with all
of its blocks in quarantine; when the thread's own verdict comes, it says which of them are free by then.
"""

from __future__ import annotations

import heapq

from .events import Event, FailReason, JobId, Proof, Pulled, PullFailed, Released


class Mailbox:
    """Pure bookkeeping; not thread-safe. Deadlines cost O(log jobs), events O(blocks they name)."""

    def __init__(self) -> None:
        self._open: dict[JobId, list[int]] = {}
        self._failed_here: dict[JobId, list[int]] = {}
        self._deadlines: list[tuple[float, JobId]] = []

    def __len__(self) -> int:
        """Pulls of which the thread has not said how they ended."""
        return len(self._open) + len(self._failed_here)

    def opened(self, job_id: JobId, destination: list[int], deadline_s: float) -> None:
        """A pull was handed to the thread."""
        self._open[job_id] = destination
        heapq.heappush(self._deadlines, (deadline_s, job_id))

    def aborted(self, job_id: JobId) -> list[Event]:
        """The owner gives a pull up: it fails at once."""
        return self._fail(job_id, FailReason.ABORTED)

    def take(self, events: list[Event], now_s: float) -> list[Event]:
        """What the owner is told, given what the thread said."""
        told: list[Event] = []
        for event in events:
            told.extend(self.heard(event))
        return told + self.expired(now_s)

    def expired(self, now_s: float) -> list[Event]:
        """Pulls past their deadline fail."""
        told: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            told.extend(self._fail(heapq.heappop(self._deadlines)[1], FailReason.DEADLINE))
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heapq.heappop(self._deadlines)
        return told

    def thread_ended(self) -> list[Event]:
        """Nobody will say how the open pulls ended: they fail, and their blocks stay in quarantine."""
        return [event for job_id in list(self._open) for event in self._fail(job_id, FailReason.CLOSED)]

    def heard(self, event: Event) -> list[Event]:
        """What one word of the thread's means to the owner."""
        if not isinstance(event, Pulled | PullFailed):
            return [event]
        self._open.pop(event.job_id, None)
        destination = self._failed_here.pop(event.job_id, None)
        if destination is None:
            return [event]
        held = set() if isinstance(event, Pulled) else set(event.quarantined)
        free = tuple(block for block in destination if block not in held)
        return [Released(event.job_id, free, Proof.FINISHED)] if free else []

    def _fail(self, job_id: JobId, reason: FailReason) -> list[Event]:
        destination = self._open.pop(job_id, None)
        if destination is None:
            return []
        self._failed_here[job_id] = destination
        return [PullFailed(job_id, reason, quarantined=tuple(destination))]
