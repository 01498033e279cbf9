# SPDX-License-Identifier: Apache-2.0
"""Open pulls and how each of them ends, once: which of its blocks are good, free, or in quarantine."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .events import Event, FailReason, JobId, Pulled, PullFailed
from .jobs import Job, Part, PartState, Peer
from .ledger import Ledger
from .quarantine import Quarantine


class Outcomes:
    """Open jobs by id, their deadlines, and the events that are not taken yet.

    A part or a job that ended well counts as timely if that was seen in an earlier round, or if it is still before the
    deadline: `take` reads the clock after the agent was asked.
    """

    def __init__(self, ledger: Ledger, quarantine: Quarantine) -> None:
        self._ledger = ledger
        self._quarantine = quarantine
        self._jobs: dict[JobId, Job] = {}
        self._deadlines: list[tuple[float, JobId]] = []
        self._arrived: list[Job] = []
        self._round = 0
        """Grows with every `take`."""
        self.events: list[Event] = []
        self.pulled = self.failed = self.pulled_bytes = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, job_id: JobId) -> Job | None:
        return self._jobs.get(job_id)

    def all(self) -> list[Job]:
        return list(self._jobs.values())

    def of(self, peer: Peer) -> list[Job]:
        """Jobs that need this peer still."""
        return [job for job in self._jobs.values() if job.peer is peer and not job.arrived]

    def opened(self, job: Job) -> None:
        self._jobs[job.job_id] = job
        heapq.heappush(self._deadlines, (job.deadline_s, job.job_id))

    def refused(self, job_id: JobId, reason: FailReason) -> None:
        """A pull that never was open."""
        self.failed += 1
        self.events.append(PullFailed(job_id, reason))

    def part_done(self, part: Part) -> None:
        """All its bytes are there."""
        job = part.job
        job.over_parts += 1
        part.over_round = self._round
        if job.arrived:
            self._arrived.append(job)

    def fail(self, job: Job, reason: FailReason, now_s: float, detail: str = "") -> bool:
        """Ends an open job; whether some of its parts are in quarantine now."""
        job.open = False
        del self._jobs[job.job_id]
        arrived: list[int] = []
        quarantined: list[int] = []
        for part in job.parts:
            if part.state is PartState.POSTED:
                self._quarantine.hold(part, now_s)
                quarantined.extend(part.destination)
                continue
            self._ledger.give_back(part.destination)
            timely = now_s < job.deadline_s or part.over_round < self._round
            if part.state is PartState.OVER and timely:
                arrived.extend(part.destination)
            part.state = PartState.OVER
        job.parts = []
        self.failed += 1
        self.events.append(PullFailed(job.job_id, reason, tuple(arrived), tuple(quarantined), detail))
        return bool(quarantined)

    def expired(self, now_s: float) -> Iterator[Job]:
        """Jobs whose deadline has come; whoever asks fails each."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            job = self._jobs.get(heapq.heappop(self._deadlines)[1])
            if job is not None:
                yield job

    def overdue(self, now_s: float) -> bool:
        """Whether `expired` has something to yield. O(1)."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now_s

    def hand_out(self, now_s: float) -> None:
        """Jobs whose last part has ended are Pulled, if their deadline has not come."""
        for job in self._arrived:
            if job.open and now_s < job.deadline_s:
                self._pulled(job, now_s)
        self._arrived.clear()

    def take(self) -> list[Event]:
        """The events so far."""
        self._tidy()
        self._round += 1
        events, self.events = self.events, []
        return events

    @property
    def told(self) -> bool:
        """Whether there is something to take."""
        return bool(self.events or self._arrived)

    def next_deadline_s(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def _tidy(self) -> None:
        while self._deadlines and self._deadlines[0][1] not in self._jobs:
            heapq.heappop(self._deadlines)

    def _pulled(self, job: Job, now_s: float) -> None:
        job.open = False
        del self._jobs[job.job_id]
        size_bytes = 0
        for part in job.parts:
            self._ledger.give_back(part.destination)
            size_bytes += len(part.destination) * job.block_bytes
        job.parts = []  # no cycles: the engine's process may hardly ever collect garbage
        self.pulled += 1
        self.pulled_bytes += size_bytes
        self.events.append(Pulled(job.job_id, size_bytes, now_s - job.submitted_s))
