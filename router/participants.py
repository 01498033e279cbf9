# SPDX-License-Identifier: Apache-2.0
"""Which workers may take part in a request: answer it, compute its prompt for another, serve as a source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from router.errors import NoWorkerAvailable
from router.fleet.fleet import Fleet
from router.fleet.worker import Role, WorkerStatus
from router.legs import can_be_split
from router.metrics import RouterMetrics
from router.request import InferenceRequest


class Participants:
    """Asks the fleet, by what is known of the request. A ``dry_run`` uses up nobody's turn."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, monotonic_s: Callable[[], float]) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._monotonic_s = monotonic_s

    def candidates(
        self,
        request: InferenceRequest,
        tried: frozenset[str],
        allowed: frozenset[str] | None = None,
        *,
        dry_run: bool = False,
    ) -> Sequence[WorkerStatus]:
        """Those that may answer, out of ``allowed`` if given.

        Raises:
            NoWorkerAvailable: nobody may.
        """
        exclude: AbstractSet[str] = tried
        if allowed is not None:
            exclude = {one.spec.id for one in self._fleet.statuses()} - allowed | tried
        candidates = self._fleet.candidates(request.model, self._monotonic_s(), exclude, dry_run=dry_run)
        if not candidates:
            reason = self._fleet.unavailable_reason(request.model, tried)
            if allowed is not None:
                reason = "not_allowed"
            self._metrics.refused.labels(reason).inc()
            raise NoWorkerAvailable(reason)
        return candidates

    def prefillers(
        self, request: InferenceRequest, tried: frozenset[str], *, dry_run: bool = False
    ) -> Sequence[WorkerStatus]:
        """Those that may compute the prompt for another one. A retry is never split: it shall not fail again."""
        if tried or not can_be_split(request):
            return ()
        return self._fleet.prefillers(request.model, self._monotonic_s(), dry_run=dry_run)

    def peers(self, tried: frozenset[str]) -> Sequence[WorkerStatus]:
        """Those that may be sources. One whose prefill leg failed is none for the same request."""
        statuses = self._fleet.statuses()
        if not tried:
            return statuses
        return [s for s in statuses if s.spec.role is not Role.PREFILL or s.spec.id not in tried]
