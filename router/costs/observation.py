# SPDX-License-Identifier: Apache-2.0
"""What one answered request says about the constants: the plan it followed and how long its first token took."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from router.costs.model import prefill_steps
from router.costs.profile import CostProfile

WORKER_TERMS = ("start", "token", "square", "decodes", "ram", "storage", "decode_start")
"""Factors of a worker: fixed time, per computed token, attention, each request that decodes, promotion, storage
reads, a step that only decodes."""
LINK_TERMS = ("connect", "lookup", "wire", "share")
"""Factors of a (source, destination); ``share`` is that of the exponent, all others are of seconds."""


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
    other_pulls: float
    """Pulls that shared the busier link."""
    connected: bool
    """The pair had a session."""
    queue_s: float
    """Predicted seconds of prefill ahead of it."""
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeObservation:
    """The part of a streamed answer of one sequence that follows its first token."""

    worker: str
    decodes: float
    """Requests that decoded on the rank, this one included; on average over the time."""
    output_tokens: int
    """The first one included."""
    decode_s: float
    """From the first token to the end of the answer."""
    prefill_s: float
    """Predicted seconds of the prefills that ran on the rank in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullObservation:
    """What an engine extension reported of one pull: its parts, which a time to first token only has in sum."""

    source: str
    worker: str
    tokens: int
    """That arrived."""
    lookup_s: float | None
    """Connecting included, where the pair had no session; None where there was no answer."""
    transfer_s: float | None
    """None where nothing, or not all, arrived."""
    failed: bool
    """The link was too slow, or nothing came over it."""
    other_pulls: float
    connected: bool


@dataclass(frozen=True, slots=True)
class TierObservation:
    """What an engine extension reported of loading from a tier of the worker's own."""

    worker: str
    tier: Literal["ram", "storage"]
    """RAM: promotion into the KV cache. Storage: reading into RAM."""
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PriorSeconds:
    """Seconds of each part by the profile, all of them linear in one scale factor."""

    admit_s: float
    start_s: float
    token_s: float
    square_s: float
    decodes_s: float
    """Of all that decode beside it, over all steps."""
    ram_s: float
    storage_s: float
    connect_s: float
    lookup_s: float
    wire_s: float
    """Of the pull alone."""
    share_exponent: float
    log_pulls: float
    """Logarithm of the number of pulls that share the link."""
    step_token_s: float
    step_square_s: float
    """Of a step full of prompt tokens, with ``start_s``: a queue longer than that delays the first look."""


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
        decodes_s=prefill_steps(profile, missing) * seen.decodes * profile.decode_s_per_request,
        ram_s=promotions * profile.ram_start_s + promoted * size / profile.ram_bytes_per_s,
        storage_s=profile.storage_start_s + seen.storage_tokens * size / profile.storage_bytes_per_s
        if seen.storage_tokens
        else 0.0,
        connect_s=profile.peer_connect_s if pulls and not seen.connected else 0.0,
        lookup_s=profile.peer_lookup_s if pulls else 0.0,
        wire_s=seen.peer_tokens * size / profile.peer_bytes_per_s,
        share_exponent=profile.peer_share_exponent,
        log_pulls=math.log1p(seen.other_pulls),
        step_token_s=profile.prefill_s_per_token * profile.step_tokens,
        step_square_s=profile.prefill_s_per_token_squared * profile.step_tokens**2 / 2,
    )
