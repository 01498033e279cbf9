# SPDX-License-Identifier: Apache-2.0
"""Whether a pull may begin: its peer, its incarnation, its blocks."""

from __future__ import annotations

from .events import FailReason, PullRequest
from .jobs import Peer
from .ledger import Ledger
from .region import Region


def refusal(
    request: PullRequest, wanted: set[int], peer: Peer | None, ours: Region, ledger: Ledger
) -> FailReason | None:
    """Why this pull is refused, or None. `wanted` is the set of its destination blocks. O(n)."""
    if peer is None:
        return FailReason.UNKNOWN_PEER
    if peer.boot_id != request.boot_id:
        return FailReason.STALE_BOOT
    if peer.lost:
        return FailReason.PEER_GONE
    if peer.silent:
        return FailReason.PEER_SILENT
    source, destination = request.source, request.destination
    if not source or len(source) != len(destination) or len(wanted) != len(destination):
        return FailReason.BAD_BLOCKS
    if not (ours.holds(destination) and peer.offer.region.holds(source)):
        return FailReason.BAD_BLOCKS
    return FailReason.DESTINATION_BUSY if ledger.busy(wanted) else None
