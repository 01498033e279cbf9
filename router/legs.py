# SPDX-License-Identifier: Apache-2.0
"""The prefill leg of a split request: its promise on the load board, its route, its record, its end.

The decode leg is the attempt itself (``router.dispatch``); this is what comes beside it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from router.costs.calibration import Calibration
from router.decisions.record import PrefillRecord, prefill_record
from router.errors import NoWorkerAvailable
from router.fleet.fleet import Fleet
from router.fleet.worker import Transfer
from router.gateway.routing import PrefillLeg
from router.metrics import RouterMetrics
from router.plan.extension_plan import ExtensionTerms
from router.plan.handover import Handover
from router.plan.load import NOWHERE, Board, Resident
from router.plan.observed import observation, teaches
from router.plan.transfer_params import prefill_params
from router.request import InferenceRequest, Outcome, Usage
from router.salting import with_salt

P2P_LOAD_TIMEOUT_S = 30.0
"""vLLM's decode worker waits no longer for its prefiller (``_LOAD_TIMEOUT_S`` of the P2P tier's client)."""


@dataclass(slots=True)
class OpenLeg:
    """A prefill leg that counts as load until it is closed."""

    handover: Handover
    route: PrefillLeg
    record: PrefillRecord
    ticket: int
    prompt_tokens: int
    started_s: float
    over: bool = False


class PrefillLegs:
    """Opens and closes prefill legs; each is closed once, however often it is asked for."""

    def __init__(
        self, fleet: Fleet, board: Board, metrics: RouterMetrics, calibration: Calibration | None
    ) -> None:
        self._fleet = fleet
        self._board = board
        self._metrics = metrics
        self._calibration = calibration

    def open(
        self,
        request: InferenceRequest,
        handover: Handover,
        kv_request_id: str,
        prompt_tokens: int,
        now_s: float,
        terms: ExtensionTerms | None = None,
        resident: Resident = NOWHERE,
    ) -> OpenLeg:
        """Promise the prefill; ``kv_request_id`` is that of the decode leg, ``terms`` are those of this one.
        ``resident``: what the prompt takes room for in HBM there.

        Raises:
            NoWorkerAvailable: the worker has left the fleet.
        """
        plan = handover.prefill
        own_id = new_transfer_id()
        params = prefill_params(handover, kv_request_id, own_id, terms)
        route = self._route(request, handover, params)
        ticket = self._board.promise(
            plan.worker,
            plan.dp_rank,
            plan.terms.prefill_s,
            plan.terms.total_s,
            now_s,
            plan.source_workers,
            prompt_tokens=prompt_tokens,
            missing_tokens=max(prompt_tokens - plan.cached_tokens, 1),
            resident=resident,
        )
        self._metrics.split_requests.labels(handover.transfer.value).inc()
        record = prefill_record(handover, params)
        record.plan_id = own_id
        return OpenLeg(handover, route, record, ticket, prompt_tokens, now_s)

    def close(
        self, leg: OpenLeg, outcome: Outcome, status: int | None, usage: Usage | None, now_s: float
    ) -> None:
        """The leg is over: its load is released, its worker's health and constants learn from it."""
        if leg.over:
            return
        leg.over = True
        plan, observed = leg.handover.prefill, leg.record.observed
        self._board.release(leg.ticket, now_s)
        self._fleet.record_outcome(plan.worker, outcome, now_s)
        self._metrics.attempts.labels(plan.worker, outcome.value).inc()
        observed.outcome, observed.status = outcome.value, status
        observed.duration_s = now_s - leg.started_s
        if usage is None:
            return
        observed.prompt_tokens, observed.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        if usage.cached_tokens is None:
            return
        observed.stale = usage.cached_tokens < plan.cached_tokens
        if self._calibration is not None and teaches(plan):
            # One token was asked for, so the end of the answer is its first token.
            seen = observation(plan, leg.prompt_tokens, usage.cached_tokens, observed.duration_s)
            self._calibration.observe(seen, now_s)

    def _route(self, request: InferenceRequest, handover: Handover, params: dict[str, object]) -> PrefillLeg:
        plan = handover.prefill
        status = self._fleet.get(plan.worker)
        if status is None:
            raise NoWorkerAvailable("no_workers")
        headers = [(b"x-request-id", request.request_id.encode())]
        if status.spec.ranks > 1:
            headers.append((b"x-data-parallel-rank", str(plan.dp_rank).encode()))
        return PrefillLeg(
            worker_id=plan.worker,
            base_url=status.spec.url,
            insert=with_salt(request, {"kv_transfer_params": params}),
            upstream_headers=tuple(headers),
            first=handover.transfer is Transfer.NIXL,
            timeout_s=P2P_LOAD_TIMEOUT_S if handover.transfer is Transfer.P2P else None,
        )


def new_transfer_id() -> str:
    """A ``kv_request_id`` that no engine has seen."""
    return f"pm-{random.getrandbits(128):032x}"


def can_be_split(request: InferenceRequest) -> bool:
    """Whether a handover would name just this request and its blocks would be used.

    Not one of several sequences, nor one whose client chose the rank, nor one that asks for the log-probabilities of
    the prompt: the engine computes all of it then (vLLM ``get_skip_reading_prefix_cache``).
    """
    fields = request.document or {}
    asks_for_prompt = fields.get("prompt_logprobs") is not None or bool(fields.get("echo"))
    return request.sequences == 1 and request.dp_rank is None and not asks_for_prompt
