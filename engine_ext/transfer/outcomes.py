# SPDX-License-Identifier: Apache-2.0
"""Open pulls and how each of them ends, once: which of its blocks are good, free, or in quarantine."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .events import Event, FailReason, JobId, Pulled, PullFailed
from .jobs import Job, Peer, Share
from .ledger import Ledger
from .quarantine import Quarantine


class Outcomes:
    """Open jobs by id, their deadlines, and the events that are not taken yet.

    A share or a pull that ended well counts as timely if that was seen in an earlier round, or if it is still before the
    deadline: `take` reads the clock after the agent was asked.
    """

    def __init__(self, block_bytes: int, ledger: Ledger, quarantine: Quarantine) -> None:
        self._block_bytes = block_bytes
        self._ledger = ledger
        self._quarantine = quarantine
        self.jobs: dict[JobId, Job] = {}
        """The open ones."""
        self.deadlines: list[tuple[float, JobId]] = []
        """A heap; the first one may be of a pull that has ended since the last `take`."""
        self._arrived: list[Job] = []
        self._round = 0
        """Grows with every `take`."""
        self.events: list[Event] = []
        self.pulled = self.failed = self.pulled_bytes = 0

    def of(self, peer: Peer) -> list[Job]:
        """Jobs that need this peer still."""
        return [job for job in self.jobs.values() if job.peer is peer and job.left]

    def opened(self, job: Job) -> None:
        self.jobs[job.job_id] = job
        heapq.heappush(self.deadlines, (job.deadline_s, job.job_id))

    def refused(self, job_id: JobId, reason: FailReason) -> None:
        """A pull that never was open."""
        self.failed += 1
        self.events.append(PullFailed(job_id, reason))

    def copied(self, jobs: list[Job], part_blocks: int) -> None:
        """The next part of each of these arrived inside its post."""
        for job in jobs:
            left = job.left
            if left <= part_blocks and not job.next_block:
                job.next_block = left
                job.left = 0
                self._arrived.append(job)
            else:
                self.share_done(job.take_share(part_blocks))

    def share_done(self, share: Share) -> None:
        """All its bytes are there."""
        job = share.job
        job.left -= len(share.destination)
        share.transfer = None
        share.over_round = self._round
        if not job.left:
            self._arrived.append(job)

    def fail(self, job: Job, reason: FailReason, now_s: float, detail: str = "") -> bool:
        """Ends an open job; whether some of its blocks are in quarantine now."""
        job.open = False
        del self.jobs[job.job_id]
        timely = now_s < job.deadline_s
        arrived: list[int] = []
        quarantined: list[int] = []
        if job.shares is None and not job.left and timely:
            arrived = job.destination
        for share in job.shares or ():
            if share.transfer is not None:
                self._quarantine.hold(share, share.transfer, now_s)
                quarantined += share.destination
            elif timely or share.over_round < self._round:
                arrived += share.destination
        job.shares = None
        self._ledger.give_back(job.wanted)
        self.failed += 1
        self.events.append(PullFailed(job.job_id, reason, tuple(arrived), tuple(quarantined), detail))
        return bool(quarantined)

    def expired(self, now_s: float) -> Iterator[Job]:
        """Jobs whose deadline has come; whoever asks fails each."""
        while self.deadlines and self.deadlines[0][0] <= now_s:
            job = self.jobs.get(heapq.heappop(self.deadlines)[1])
            if job is not None:
                yield job

    def hand_out(self, now_s: float) -> None:
        """Jobs whose last blocks have arrived are Pulled, if their deadline has not come."""
        arrived_blocks = 0
        events, jobs, ledger = self.events, self.jobs, self._ledger
        for job in self._arrived:
            if job.open and now_s < job.deadline_s:
                job.open = False
                job.shares = None  # no cycles: the engine's process may hardly ever collect garbage
                del jobs[job.job_id]
                ledger.give_back(job.wanted)
                blocks = len(job.destination)
                arrived_blocks += blocks
                self.pulled += 1
                events.append(Pulled(job.job_id, blocks * self._block_bytes, now_s - job.submitted_s))
        self.pulled_bytes += arrived_blocks * self._block_bytes
        self._arrived.clear()

    def take(self) -> list[Event]:
        """The events so far."""
        jobs, deadlines = self.jobs, self.deadlines
        if not jobs:
            deadlines.clear()
        while deadlines and deadlines[0][1] not in jobs:
            heapq.heappop(deadlines)
        self._round += 1
        events, self.events = self.events, []
        return events

    @property
    def told(self) -> bool:
        """Whether there is something to take."""
        return bool(self.events or self._arrived)
