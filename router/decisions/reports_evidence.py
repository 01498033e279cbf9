# SPDX-License-Identifier: Apache-2.0
"""What totals and reports say of who kept what was promised, and how long it took. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from router.costs.observation import PullObservation, TierObservation
from router.decisions.report import PlanReport, SourceReport
from router.decisions.reports_wire import BatchMessage, ReportMessage, SourceMessage
from router.decisions.trust import blame
from router.plan.candidate import Plan

Shares = dict[str, tuple[int, int]]
"""By worker: cached tokens promised there, and those of them that were there."""
WorkerAt = Callable[[str], str | None]
"""The worker that peers reach at an address; None for one that is not in the fleet."""

OUR_DOING = frozenset(
    {
        "aborted",
        "bad_blocks",
        "closed",
        "destination_busy",
        "lease",
        "not_allowed",
        "not_needed",
        "too_many",
        "unanswered",
    }
)
"""Outcomes that are not held against a source: the request or the reading engine ended it."""
TOO_SLOW = frozenset({"deadline", "unreachable", "peer_silent"})
"""Outcomes that say that a link is slow, or that nothing comes over it."""


class PlanFacts(NamedTuple):
    """What is remembered of a plan until its report comes."""

    worker: str
    cached_tokens: int
    pulled: Mapping[str, int]
    """Tokens to be pulled, by source."""
    other_pulls: float
    connected: bool


def facts_of(plan: Plan) -> PlanFacts:
    """A plan, without its candidates and addresses."""
    around = plan.circumstances
    return PlanFacts(
        plan.worker, plan.cached_tokens, pulled_tokens(plan), around.other_pulls, around.connected
    )


def pulled_tokens(plan: Plan) -> dict[str, int]:
    """Tokens that a plan pulls, by source."""
    size = plan.block_size_tokens
    if plan.pulls:
        return {pull.source.worker: pull.blocks * size for pull in plan.pulls}
    blocks = plan.path_blocks.get("peer", 0)
    return {plan.source.worker: blocks * size} if plan.source and blocks else {}


def shares(facts: PlanFacts, cached_tokens: int | None, reported: Shares | None) -> Shares:
    """Who kept what: ``cached_tokens`` is the engine's total, ``reported`` what the report says of the peers.

    A total alone blames the sources first, since a pull can fail in more ways than a block can vanish. What the
    report does not lay at a peer's door is the worker's own. Without either nothing is known.
    """
    pulled = sum(facts.pulled.values())
    found: Shares = {}
    lost = None if cached_tokens is None else max(facts.cached_tokens - cached_tokens, 0)
    if reported is not None:
        found.update(reported)
        if lost is not None:
            lost = max(lost - sum(promised - kept for promised, kept in reported.values()), 0)
    elif lost is not None:
        of_sources, lost = blame(lost, pulled)
        for source, tokens in facts.pulled.items():
            found[source] = (tokens, tokens - of_sources * tokens // pulled)
    own = facts.cached_tokens - pulled
    if lost is not None and own > 0:
        found[facts.worker] = (own, own - min(lost, own))
    return found


def peer_shares(report: PlanReport, block_tokens: int) -> Shares:
    """What each peer was asked for, and what of it came or was there."""
    found: Shares = {}
    for one in report.sources:
        if not one.is_peer:
            continue
        kept = min(_kept_blocks(one), one.asked_blocks)
        before = found.get(one.source, (0, 0))
        found[one.source] = (before[0] + one.asked_blocks * block_tokens, before[1] + kept * block_tokens)
    return found


def _kept_blocks(one: SourceReport) -> int:
    """A transfer that failed brought what arrived; one that never began, or that we ended, is no fault."""
    word = outcome_word(one.outcome)
    if word in OUR_DOING:
        return one.asked_blocks - one.stale_blocks
    if word != "ok":
        return one.moved_blocks
    return one.hit_blocks


def outcome_word(outcome: str) -> str:
    """Without its detail."""
    return outcome.partition(":")[0]


def plan_report(batch: BatchMessage, message: ReportMessage, worker_at: WorkerAt) -> PlanReport:
    """A message as the record keeps it; ``tiers`` is without HBM."""
    sources = tuple(_source_report(one, worker_at) for one in message.sources)
    return PlanReport(
        tiers=_tiers(message, batch.block_tokens),
        sources=sources,
        promotion_s=message.promotion_s,
        promotion_bytes=message.promotion_bytes,
        promoted_blocks=message.promoted_blocks,
        evicted_before_reuse_blocks=message.evicted_before_reuse_blocks,
        stale=any(one.stale_blocks for one in message.sources),
        block_tokens=batch.block_tokens,
        engine=batch.engine,
        engine_request_id=message.request_id,
        ended_unix_s=message.ended_unix_s,
        revision=message.revision,
    )


def _source_report(one: SourceMessage, worker_at: WorkerAt) -> SourceReport:
    name = worker_at(one.source) if one.is_peer else None
    return SourceReport(
        source=name or one.source,
        kind=one.kind,
        asked_blocks=one.asked_blocks,
        hit_blocks=one.hit_blocks,
        missed_blocks=one.missed_blocks,
        stale_blocks=one.stale_blocks,
        moved_blocks=one.moved_blocks,
        bytes=one.bytes,
        lookup_s=one.lookup_s,
        transfer_s=one.transfer_s,
        outcome=one.outcome,
    )


def _tiers(message: ReportMessage, block_tokens: int) -> dict[str, int]:
    tiers: dict[str, int] = {}
    for one in message.sources:
        tier = "peer" if one.is_peer else one.kind
        # Host memory is hit where it is: nothing has to move there.
        blocks = one.hit_blocks if one.kind == "ram" else one.moved_blocks
        if blocks:
            tiers[tier] = tiers.get(tier, 0) + blocks * block_tokens
    return tiers


def tiers_with_total(report: PlanReport, cached_tokens: int | None) -> dict[str, int]:
    """With what the engine found in HBM: the rest of its total."""
    if cached_tokens is None or "hbm" in report.tiers:
        return dict(report.tiers)
    hbm = max(cached_tokens - sum(report.tiers.values()), 0)
    return {"hbm": hbm, **report.tiers} if hbm else dict(report.tiers)


def pull_observations(facts: PlanFacts, report: PlanReport, *, blamed: bool) -> list[PullObservation]:
    """What calibration may learn of links: of pulls that went well, and of those that a link was too slow for.

    ``blamed``: the time to first token has told of the plan's own pull that it failed, which counts once.
    """
    return [
        PullObservation(
            source=one.source,
            worker=facts.worker,
            tokens=one.moved_blocks * report.block_tokens,
            lookup_s=one.lookup_s if one.outcome == "ok" else None,
            transfer_s=one.transfer_s if one.outcome == "ok" and one.moved_blocks else None,
            failed=outcome_word(one.outcome) in TOO_SLOW and not (blamed and one.source in facts.pulled),
            other_pulls=facts.other_pulls,
            connected=facts.connected,
        )
        for one in report.sources
        if one.is_peer and one.asked_blocks
    ]


def tier_observations(facts: PlanFacts, report: PlanReport) -> list[TierObservation]:
    """What calibration may learn of the worker's own tiers."""
    found = []
    if report.promotion_s is not None and report.promoted_blocks:
        tokens = report.promoted_blocks * report.block_tokens
        found.append(TierObservation(facts.worker, "ram", tokens, report.promotion_s))
    for one in report.sources:
        if one.kind == "storage" and one.outcome == "ok" and one.transfer_s is not None and one.moved_blocks:
            tokens = one.moved_blocks * report.block_tokens
            found.append(TierObservation(facts.worker, "storage", tokens, one.transfer_s))
    return found
