# SPDX-License-Identifier: Apache-2.0
"""What is kept of a decision, and of what came of it. Never prompt text, token ids or block hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from router.errors import FallbackReason
from router.plan.candidate import Plan
from router.plan.decider import Decision

KEPT_CANDIDATES = 16


class TermSeconds(msgspec.Struct, frozen=True):
    """The terms of the cost; names as in the cost model."""

    queue: float
    admit: float
    ram: float
    peer: float
    storage: float
    prefill: float


class CandidateRecord(msgspec.Struct, frozen=True):
    """The best plan of one candidate."""

    worker: str
    dp_rank: int
    path_blocks: dict[str, int]
    source: str | None
    cached_tokens: int
    seconds: TermSeconds
    total_s: float
    score_s: float


class Observation(msgspec.Struct):
    """What became of the request; joined as it is learnt."""

    outcome: str | None = None
    status: int | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """As the engine reports; needs ``--enable-prompt-tokens-details``."""
    stale: bool | None = None
    """Fewer tokens were cached than promised; None while unknown."""


class DecisionRecord(msgspec.Struct, kw_only=True):
    """One decision for one attempt."""

    id: str
    attempt: int
    time_unix_s: float
    model: str | None
    tenant: str | None
    policy: str
    prompt_tokens: int
    prompt_blocks: int
    index_version: int
    index_age_s: float | None
    tokens_from: str | None
    """local, worker or given; None when the request was not tokenised."""
    candidates: list[CandidateRecord]
    """The best ``KEPT_CANDIDATES``, best first."""
    candidate_count: int
    worker: str
    dp_rank: int
    path_blocks: dict[str, int]
    source: str | None
    predicted_cached_tokens: int
    predicted_ttft_s: float
    transfer_params: Mapping[str, object] | None
    reason: str
    fallback: str | None
    observed: Observation


def candidate_record(plan: Plan) -> CandidateRecord:
    """A plan as it is kept."""
    terms = plan.terms
    return CandidateRecord(
        worker=plan.worker,
        dp_rank=plan.dp_rank,
        path_blocks=dict(plan.path_blocks),
        source=plan.source.worker if plan.source else None,
        cached_tokens=plan.cached_tokens,
        seconds=TermSeconds(
            queue=terms.queue_s,
            admit=terms.admit_s,
            ram=terms.ram_s,
            peer=terms.peer_s,
            storage=terms.storage_s,
            prefill=terms.prefill_s,
        ),
        total_s=terms.total_s,
        score_s=plan.score_s,
    )


def make_record(
    *,
    request_id: str,
    attempt: int,
    time_unix_s: float,
    model: str | None,
    policy: str,
    prompt_tokens: int,
    decision: Decision,
    tokens_from: str | None,
    transfer_params: Mapping[str, object] | None,
    fallback: FallbackReason | None,
) -> DecisionRecord:
    """The record of a decision whose outcome is not known yet."""
    ranking = decision.planned.ranking
    chosen = decision.planned.chosen
    return DecisionRecord(
        id=request_id,
        attempt=attempt,
        time_unix_s=time_unix_s,
        model=model,
        tenant=None,
        policy=policy,
        prompt_tokens=prompt_tokens,
        prompt_blocks=chosen.prompt_blocks,
        index_version=decision.index_version,
        index_age_s=decision.index_age_s,
        tokens_from=tokens_from,
        candidates=[candidate_record(plan) for plan in ranking[:KEPT_CANDIDATES]],
        candidate_count=len(ranking),
        worker=chosen.worker,
        dp_rank=chosen.dp_rank,
        path_blocks=dict(chosen.path_blocks),
        source=chosen.source.worker if chosen.source else None,
        predicted_cached_tokens=chosen.cached_tokens,
        predicted_ttft_s=chosen.terms.total_s,
        transfer_params=transfer_params,
        reason=explain(ranking, policy, fallback),
        fallback=fallback.value if fallback else None,
        observed=Observation(),
    )


def path_text(path_blocks: Mapping[str, int]) -> str:
    """``hbm:24,peer:96,recompute:8``: blocks by path, as the response header has it."""
    return ",".join(f"{path}:{count}" for path, count in path_blocks.items())


def explain(ranking: Sequence[Plan], policy: str, fallback: FallbackReason | None) -> str:
    """One sentence: why the first beat the second."""
    best = ranking[0]
    if policy != "kv_aware":
        return f"Policy {policy} chose {best.worker} without looking at the index."
    if len(ranking) == 1:
        return f"{best.worker} is the only candidate."
    second = ranking[1]
    if fallback is not None:
        return (
            f"{best.worker} has the least load ({best.terms.queue_s:.3f} s queued against "
            f"{second.terms.queue_s:.3f} s at {second.worker}); the prompt's blocks are unknown ({fallback.value})."
        )
    gain_s = second.score_s - best.score_s
    if gain_s <= 0:
        return f"{best.worker} and {second.worker} cost the same; chance chose {best.worker}."
    name, less_s = _largest_difference(best, second)
    return (
        f"{best.worker} costs {best.terms.total_s:.3f} s by {_path_words(best)}; {second.worker} costs "
        f"{second.terms.total_s:.3f} s by {_path_words(second)}; the largest difference is {name} ({less_s:.3f} s less)."
    )


def _path_words(plan: Plan) -> str:
    words = path_text(plan.path_blocks) or "nothing"
    return f"{words} from {plan.source.worker}" if plan.source else words


def _largest_difference(best: Plan, second: Plan) -> tuple[str, float]:
    names = ("queue_s", "admit_s", "ram_s", "peer_s", "storage_s", "prefill_s")
    less = {name: getattr(second.terms, name) - getattr(best.terms, name) for name in names}
    largest = max(less, key=lambda name: less[name])
    return largest.removesuffix("_s"), less[largest]
