# SPDX-License-Identifier: Apache-2.0
"""What an engine extension reported of a plan, as the record keeps it.

It is the only way to know more than the engine's total of cached tokens. How it comes: ``router.decisions.reports_wire``.
"""

from __future__ import annotations

import msgspec


class SourceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came from one place: ``ram``, ``storage`` or the id of a peer."""

    source: str
    """Of a peer that is not in the fleet its address."""
    asked_blocks: int
    hit_blocks: int
    missed_blocks: int
    kind: str = ""
    """pointsman, p2p, ram or storage."""
    stale_blocks: int = 0
    """Promised by the plan, and the source says that it lacks them."""
    moved_blocks: int = 0
    """Arrived in the worker's host memory."""
    bytes: int = 0
    lookup_s: float | None = None
    transfer_s: float | None = None
    outcome: str = "ok"

    @property
    def is_peer(self) -> bool:
        return self.kind in {"pointsman", "p2p"}


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one plan. A block is an offloading chunk of the engine."""

    tiers: dict[str, int]
    """Cached tokens by where they came from: hbm (once the engine's total is known), ram, peer, storage."""
    sources: tuple[SourceReport, ...] = ()
    promotion_s: float | None = None
    promotion_bytes: int = 0
    promoted_blocks: int = 0
    evicted_before_reuse_blocks: int = 0
    stale: bool = False
    """Some source lacked promised blocks."""
    block_tokens: int = 0
    engine: str = ""
    """Boot id of the engine that reported."""
    engine_request_id: str = ""
    ended_unix_s: float = 0.0
    """By the engine's clock."""
    revision: int = 0
    """How often the report was amended: evictions show after a request is over."""
