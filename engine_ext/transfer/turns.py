# SPDX-License-Identifier: Apache-2.0
"""Whose blocks are next: peers take turns, and the pulls of a peer do, so that a long pull holds up no short one.

Short pulls that wait for the same peer share a transfer: what a transfer costs beside its bytes is paid once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .jobs import Generation, Job, Peer

Post = Callable[[Peer, list[Job], Generation, float], int]


class Turns:
    """Peers with blocks that were not posted. Costs O(peers + pulls begun) per round, O(1) otherwise."""

    def __init__(self, depth: int, part_blocks: int, join_blocks: int) -> None:
        """At most `depth` transfers per peer are under way, those of failed pulls included. A round begins at most as
        many, and ends once transfers that were copied inside their post make up a part, `part_blocks`. Pulls are
        joined up to `join_blocks`.
        """
        self._depth = depth
        self._part_blocks = part_blocks
        self._join_blocks = min(join_blocks, part_blocks)
        self.queued: dict[Peer, None] = {}
        """Those for whom something waits, the next one first."""

    def add(self, job: Job) -> None:
        """Its blocks wait from now on."""
        job.peer.waiting.append(job)
        self.queued[job.peer] = None

    def drop(self, peer: Peer) -> None:
        """Nothing of this peer's waits any more."""
        peer.waiting.clear()
        self.queued.pop(peer, None)

    def can_begin(self) -> bool:
        """Whether some peer has room for another transfer."""
        return any(peer.posted < self._depth for peer in self.queued)

    def begin(self, generation: Generation, post: Post, now_s: float) -> bool:
        """One round; whether anything was begun. `post` posts the next part of each of the pulls it is given in one
        transfer, and returns the blocks that were copied meanwhile.
        """
        begun = inline_blocks = 0
        for peer in list(self.queued):
            while (
                begun < self._depth
                and inline_blocks < self._part_blocks
                and self._may_begin(peer, generation)
            ):
                jobs = self._next(peer.waiting)
                if jobs:
                    inline_blocks += post(peer, jobs, generation, now_s)
                    begun += 1
                if jobs and jobs[-1].has_waiting:  # the only one that may have more
                    peer.waiting.append(jobs[-1])
            self.queued.pop(peer, None)
            if peer.waiting:
                self.queued[peer] = None
            if begun == self._depth or inline_blocks >= self._part_blocks:
                break
        return begun > 0

    def _next(self, waiting: deque[Job]) -> list[Job]:
        """The pulls of the next transfer: the first one that is open, and those behind it that fit beside it whole."""
        jobs: list[Job] = []
        blocks = 0
        while waiting:
            job = waiting[0]
            if job.open:
                left = len(job.destination) - job.next_block
                if jobs and blocks + left > self._join_blocks:
                    break
                blocks += left
                jobs.append(job)
            waiting.popleft()
            if blocks >= self._join_blocks:
                break
        return jobs

    def _may_begin(self, peer: Peer, generation: Generation) -> bool:
        may = peer.posted < self._depth and peer.boot_id not in generation.leaving
        return may and bool(peer.waiting)
