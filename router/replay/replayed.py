# SPDX-License-Identifier: Apache-2.0
"""One request of a replay."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_ext.sim.request import Moved
from router.plan.observed import Decoding


@dataclass(slots=True)
class ReplayedRequest:
    """One request and what became of it."""

    worker: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    predicted_cached_tokens: int
    predicted_ttft_s: float
    source: str | None
    ticket: int
    ttft_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    index: int = 0
    """The request's own."""
    decoding: Decoding | None = None
    """How its worker was when the answer began."""
    delay_s: float = 0.0
    """From its arrival to its last attempt; what is predicted is predicted from then on."""
    attempts: int = 1
    failed: bool = False
    """No worker was left to try, or its worker died while it streamed."""
    moved: Moved = field(default_factory=Moved)
    """What its attempts moved and waited for."""
    evicted_blocks: int = 0
    """Prompt blocks computed again that some worker had given up for others."""
