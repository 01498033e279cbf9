# SPDX-License-Identifier: Apache-2.0
"""The key `pointsman` of `kv_transfer_params`: what the router planned for one request on this worker. Pure.

    "pointsman": {
      "version": 1,
      "plan_id": "r-1f3a.0",
      "tenant": "blue",
      "pulls": [
        {"source": "10.0.0.7:5720", "kind": "pointsman", "start_token": 0, "end_token": 4096, "deadline_ms": 800},
        {"source": "10.0.0.9:5710", "kind": "p2p", "start_token": 4096, "end_token": 8192, "deadline_ms": 800}
      ],
      "evict": {"rebuild_s": 0.41, "reuse": 3.5, "pinned_tokens": 2048, "private_from_token": 6144, "peer_copies": 1}
    }

Token ranges are half open, in the prompt's tokens, and do not overlap; the tier rounds them inwards to its chunks.
Deadlines count from the moment at which the engine first hears of the request. Stock vLLM ignores the key.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

PLAN_KEY = "pointsman"
PLAN_VERSION = 1

Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class PlanError(ValueError):
    """The value under `pointsman` is not a plan that this version can carry out."""


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """One range of the prompt, from one peer."""

    source: Name
    """`host:port` of the peer's control channel: the extension's, or the in-tree P2P tier's for kind `p2p`."""
    kind: Literal["pointsman", "p2p"] = "pointsman"
    start_token: Tokens
    end_token: Tokens
    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=600_000)]


class EvictHints(msgspec.Struct, frozen=True, kw_only=True):
    """What the router knows about the worth of this request's blocks."""

    rebuild_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Seconds to compute the whole prompt here."""
    reuse: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Reuses of its prefix that are expected, per hour."""
    pinned_tokens: Tokens = 0
    """The prompt's head that many requests share: kept where there is a choice."""
    private_from_token: Tokens | None = None
    """From here on the prompt will not be read again; None: unknown."""
    peer_copies: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Workers besides this one that hold its prefix."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown keys are ignored, so that a newer router may say more."""

    version: int = PLAN_VERSION
    plan_id: Name
    """Unique per attempt; reports carry it."""
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""
    pulls: tuple[Pull, ...] = ()
    evict: EvictHints = EvictHints()


def read_plan(kv_transfer_params: dict[str, Any] | None) -> Plan | None:
    """The plan in a request's parameters; None if there is none.

    Raises:
        PlanError: there is one, and it is malformed, of another version, or its ranges are empty or overlap.
    """
    raw = (kv_transfer_params or {}).get(PLAN_KEY)
    if raw is None:
        return None
    try:
        plan = msgspec.convert(raw, Plan)
    except msgspec.ValidationError as error:
        raise PlanError(str(error)) from error
    if plan.version != PLAN_VERSION:
        raise PlanError(f"version {plan.version}, this extension reads {PLAN_VERSION}")
    end = 0
    for pull in sorted(plan.pulls, key=lambda one: one.start_token):
        if not end <= pull.start_token < pull.end_token:
            raise PlanError(
                f"pull of tokens {pull.start_token} to {pull.end_token} is empty or overlaps another"
            )
        end = pull.end_token
    return plan
