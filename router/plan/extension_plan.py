# SPDX-License-Identifier: Apache-2.0
"""A plan as our engine extension reads it, under the key ``pointsman`` of ``kv_transfer_params``. Pure.

    {"version": 1, "plan_id": "pm-...", "tenant": "blue", "pulls": [...], "evict": {...}}

Read by ``engine_ext.vllm.plan``, which says what each field means; ``tests/golden/plans`` holds examples that both
sides are tested with. Fields that say nothing are left out.

A pull's deadline counts from the moment at which the engine hears of the request, so what waits ahead of it is part of
it. Both the wait and the pull may take ``PATIENCE`` times what was predicted, the pull at least ``LEAST_PULL_S`` and
never more than the longest one that is planned at all (``plan.pull_deadline_s``).
"""

from __future__ import annotations

from dataclasses import dataclass

from router.fleet.worker import address_text
from router.plan.candidate import Plan, Pull

PLAN_KEY = "pointsman"
PLAN_VERSION = 1
PATIENCE = 4.0
LEAST_PULL_S = 0.25
_LONGEST_MS = 600_000


@dataclass(frozen=True, slots=True)
class BlockWorth:
    """What is known of the worth of a request's blocks, for whoever may have to give some up."""

    rebuild_s: float | None = None
    """Seconds to compute the whole prompt there."""
    reuse: float | None = None
    """Reuses of its prefix that are expected, per hour."""
    pinned_tokens: int = 0
    """The head that many requests share."""
    private_from_token: int | None = None
    """From here on it will not be read again; None: unknown."""
    peer_copies: int = 0
    """Other workers that hold its prefix."""


@dataclass(frozen=True, slots=True)
class ExtensionTerms:
    """What goes to a worker with our extension besides the plan itself."""

    pull_deadline_s: float = 5.0
    tenant: str = ""
    """Whose blocks these are; empty where they are shared with everybody who shares."""
    worth: BlockWorth = BlockWorth()


def extension_plan(
    plan: Plan, plan_id: str, terms: ExtensionTerms, *, pulls: bool = True
) -> dict[str, object]:
    """The value under ``PLAN_KEY``. ``plan_id`` is fresh for each attempt; ``pulls`` False leaves them out."""
    told: dict[str, object] = {"version": PLAN_VERSION, "plan_id": plan_id}
    if terms.tenant:
        told["tenant"] = terms.tenant
    if pulls and plan.pulls:
        told["pulls"] = [_pull(pull, plan, terms.pull_deadline_s) for pull in plan.pulls]
    if evict := _evict(terms.worth):
        told["evict"] = evict
    return told


def deadline_ms(admit_s: float, pull_s: float, pull_deadline_s: float) -> int:
    """By when a source must have delivered, in milliseconds from when the engine hears of the request."""
    allowed_s = PATIENCE * admit_s + min(max(PATIENCE * pull_s, LEAST_PULL_S), pull_deadline_s)
    return min(max(round(allowed_s * 1000), 1), _LONGEST_MS)


def _pull(pull: Pull, plan: Plan, pull_deadline_s: float) -> dict[str, object]:
    source, size = pull.source, plan.block_size_tokens
    return {
        "source": source.extension_address if source.extension else address_text(source.host, source.port),
        "kind": pull.kind,
        "start_token": pull.start_block * size,
        "end_token": pull.end_block * size,
        "deadline_ms": deadline_ms(plan.terms.admit_s, pull.seconds, pull_deadline_s),
    }


def _evict(worth: BlockWorth) -> dict[str, object]:
    told: dict[str, object] = {}
    if worth.rebuild_s is not None:
        told["rebuild_s"] = worth.rebuild_s
    if worth.reuse is not None:
        told["reuse"] = worth.reuse
    if worth.pinned_tokens:
        told["pinned_tokens"] = worth.pinned_tokens
    if worth.private_from_token is not None:
        told["private_from_token"] = worth.private_from_token
    if worth.peer_copies:
        told["peer_copies"] = worth.peer_copies
    return told
