# SPDX-License-Identifier: Apache-2.0
"""Pulls and their parts, peers, and generations of agents: the values whose state machine.py moves.

Part:        WAITING -> POSTED -> OVER               (a part that was never posted goes straight to OVER)
Job:         OPEN -> ARRIVED -> handed out as Pulled, or OPEN/ARRIVED -> failed
Generation:  current -> retired -> destroyed         (destroyed only without parts of open jobs)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from .agent import PeerOffer, PullAgent
from .events import JobId


class PartState(Enum):
    WAITING = "waiting"
    POSTED = "posted"
    OVER = "over"


@dataclass(slots=True, eq=False)
class Peer:
    """One incarnation of one peer, from its handshake on."""

    address: str
    offer: PeerOffer
    last_sign_s: float
    """When it last connected or ended a transfer well."""
    warm_until_s: float
    silent: bool = False
    lost: bool = False
    """Gone, restarted or forgotten: nothing more is begun with it."""
    posted: int = 0
    """Parts with a handle, those of failed pulls included."""
    waiting: deque[Job] = field(default_factory=deque)
    """Pulls with parts that were not posted; ended ones are dropped when their turn comes."""
    boot_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.boot_id = self.offer.boot_id

    def seen(self, now_s: float) -> None:
        """A transfer from it ended well."""
        self.silent = False
        self.last_sign_s = now_s


@dataclass(slots=True, eq=False)
class Generation:
    """One pull agent, the peers it knows and the transfers it has under way."""

    number: int
    agent: PullAgent
    peers: dict[str, int] = field(default_factory=dict)
    """Boot id of each peer that was added -> parts posted to it."""
    leaving: set[str] = field(default_factory=set)
    """Boot ids to remove from the agent once no part of theirs is left."""
    parts: dict[Part, None] = field(default_factory=dict)
    """Posted and not over, in order of posting."""
    retired: bool = False
    next_close_s: float = 0.0

    @property
    def serves_open_jobs(self) -> bool:
        return any(part.job.open for part in self.parts)


@dataclass(slots=True, eq=False)
class Part:
    """One transfer: some blocks of one job."""

    job: Job
    source: list[int]
    destination: list[int]
    state: PartState = PartState.WAITING
    generation: Generation | None = None
    handle: int = 0
    over_round: int = 0
    """In which round of the machine it ended well."""
    unknown: bool = False
    """Failed without telling whether it is over: only the end of its agent settles that."""
    settled_s: float | None = None
    """When its connection's failure will have settled."""
    failed_s: float = 0.0
    """When its job failed."""
    next_check_s: float = 0.0

    @property
    def posted_on(self) -> Generation:
        """The agent that has its transfer; only of a part that was posted."""
        if self.generation is None:
            raise RuntimeError("this part was never posted")
        return self.generation


@dataclass(slots=True, eq=False)
class Job:
    """One pull."""

    job_id: JobId
    peer: Peer
    submitted_s: float
    deadline_s: float
    block_bytes: int
    parts: list[Part] = field(default_factory=list)
    next_part: int = 0
    """The first part that was not posted."""
    over_parts: int = 0
    open: bool = True
    first_post_s: float | None = None

    @property
    def arrived(self) -> bool:
        return self.over_parts == len(self.parts)

    @property
    def has_waiting(self) -> bool:
        return self.open and self.next_part < len(self.parts)
