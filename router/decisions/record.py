# SPDX-License-Identifier: Apache-2.0
"""What is kept of a decision, and of what came of it. Never prompt text, token ids or block hashes.

Records are trees, so the collector of circles need not look at them: thousands are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from router.decisions.inputs import KEPT_CANDIDATES
from router.decisions.report import PlanReport
from router.errors import FallbackReason
from router.plan.candidate import Plan
from router.plan.decider import Decision
from router.plan.handover import Handover


class TermSeconds(msgspec.Struct, frozen=True, gc=False):
    """The terms of the cost; names as in the cost model."""

    queue: float
    admit: float
    ram: float
    peer: float
    storage: float
    prefill: float
    remote: float = 0.0
    decode: float = 0.0
    """What the answers lose beside one another; no part of the total."""
    displaced: float = 0.0
    """What others lose whose blocks give way in HBM; no part of the total."""


class PullRecord(msgspec.Struct, frozen=True, gc=False):
    """What a worker with our extension takes from one source."""

    source: str
    kind: str
    """pointsman or p2p."""
    start_token: int
    end_token: int
    blocks: int
    """Of that range those that are pulled; the worker has the others."""
    seconds: float
    """Session, lookup and transfer, as predicted."""


class CandidateRecord(msgspec.Struct, frozen=True, gc=False):
    """The best plan of one candidate."""

    worker: str
    dp_rank: int
    path_blocks: dict[str, int]
    source: str | None
    cached_tokens: int
    seconds: TermSeconds
    total_s: float
    score_s: float
    prefill_worker: str | None = None
    """Another worker that would compute the prompt for it."""
    pulls: list[PullRecord] = []
    """By range of the prompt; empty on stock vLLM."""


class Observation(msgspec.Struct, gc=False):
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
    lost_workload: int | None = None
    """Prompt tokens computed that were cached nowhere; the three and ``cached_tokens`` are the prompt."""
    lost_routing: int | None = None
    """Prompt tokens computed that were cached elsewhere in the fleet."""
    lost_stale: int | None = None
    """Prompt tokens computed that were promised and not there."""
    regret_s: float | None = None
    """Time to first token beyond what the best candidate would have taken, by all that is known now."""
    tiers: dict[str, int] | None = None
    """Cached tokens by tier; None until an engine extension reports. Compare ``predicted_tiers``."""
    report: PlanReport | None = None
    """As the engine extension sent it."""


class PrefillRecord(msgspec.Struct, kw_only=True, gc=False):
    """The prefill leg of a split request; the record around it is that of the decode leg."""

    worker: str
    dp_rank: int
    transfer: str
    """How its blocks reach the decode worker: p2p or nixl."""
    path_blocks: dict[str, int]
    source: str | None
    predicted_cached_tokens: int
    predicted_s: float
    transfer_params: Mapping[str, object] | None
    observed: Observation
    pulls: list[PullRecord] = []
    plan_id: str = ""
    """Under which an engine extension reports."""


class DecisionRecord(msgspec.Struct, kw_only=True, gc=False):
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
    trial: bool = False
    """Chosen to learn what it takes, not because it is the cheapest."""
    map_source: str | None = None
    """Where the map of the worker came from: events, or approximate (our own decisions); None: there is none."""
    predicted_tiers: dict[str, int] = {}
    """Cached tokens promised, by tier."""
    reachable_cached_tokens: int | None = None
    """The most that one candidate could have had cached, at whatever cost; None for prompts that are not known."""
    constants: str = ""
    """Id of the constants: name of the profile and a hash of its numbers. What was learnt over them is in ``inputs``."""
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """``inputs.DecisionInputs`` as JSON: all that it takes to decide again."""
    prefill: PrefillRecord | None = None
    """Of a split request: the worker that computes the prompt."""
    priority: int = 0
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    waited_s: float = 0.0
    """At the router, before the decision."""
    pulls: list[PullRecord] = []
    """By range of the prompt; empty on stock vLLM. ``source`` is the first of several."""
    speculative_tokens: int = 0
    """Of the blocks that the worker was counted to hold in HBM: those that no event told of yet."""
    plan_id: str = ""
    """Under which an engine extension reports; that of the attempt's ``kv_request_id``."""


def prefill_record(handover: Handover, transfer_params: Mapping[str, object] | None) -> PrefillRecord:
    """The record of a prefill leg that has not begun."""
    plan = handover.prefill
    return PrefillRecord(
        worker=plan.worker,
        dp_rank=plan.dp_rank,
        transfer=handover.transfer.value,
        path_blocks=dict(plan.path_blocks),
        source=plan.source.worker if plan.source else None,
        predicted_cached_tokens=plan.cached_tokens,
        predicted_s=plan.terms.total_s,
        transfer_params=transfer_params,
        observed=Observation(),
        pulls=pull_records(plan),
    )


def pull_records(plan: Plan) -> list[PullRecord]:
    """The pulls of a plan as they are kept: without addresses."""
    size = plan.block_size_tokens
    return [
        PullRecord(
            pull.source.worker,
            pull.kind,
            pull.start_block * size,
            pull.end_block * size,
            pull.blocks,
            pull.seconds,
        )
        for pull in plan.pulls
    ]


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
            remote=terms.remote_s,
            decode=terms.decode_s,
            displaced=terms.displaced_s,
        ),
        total_s=terms.total_s,
        score_s=plan.score_s,
        prefill_worker=plan.handover.prefill.worker if plan.handover else None,
        pulls=pull_records(plan),
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
    tenant: str | None = None,
    priority: int = 0,
    slo_ttft_s: float | None = None,
    slo_tpot_s: float | None = None,
    waited_s: float = 0.0,
) -> DecisionRecord:
    """The record of a decision whose outcome is not known yet."""
    ranking = decision.planned.ranking
    chosen = decision.planned.chosen
    return DecisionRecord(
        id=request_id,
        attempt=attempt,
        time_unix_s=time_unix_s,
        model=model,
        tenant=tenant,
        priority=priority,
        slo_ttft_s=slo_ttft_s,
        slo_tpot_s=slo_tpot_s,
        waited_s=waited_s,
        policy=policy,
        prompt_tokens=prompt_tokens,
        prompt_blocks=chosen.prompt_blocks,
        index_version=decision.index_version,
        index_age_s=decision.index_age_s,
        tokens_from=tokens_from,
        candidates=[candidate_record(plan) for plan in ranking[:KEPT_CANDIDATES]],
        candidate_count=decision.planned.count,
        worker=chosen.worker,
        dp_rank=chosen.dp_rank,
        path_blocks=dict(chosen.path_blocks),
        source=chosen.source.worker if chosen.source else None,
        predicted_cached_tokens=chosen.cached_tokens,
        trial=chosen.trial,
        predicted_tiers=_tiers(chosen),
        predicted_ttft_s=chosen.terms.total_s,
        transfer_params=transfer_params,
        reason=explain(ranking, policy, fallback),
        fallback=fallback.value if fallback else None,
        observed=Observation(),
        pulls=pull_records(chosen),
    )


def _tiers(plan: Plan) -> dict[str, int]:
    blocks = plan.path_blocks
    return {tier: count * plan.block_size_tokens for tier, count in blocks.items() if tier != "recompute"}


def path_text(path_blocks: Mapping[str, int]) -> str:
    """``hbm:24,peer:96,recompute:8``: blocks by path, as the response header has it."""
    return ",".join(f"{path}:{count}" for path, count in path_blocks.items())


def explain(ranking: Sequence[Plan], policy: str, fallback: FallbackReason | None) -> str:
    """One sentence: why the first beat the second."""
    best = ranking[0]
    if policy != "kv_aware":
        return f"Policy {policy} chose {best.worker} without looking at the index."
    if best.trial:
        return f"A trial at {best.worker}, to learn what {_path_words(best)} takes: predicted {best.terms.total_s:.3f} s."
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
    if plan.handover:
        return f"{words} prefilled by {plan.handover.prefill.worker}"
    return f"{words} from {' and '.join(plan.source_workers)}" if plan.source else words


def _largest_difference(best: Plan, second: Plan) -> tuple[str, float]:
    names = (
        "queue_s",
        "admit_s",
        "ram_s",
        "peer_s",
        "storage_s",
        "prefill_s",
        "remote_s",
        "decode_s",
        "displaced_s",
    )
    less = {name: getattr(second.terms, name) - getattr(best.terms, name) for name in names}
    largest = max(less, key=lambda name: less[name])
    return largest.removesuffix("_s"), less[largest]
