# SPDX-License-Identifier: Apache-2.0
"""What goes into the pull engine and what comes out of it. Structs of msgspec: one is made for every pull."""

from __future__ import annotations

from enum import Enum
from typing import NewType

import msgspec

JobId = NewType("JobId", int)


class PullRequest(msgspec.Struct, frozen=True, gc=False):
    """One list of blocks from one incarnation of one peer.

    `source[i]`, a block of the peer's region, goes to `destination[i]`, a block of ours. `deadline_s` is on the
    engine's clock; a caller with a lease sets it no later than the lease's end.
    """

    address: str
    boot_id: str
    source: list[int]
    destination: list[int]
    deadline_s: float


class FailReason(Enum):
    """Why a pull failed. The values are what reports and metrics carry."""

    DEADLINE = "deadline"
    ABORTED = "aborted"
    CLOSED = "closed"
    PEER_GONE = "peer_gone"
    PEER_RESTARTED = "peer_restarted"
    PEER_SILENT = "peer_silent"
    """Refused: an earlier pull met its deadline without a sign of life; connect again to clear it."""
    UNKNOWN_PEER = "unknown_peer"
    STALE_BOOT = "stale_boot"
    BAD_BLOCKS = "bad_blocks"
    DESTINATION_BUSY = "destination_busy"
    """Refused: a destination block belongs to an open pull or is in quarantine."""
    TOO_MANY = "too_many"
    AGENT = "agent"
    """The transfer library refused."""
    LEASE = "lease"
    """The source's lease was not sure to hold until the bytes were there: nothing of them may be used."""


class Proof(Enum):
    """How it is known that nothing more will be written into a block of a failed pull."""

    FINISHED = "finished"
    """The transfer came to its end, late, or was never begun."""
    CONNECTION_ENDED = "connection_ended"
    """Its connection failed, which ended its requests, and the settling time has passed."""
    AGENT_DESTROYED = "agent_destroyed"
    """The agent that could have written no longer exists."""


class Pulled(msgspec.Struct, frozen=True, gc=False):
    """All bytes were in place before the deadline."""

    job_id: JobId
    size_bytes: int
    seconds: float


class PullFailed(msgspec.Struct, frozen=True):
    """The pull is over for whoever waits for it.

    `arrived` are destination blocks whose bytes were complete before the deadline. `quarantined` are destination blocks into which a
    late write may still land: nobody may use them before a `Released` names them. All others are free.
    """

    job_id: JobId
    reason: FailReason
    arrived: tuple[int, ...] = ()
    quarantined: tuple[int, ...] = ()
    detail: str = ""


class Released(msgspec.Struct, frozen=True):
    """Blocks that leave quarantine, and why that is safe."""

    job_id: JobId
    blocks: tuple[int, ...]
    proof: Proof


class PeerLost(msgspec.Struct, frozen=True):
    """A session ended: PEER_GONE, PEER_RESTARTED, PEER_SILENT or AGENT. Pulls need a new handshake."""

    address: str
    boot_id: str
    reason: FailReason


Event = Pulled | PullFailed | Released | PeerLost


class Counts(msgspec.Struct, frozen=True):
    """What the engine holds now, and totals since it began."""

    peers: int
    open_jobs: int
    transfers: int
    """Handles of the library that are not released."""
    open_blocks: int
    quarantined_blocks: int
    agents: int
    agents_destroyed: int
    pulled: int
    failed: int
    pulled_bytes: int
