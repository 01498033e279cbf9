# SPDX-License-Identifier: Apache-2.0
"""What an engine extension reports of a plan: the only way to know more than the engine's total of cached tokens."""

from __future__ import annotations

import msgspec


class SourceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came from one place: ``ram``, ``storage`` or the id of a peer."""

    source: str
    asked_blocks: int
    hit_blocks: int
    missed_blocks: int
    bytes: int = 0
    lookup_s: float | None = None
    transfer_s: float | None = None


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one plan."""

    tiers: dict[str, int]
    """Cached tokens by where they came from: hbm, ram, peer, storage."""
    sources: tuple[SourceReport, ...] = ()
    promotion_s: float | None = None
