# SPDX-License-Identifier: Apache-2.0
"""Pulls, the transfers that carry them, peers, and generations of agents: the values whose state machine.py moves.

A pull is cut where it is longer than a part, and short pulls of one peer that wait together are joined, so a
transfer carries a share of each of one or more pulls.

Share:       under way -> over                       (held: its pull failed while it was under way)
Transfer:    posted -> over                          (one handle of the library)
Job:         OPEN -> ARRIVED -> handed out as Pulled, or OPEN/ARRIVED -> failed
Generation:  current -> retired -> destroyed         (destroyed only without shares of open pulls)

Those of which every pull has one are structs of msgspec, which are made in a tenth of the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from .agent import PeerOffer, PullAgent
from .events import JobId


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
    """Transfers with a handle, those of failed pulls included."""
    waiting: deque[Job] = field(default_factory=deque)
    """Pulls with blocks that were not posted; ended ones are dropped when their turn comes."""
    boot_id: str = field(init=False)
    blocks: int = field(init=False)
    """Of its region."""

    def __post_init__(self) -> None:
        self.boot_id = self.offer.boot_id
        self.blocks = self.offer.region.blocks

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
    """Boot id of each peer that was added -> transfers posted to it."""
    leaving: set[str] = field(default_factory=set)
    """Boot ids to remove from the agent once no transfer of theirs is left."""
    transfers: dict[Transfer, None] = field(default_factory=dict)
    """Posted and not over, in order of posting."""
    retired: bool = False
    next_close_s: float = 0.0

    @property
    def serves_open_jobs(self) -> bool:
        return any(transfer.wanted for transfer in self.transfers)


class Transfer(msgspec.Struct, eq=False):
    """One transfer of the library, under way."""

    peer: Peer
    generation: Generation
    handle: int
    shares: list[Share]
    wanted: int
    """How many of its shares belong to open pulls."""
    unknown: bool = False
    """Failed without telling whether it is over: only the end of its agent settles that."""
    settled_s: float | None = None
    """When its connection's failure will have settled."""
    failed_s: float = 0.0
    """When the first of its pulls failed."""
    next_check_s: float = 0.0


class Share(msgspec.Struct, eq=False):
    """The blocks of one pull in one transfer."""

    job: Job
    destination: list[int]
    transfer: Transfer | None = None
    """While it is under way."""
    over_round: int = 0
    """In which round of the machine it ended well."""
    held: bool = False
    """In quarantine."""


class Job(msgspec.Struct, eq=False, gc=False):
    """One pull. The collector of cycles does not look at it: it is in none once it is over."""

    job_id: JobId
    peer: Peer
    submitted_s: float
    deadline_s: float
    source: list[int]
    destination: list[int]
    wanted: set[int]
    """The blocks of `destination`."""
    left: int
    """How many of them have not arrived."""
    next_block: int = 0
    """Where in the list the blocks begin that were not posted."""
    open: bool = True
    first_post_s: float | None = None
    """When a transfer that did not end at once was first begun."""
    shares: list[Share] | None = None
    """None while there are none; a pull that is copied whole inside its post never has any."""

    @property
    def has_waiting(self) -> bool:
        return self.open and self.next_block < len(self.destination)

    def take_share(self, part_blocks: int) -> Share:
        """Its next blocks, which are posted now."""
        end = min(self.next_block + part_blocks, len(self.destination))
        share = Share(self, self.destination[self.next_block : end])
        self.next_block = end
        if self.shares is None:
            self.shares = []
        self.shares.append(share)
        return share
