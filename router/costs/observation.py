# SPDX-License-Identifier: Apache-2.0
"""What one answered request says about the constants: the plan it followed and how long its first token took."""

from __future__ import annotations

from dataclasses import dataclass

from router.costs.profile import CostProfile

WORKER_TERMS = ("start", "token", "square", "decodes", "ram", "storage")
"""Factors of a worker: fixed time, per computed token, attention, decodes beside it, promotion, storage reads."""
LINK_TERMS = ("connect", "lookup", "wire")
"""Factors of a (source, destination)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A streamed, answered request of one prompt."""

    worker: str
    source: str | None
    prompt_tokens: int
    ram_tokens: int
    peer_tokens: int
    storage_tokens: int
    planned_cached_tokens: int
    """All tiers together, HBM included."""
    cached_tokens: int
    """As the engine reported."""
    decodes: int
    """Requests that decoded beside it."""
    other_pulls: int
    """Pulls that shared the busier link."""
    connected: bool
    """The pair had a session."""
    queue_s: float
    """Predicted seconds of prefill ahead of it."""
    ttft_s: float


@dataclass(frozen=True, slots=True)
class PriorSeconds:
    """Seconds of each part by the profile, all of them linear in one scale factor."""

    admit_s: float
    start_s: float
    token_s: float
    square_s: float
    slowdown: float
    """Relative, of all decodes together."""
    ram_s: float
    storage_s: float
    connect_s: float
    lookup_s: float
    wire_s: float


def prior_seconds(profile: CostProfile, seen: Observation) -> PriorSeconds:
    """The parts of the formula of ``router.costs.model``, for the tokens that were really computed."""
    missing = max(seen.prompt_tokens - seen.cached_tokens, 1)
    cached = seen.prompt_tokens - missing
    size = profile.kv_bytes_per_token
    promotions = (seen.ram_tokens > 0) + (seen.peer_tokens > 0) + (seen.storage_tokens > 0)
    promoted = seen.ram_tokens + seen.peer_tokens + seen.storage_tokens
    pulls = seen.peer_tokens > 0
    return PriorSeconds(
        admit_s=profile.admit_s,
        start_s=profile.prefill_start_s,
        token_s=profile.prefill_s_per_token * missing,
        square_s=profile.prefill_s_per_token_squared * missing * (cached + missing / 2),
        slowdown=profile.decode_slowdown * seen.decodes,
        ram_s=promotions * profile.ram_start_s + promoted * size / profile.ram_bytes_per_s,
        storage_s=profile.storage_start_s + seen.storage_tokens * size / profile.storage_bytes_per_s
        if seen.storage_tokens
        else 0.0,
        connect_s=profile.peer_connect_s if pulls and not seen.connected else 0.0,
        lookup_s=profile.peer_lookup_s if pulls else 0.0,
        wire_s=seen.peer_tokens * size * (1 + seen.other_pulls) / profile.peer_bytes_per_s,
    )
