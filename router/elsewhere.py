# SPDX-License-Identifier: Apache-2.0
"""Where else a request could be answered as it is, for a proxy that sends it and may choose among several endpoints.

The body is made for the chosen worker: it may name a source to pull from, and its headers a rank. Whoever gets the
same bytes instead must be able to use them. vLLM stalls for its handshake time-out on a request that names its own
worker as source (``docs/features/kv_offloading_usage.md``), so a source is never a fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from router.fleet.fingerprint import fingerprint
from router.fleet.worker import Transfer, WorkerSpec, WorkerStatus
from router.gateway.routing import Attempt
from router.plan.candidate import Plan
from router.plan.decider import Decision
from router.plan.planner import Planned

StatusOf = Callable[[str], WorkerStatus | None]


def takes_the_same(plan: Plan, chosen: Plan, params: object, base_model: str, status_of: StatusOf) -> bool:
    """Whether the worker of ``plan`` can be sent what was made for ``chosen``: its parameters and its rank header."""
    status, made_for = status_of(plan.worker), status_of(chosen.worker)
    if status is None or made_for is None or plan.worker == chosen.worker:
        return False
    spec = status.spec
    if min(spec.ranks, 2) != min(made_for.spec.ranks, 2) or (
        spec.ranks > 1 and plan.dp_rank != chosen.dp_rank
    ):
        return False
    if any(address in _addresses(spec) for address in _named(params)):
        return False
    mine = fingerprint(status, base_model)
    if not _pulls_the_same(plan, chosen, spec, mine):
        return False
    if chosen.handover is None:
        return True
    prefiller = status_of(chosen.handover.prefill.worker)
    if prefiller is None or spec.transfer is not chosen.handover.transfer or spec.id == prefiller.spec.id:
        return False
    return spec.transfer is not Transfer.P2P or mine == fingerprint(prefiller, base_model)


def _pulls_the_same(plan: Plan, chosen: Plan, spec: WorkerSpec, mine: str) -> bool:
    """Whether it can pull from the sources that ``chosen`` names: by the same protocol, and never from itself."""
    if plan.worker in chosen.source_workers:
        return False
    if chosen.pulls:
        return plan.extension and all(mine == pull.source.fingerprint for pull in chosen.pulls)
    return chosen.source is None or (spec.p2p is not None and mine == chosen.source.fingerprint)


def _named(params: object) -> Iterator[tuple[str, int]]:
    """Every (host, port) in the parameters, those of a trusted client too: each stands for a worker to load from."""
    if isinstance(params, Mapping):
        for prefix in ("remote_", ""):
            host, port = params.get(f"{prefix}host"), params.get(f"{prefix}port")
            if isinstance(host, str) and isinstance(port, int):
                yield host, port
        for value in params.values():
            yield from _named(value)
    elif isinstance(params, list | tuple):
        for value in params:
            yield from _named(value)


def _addresses(spec: WorkerSpec) -> set[tuple[str, int]]:
    """Control channels of a worker's ranks."""
    host, _, port = (spec.p2p or "").rpartition(":")
    return {(host.strip("[]"), int(port) + rank) for rank in range(spec.ranks)} if port else set()


class Elsewhere:
    """The rest of the ranking behind one attempt."""

    def __init__(
        self,
        decision: Decision,
        params: object,
        base_model: str,
        status_of: StatusOf,
        begin: Callable[[Decision], Attempt],
    ) -> None:
        """``begin`` starts an attempt with what another decision chose, for a request that is under way."""
        self._decision = decision
        self._params = params
        self._base_model = base_model
        self._status_of = status_of
        self._begin = begin

    def fallbacks(self, most: int) -> tuple[str, ...]:
        """Workers that can be sent the same, best first."""
        chosen, *others = self._decision.planned.ranking
        found: list[str] = []
        for plan in others:
            if len(found) >= most:
                break
            if plan.worker not in found and takes_the_same(
                plan, chosen, self._params, self._base_model, self._status_of
            ):
                found.append(plan.worker)
        return tuple(found)

    def scores_s(self) -> dict[str, float]:
        """The best score of each worker of the ranking, smaller is better."""
        scores: dict[str, float] = {}
        for plan in self._decision.planned.ranking:
            scores.setdefault(plan.worker, plan.score_s)
        return scores

    def begin_at(self, worker_id: str) -> Attempt | None:
        """An attempt at a worker of the ranking, with what was made for the chosen one; None where it is in none."""
        planned = self._decision.planned
        chosen = planned.chosen
        other = next((plan for plan in planned.ranking if plan.worker == worker_id), None)
        if other is None or self._status_of(worker_id) is None:
            return None
        sent = replace(
            other,
            source=chosen.source,
            pulls=chosen.pulls,
            max_load_tokens=chosen.max_load_tokens,
            use_storage=chosen.use_storage,
            handover=chosen.handover,
            trial=False,
        )
        rest = tuple(plan for plan in planned.ranking if plan is not other)
        return self._begin(replace(self._decision, planned=Planned((sent, *rest), planned.candidates)))
