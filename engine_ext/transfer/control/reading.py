# SPDX-License-Identifier: Apache-2.0
"""Peers, lookups and pulls as their reader sees them: the values whose state reader.py moves.

Session:  SHUT -> KNOCKING -> OPEN, and from both back to SHUT
Find:     QUEUED (behind a knock) -> ASKED -> LEASED -> over; over from each
Pull:     waiting (for a session) -> under way -> over; back to waiting once
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from engine_ext.transfer.agent import PeerOffer
from engine_ext.transfer.events import FailReason, JobId, PullRequest


class SessionState(Enum):
    SHUT = "shut"
    KNOCKING = "knocking"
    OPEN = "open"


class FindState(Enum):
    QUEUED = "queued"
    ASKED = "asked"
    LEASED = "leased"


class Channel(Protocol):
    """Carries messages to sources. Nothing blocks or raises; what cannot be sent is dropped."""

    def send(self, address: str, data: bytes) -> None:
        """Connects where there is no connection."""
        ...

    def hang_up(self, address: str, *, flush: bool = False) -> None:
        """Closes the connection, with whatever was not sent; `flush` gives that a moment first."""
        ...


class Transfers(Protocol):
    """Moves the bytes: PullThread."""

    def connect(self, address: str, offer: PeerOffer) -> None: ...

    def forget(self, address: str) -> None: ...

    def submit(self, request: PullRequest) -> JobId: ...

    def abort(self, job_id: JobId) -> None: ...


@dataclass(slots=True, eq=False)
class Peer:
    """One address, whoever answers there."""

    address: str
    used_s: float
    state: SessionState = SessionState.SHUT
    offer: PeerOffer | None = None
    """Of the incarnation that admitted us last; kept when the session is shut, for its leases."""
    knock_until_s: float = 0.0
    silent_until_s: float = float("-inf")
    """Not to be knocked at before this."""
    heard_s: float = float("-inf")
    next_renewal_s: float = float("inf")
    renewals: dict[int, float] = field(default_factory=dict)
    """Number of each renewal without an answer -> when it was sent."""
    finds: dict[int, Find] = field(default_factory=dict)
    waiting: dict[int, Pull] = field(default_factory=dict)
    """Pulls to begin once a session with their source's incarnation is open."""

    @property
    def boot_id(self) -> str | None:
        return None if self.offer is None else self.offer.boot_id


@dataclass(slots=True, eq=False)
class Find:
    """One lookup and the lease that came of it."""

    find_id: int
    peer: Peer
    keys: tuple[bytes, ...]
    tenant: str
    began_s: float
    deadline_s: float
    state: FindState = FindState.QUEUED
    boot_id: str = ""
    """The incarnation that was asked."""
    asked_s: float = 0.0
    asked_again: bool = False
    blocks: dict[bytes, int] = field(default_factory=dict)
    lease_s: float = 0.0
    lease_end_s: float = float("-inf")
    """Margin taken off. Counted from when the message that the source answered was sent: before its own count."""
    pulls: dict[int, Pull] = field(default_factory=dict)
    forgotten: bool = False
    pulled: int = 0
    failed: int = 0

    def holds(self, now_s: float) -> bool:
        """Whether the source is sure to keep the blocks still."""
        return now_s < self.lease_end_s


@dataclass(slots=True, eq=False)
class Pull:
    """One pull under a lease."""

    pull_id: int
    find: Find
    pairs: Mapping[bytes, int]
    began_s: float
    deadline_s: float
    job_id: JobId | None = None
    tried_again: bool = False
    verdict: FailReason | None = None
    """Why it was aborted."""
    failure: FailReason = FailReason.PEER_GONE
    """What its first try came to, if there was one."""
    detail: str = ""
