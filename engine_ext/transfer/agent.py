# SPDX-License-Identifier: Apache-2.0
"""The seams to the transfer library. The one real implementation is nixl_agent.py.

Reading and serving are different agents. Every write that lands in our region comes from a READ that our own
pull agent began, so destroying that agent proves that no more can land, and peers that read from us go on
undisturbed: they talk to the serving agent.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec

from .region import Region


class TransferState(Enum):
    """What an agent says of a transfer."""

    RUNNING = "running"
    DONE = "done"
    """Every byte is there and nothing more will be written."""
    GONE = "gone"
    """The connection has failed, and the library has ended every request on it (UCX's contract for endpoints
    with peer error handling: each request completes, with an error)."""
    UNKNOWN = "unknown"
    """Failed in a way that does not say whether writes may still land."""


class PeerOffer(msgspec.Struct, frozen=True):
    """What one incarnation of a peer lets others read, as its handshake gave it."""

    boot_id: str
    agent_name: str
    metadata: bytes
    region: Region
    backends: tuple[str, ...]


Posted = tuple[int, TransferState]
"""The handle of a transfer that was handed to the library, and its state. Even if it failed at once, some of it may be
under way. A plain tuple: one is made for every transfer.
"""


class PullAgent(Protocol):
    """Reads from peers into the one region that it registered. Used by one thread."""

    def add_peer(self, offer: PeerOffer) -> None:
        """Begins to connect to a peer.

        Raises:
            AgentError: the offer is unusable or the peer's address refuses.
        """
        ...

    def remove_peer(self, boot_id: str) -> None:
        """Drops the connection; never while a transfer from that peer has a handle. Never raises."""
        ...

    def post(self, boot_id: str, source: list[int], destination: list[int]) -> Posted:
        """Begins one transfer of the peer's blocks `source` into our blocks `destination`.

        One that is DONE already is released already: its handle is of no use.

        Raises:
            PeerGoneError: the connection has failed; nothing was begun.
            AgentError: the library refused; nothing was begun.
        """
        ...

    def check(self, handle: int) -> TransferState:
        """The state of a transfer; drives the library on. Never raises."""
        ...

    def release(self, handle: int) -> None:
        """Frees a transfer that is not RUNNING. Never raises."""
        ...

    def progress(self) -> None:
        """Drives the library on where there is no transfer to check."""
        ...

    def close(self) -> None:
        """Returns once no write of this agent can land any more: everything is released and it is destroyed.

        Raises:
            AgentError: that cannot be said. May be called again.
        """
        ...


class AgentFactory(Protocol):
    """Makes pull agents for one region: one at the start, and another whenever one had to be destroyed."""

    def __call__(self, number: int) -> PullAgent:
        """The agent of generation `number`, with the region registered.

        Raises:
            AgentError: nothing is left behind.
        """
        ...


class ServingAgent(Protocol):
    """Lets peers read the region; never reads itself."""

    def offer(self) -> PeerOffer:
        """What a handshake hands out."""
        ...

    def forget_notifications(self) -> None:
        """Drops what readers that are not ours notified; the library keeps it for ever otherwise."""
        ...

    def close(self) -> None:
        """As PullAgent.close."""
        ...
