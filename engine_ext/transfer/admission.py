# SPDX-License-Identifier: Apache-2.0
"""Whether a pull may begin: its peer, its incarnation, and that its blocks exist."""

from __future__ import annotations

from .events import FailReason, PullRequest
from .jobs import Peer
from .region import Region


def refusal(request: PullRequest, wanted: set[int], peer: Peer | None, ours: Region) -> FailReason | None:
    """Why this pull is refused, or None. `wanted` is the set of its destination blocks. O(n log n)."""
    if peer is None:
        return FailReason.UNKNOWN_PEER
    if peer.boot_id != request.boot_id:
        return FailReason.STALE_BOOT
    if peer.lost:
        return FailReason.PEER_GONE
    if peer.silent:
        return FailReason.PEER_SILENT
    source, destination = request.source, request.destination
    if not wanted or len(source) != len(wanted) or len(destination) != len(wanted):
        return FailReason.BAD_BLOCKS
    # Sorting takes half as long as min and max, and O(n) where there is an order.
    ordered = sorted(destination)
    if ordered[0] < 0 or ordered[-1] >= ours.blocks:
        return FailReason.BAD_BLOCKS
    ordered = sorted(source)
    return FailReason.BAD_BLOCKS if ordered[0] < 0 or ordered[-1] >= peer.blocks else None
