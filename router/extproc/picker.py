# SPDX-License-Identifier: Apache-2.0
"""From what a proxy shows of a request to an endpoint: the same parsing, tenants and dispatcher as the gateway's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.errors import NoWorkerAvailable
from router.extproc.endpoints import Endpoints, endpoint_of
from router.extproc.names import ALIASES, DESTINATION, PREFILLER, STEERING, TEST_SELECTION
from router.extproc.picked import Picked, Wanted
from router.extproc.prefills import OwnLeg, for_workers
from router.extproc.subset import entries_of
from router.gateway.headers import Headers, header, request_id_of
from router.gateway.parse import parse_request
from router.gateway.proxy import new_request_id
from router.gateway.routing import Attempt, ReadyDispatcher
from router.gateway.service_terms import ServiceTerms, without_key
from router.plan.tenants import Tenant
from router.request import InferenceRequest, Outcome

_PRIVATE = b"x-pointsman-"


@dataclass(frozen=True, slots=True)
class PickerSettings:
    """What the destination says."""

    fallbacks: int = 2
    """Endpoints behind the first at most."""
    tells_scores: bool = False
    """Say how the endpoints that were weighed compare."""
    obeys_test_selection: bool = False
    """Take a request's own choice of endpoints: for conformance tests of gateways, never for clients."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read but not routed yet."""

    request: InferenceRequest
    headers: Headers
    tenant: Tenant
    allowed: frozenset[str] | None
    """Workers to choose among; None: all."""


class Picker:
    """Chooses endpoints for streams."""

    def __init__(
        self,
        dispatcher: ReadyDispatcher,
        endpoints: Endpoints,
        terms: ServiceTerms,
        settings: PickerSettings,
        make_request_id: Callable[[], str] = new_request_id,
    ) -> None:
        self._dispatcher = dispatcher
        self._endpoints = endpoints
        self._terms = terms
        self._settings = settings
        self._make_request_id = make_request_id

    def pick_now(self, wanted: Wanted) -> Picked | Asked:
        """An endpoint for a request; its load counts from the return on. Where it must be waited for: what to ask.

        Raises:
            RouterError: there is none, or the request is at fault.
        """
        asked = self._read(wanted)
        attempt = self._dispatcher.dispatch_now(asked.request, frozenset(), asked.allowed)
        return asked if attempt is None else self._picked(asked, attempt)

    async def pick(self, asked: Asked) -> Picked:
        """The same, waited for."""
        return self._picked(asked, await self._dispatcher.dispatch(asked.request, frozenset(), asked.allowed))

    def _read(self, wanted: Wanted) -> Asked:
        headers = wanted.headers
        tenant = self._terms.tenant(headers)
        method = (header(headers, b":method") or b"").decode("latin-1")
        path = (header(headers, b":path") or b"").partition(b"?")[0].decode("latin-1")
        request_id = request_id_of(headers, self._make_request_id)
        request = parse_request(method, path, headers, wanted.body, request_id)
        request = self._terms.apply(request, _by_known_names(headers), tenant)
        return Asked(request, headers, tenant, self._allowed(wanted))

    def _picked(self, asked: Asked, attempt: Attempt) -> Picked:
        try:
            added = _to_worker(attempt)
            ending = _not_to_worker(asked.headers, asked.tenant, added)
            return Picked(
                request=asked.request,
                attempt=attempt,
                destination=self._destination(attempt),
                set_headers=added,
                remove_headers=ending,
                scores=self._scores(attempt) if self._settings.tells_scores else None,
                worker_at=self._endpoints.worker_at,
                own_leg=_own_leg(asked, attempt, ending),
            )
        except BaseException:
            attempt.finish(Outcome.CANCELLED, None)
            raise

    def _allowed(self, wanted: Wanted) -> frozenset[str] | None:
        allowed = None if wanted.subset is None else self._endpoints.workers_at(wanted.subset)
        chosen = header(wanted.headers, TEST_SELECTION) if self._settings.obeys_test_selection else None
        if chosen is not None:
            named = self._endpoints.workers_at(entries_of(chosen.decode("latin-1")))
            allowed = named if allowed is None else allowed & named
        if allowed is not None and not allowed:
            raise NoWorkerAvailable("not_allowed")
        return allowed

    def _destination(self, attempt: Attempt) -> str:
        """The route's endpoint and those that can be sent the same; all are of the subset, as the ranking is."""
        route = attempt.route
        named = [self._endpoints.endpoint(route.worker_id) or endpoint_of(route.base_url)]
        for worker in attempt.fallbacks(self._settings.fallbacks):
            endpoint = self._endpoints.endpoint(worker)
            if endpoint is not None:
                named.append(endpoint)
        return ",".join(named)

    def _scores(self, attempt: Attempt) -> dict[str, float]:
        found = {}
        for worker, seconds in attempt.scores_s().items():
            endpoint = self._endpoints.endpoint(worker)
            if endpoint is not None:
                found[endpoint] = 1 / (1 + max(seconds, 0.0))
        return found


def _by_known_names(headers: Headers) -> Headers:
    if not any(name in ALIASES for name, _ in headers):
        return headers
    return [(ALIASES.get(name, name), value) for name, value in headers]


def _to_worker(attempt: Attempt) -> Headers:
    route = attempt.route
    headers = [*route.upstream_headers]
    if route.prefill is not None and route.prefill.first:
        headers.append((PREFILLER, endpoint_of(route.prefill.base_url).encode("ascii")))
    return headers


def _own_leg(asked: Asked, attempt: Attempt, ending: Sequence[bytes]) -> OwnLeg | None:
    leg = attempt.route.prefill
    if leg is None or leg.first:
        return None
    target = (header(asked.headers, b":path") or b"").decode("latin-1")
    return OwnLeg(leg, asked.request, target, for_workers(asked.headers, frozenset(ending)))


def _not_to_worker(headers: Headers, tenant: Tenant, added: Headers) -> list[bytes]:
    """Names of what ends here: keys of tenants, headers of ours, and what would steer a sidecar.

    What is set anew is not among them: it replaces the client's.
    """
    kept = {name for name, _ in without_key(headers, tenant)}
    replaced = {DESTINATION.encode(), *(name for name, _ in added)}
    ending = {
        name for name, _ in headers if name in STEERING or name not in kept or name.startswith(_PRIVATE)
    }
    return sorted(ending - replaced)
