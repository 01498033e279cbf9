# SPDX-License-Identifier: Apache-2.0
"""What the router knows of a request before it is tokenised, and of its answer. Values only, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from router.plan.tenants import ANONYMOUS, Tenant


class RequestKind(enum.Enum):
    """Which OpenAI call it is; OTHER is passed through with load accounting."""

    CHAT = "chat"
    COMPLETION = "completion"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One client request. ``body`` is what the client sent, byte for byte.

    ``document`` is the parsed body, for routing only; it is None when the body is absent, is not a JSON
    object, or is one that no JSON parser takes. It is never serialised again.
    """

    request_id: str
    method: str
    path: str
    kind: RequestKind
    body: bytes
    document: Mapping[str, object] | None
    model: str | None
    stream: bool
    sequences: int
    """Sequences the engine will run for it (prompts times n); remote_* keys need exactly one."""
    max_tokens: int | None
    cache_salt: str | None
    """What enters its block hashes: the client's, or that of the tenant (which the client's is part of)."""
    dp_rank: int | None = None
    """Rank the client pinned by ``x-data-parallel-rank``."""
    tenant: Tenant = ANONYMOUS
    priority: int = 0
    """Higher goes first when requests wait."""
    sheddable: bool = False
    """Its objective's priority is negative: it is refused rather than kept while every worker is busy."""
    slo_ttft_s: float | None = None
    """Time to first token wanted."""
    slo_tpot_s: float | None = None
    """Time per output token wanted."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the engine reports them; ``cached_tokens`` is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class Outcome(enum.Enum):
    """How one attempt at a worker ended."""

    OK = "ok"
    CLIENT_ERROR = "client_error"  # 4xx from the worker: never its fault
    BUSY = "busy"  # 408 or 429 from the worker
    WORKER_ERROR = "worker_error"  # 5xx, refused, reset, time-out, or a stream without its end
    CLIENT_GONE = "client_gone"  # the client closed first
    CANCELLED = "cancelled"  # we gave it up: the other leg of a split request ended
