# SPDX-License-Identifier: Apache-2.0
"""Whose part is begun next: peers take turns, and the pulls of a peer do, so that a long pull holds up no short one."""

from __future__ import annotations

from collections.abc import Callable

from .jobs import Generation, Job, Peer


class Turns:
    """Peers with parts that were not posted. Costs O(peers) per round, O(1) otherwise."""

    def __init__(self, depth: int, round_blocks: int) -> None:
        """At most `depth` parts per peer are under way, those of failed pulls included. A round begins at most as many,
        and ends once parts that were copied inside their post make up `round_blocks`.
        """
        self._depth = depth
        self._round_blocks = round_blocks
        self._queued: dict[Peer, None] = {}
        """The next one first."""

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._queued)

    def add(self, job: Job) -> None:
        """Its parts wait from now on."""
        job.peer.waiting.append(job)
        self._queued[job.peer] = None

    def drop(self, peer: Peer) -> None:
        """Nothing of this peer's waits any more."""
        peer.waiting.clear()
        self._queued.pop(peer, None)

    def can_begin(self) -> bool:
        """Whether some peer has room for another part."""
        return any(peer.posted < self._depth for peer in self._queued)

    def begin(self, generation: Generation, post: Callable[[Job, Generation], int]) -> bool:
        """One round; whether anything was begun. `post` posts the job's next part and returns the blocks that were
        copied meanwhile.
        """
        begun = inline_blocks = 0
        for peer in list(self._queued):
            while (
                begun < self._depth
                and inline_blocks < self._round_blocks
                and self._may_begin(peer, generation)
            ):
                job = peer.waiting.popleft()
                if job.has_waiting:
                    inline_blocks += post(job, generation)
                    begun += 1
                if job.has_waiting:
                    peer.waiting.append(job)
            self._queued.pop(peer, None)
            if peer.waiting:
                self._queued[peer] = None
            if begun == self._depth or inline_blocks >= self._round_blocks:
                break
        return begun > 0

    def _may_begin(self, peer: Peer, generation: Generation) -> bool:
        may = peer.posted < self._depth and peer.boot_id not in generation.leaving
        return may and bool(peer.waiting)
