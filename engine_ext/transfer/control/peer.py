# SPDX-License-Identifier: Apache-2.0
"""The seam between an owner of a block region (an engine's tier) and its peers: find, pull, serve.

As a reader the owner asks one peer for keys (`find`), hears which of them the peer has leased to it (`Found`), and
pulls leased blocks into blocks of its own (`pull`). As a source it hears of lookups (`Asked`), pins what it has,
answers (`reply`), and unpins when the lease is over (`LeaseEnded`). All methods are for one thread, put work into a
queue and return at once; everything that happens comes from `take`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine_ext.transfer.events import FailReason, Proof


class NotFoundReason(Enum):
    """Why a lookup ended without an answer. The values are what reports and metrics carry."""

    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    """The handshake was refused; `detail` begins with the name of what differs (`RefusalReason.value`)."""
    PEER_RESTARTED = "peer_restarted"
    MALFORMED = "malformed"
    TOO_MANY = "too_many"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Found:
    """The peer's answer: which keys it has leased to us. Keys that it lacks are not in `keys`."""

    find_id: int
    keys: frozenset[bytes]
    seconds: float
    """From `find` to the answer."""


@dataclass(frozen=True, slots=True)
class NotFound:
    """No answer; count all keys as missed.

    `detail` is words for people. Where it can be told apart further it begins with a name and a colon: what a refusal
    is about, or of `UNREACHABLE`: no_connection, no_answer, disconnected, closing, not_taking, not_zmq, authentication,
    bad_address, stale_boot, stranger.
    """

    find_id: int
    reason: NotFoundReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class BlocksPulled:
    """Every byte was in place before the deadline and while the lease was valid."""

    pull_id: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BlocksNotPulled:
    """Over for whoever waits. `arrived` destination blocks are good; `quarantined` ones may still be written."""

    pull_id: int
    reason: FailReason
    arrived: tuple[int, ...] = ()
    quarantined: tuple[int, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """Blocks that left quarantine, and why that is safe."""

    blocks: tuple[int, ...]
    proof: Proof


@dataclass(frozen=True, slots=True)
class Asked:
    """A peer wants these keys, in the order of its prompt: `reply` with what is there, pinned."""

    lookup_id: int
    keys: tuple[bytes, ...]
    tenant: str


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Nothing will be read under this lookup any more, or only by a reader that will discard it: unpin."""

    lookup_id: int
    read: bool
    """Whether the reader said that it has what it wanted."""


PeerEvent = Found | NotFound | BlocksPulled | BlocksNotPulled | BlocksReleased | Asked | LeaseEnded


class PeerLink(Protocol):
    """One process's end. Times are on `time.monotonic()`."""

    @property
    def address(self) -> str:
        """`host:port` under which peers reach the control channel."""
        ...

    def find(self, address: str, keys: Sequence[bytes], tenant: str, deadline_s: float) -> int:
        """Asks a peer; shakes hands first where needed. The id that the answer will carry."""
        ...

    def forget(self, find_id: int) -> None:
        """Gives the lease of a lookup back, or drops its answer. Pulls of it that are under way end first."""
        ...

    def pull(self, find_id: int, pairs: Mapping[bytes, int], deadline_s: float) -> int:
        """Reads leased keys into our blocks. The id that the end will carry."""
        ...

    def abort(self, pull_id: int) -> None:
        """The pull fails at the next `take`; its blocks are quarantined until a `BlocksReleased`."""
        ...

    def reply(self, lookup_id: int, found: Mapping[bytes, int]) -> None:
        """As the source: these blocks are pinned until `LeaseEnded`. May be empty.

        Ignored where `LeaseEnded` was taken already (the reader waits no more): pin nothing then.
        """
        ...

    def take(self) -> list[PeerEvent]:
        """What happened since the last call, in order."""
        ...

    def idle(self) -> bool:
        """Whether nothing is under way and nothing is quarantined."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Ends everything; True once no block can be written any more."""
        ...
