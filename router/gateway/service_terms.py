# SPDX-License-Identifier: Apache-2.0
"""Who asks, how fast and how urgently: what the headers of a request say of the service it is to get.

``Authorization: Bearer KEY`` or ``x-api-key: KEY`` names the tenant. ``x-slo-ttft-ms`` and ``x-slo-tpot-ms`` are the
milliseconds wanted to the first token and per token after it. ``x-pointsman-priority`` is a whole number, higher is
more urgent; what is above the tenant's own priority counts as that. ``x-gateway-inference-objective`` (or
``x-llm-d-inference-objective``) names an InferenceObjective, whose priority stands for that of the tenant, but is never
above it where the tenant is configured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from router.config_tenants import MIN_PRIORITY
from router.errors import HeaderRefused
from router.gateway.headers import Headers, header
from router.plan.tenants import ANONYMOUS, Tenant, Tenants
from router.request import InferenceRequest

_AUTHORIZATION = b"authorization"
_API_KEY = b"x-api-key"
_TTFT = b"x-slo-ttft-ms"
_TPOT = b"x-slo-tpot-ms"
_PRIORITY = b"x-pointsman-priority"
_OBJECTIVE = (b"x-gateway-inference-objective", b"x-llm-d-inference-objective")
_NUMBER = re.compile(rb"(?:\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})(?:[eE][+-]?\d{1,2})?")
_WHOLE = re.compile(rb"[+-]?\d{1,9}")


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """Reads those headers. Without ``tenants`` everybody is anonymous."""

    tenants: Tenants | None = None
    slo_ttft_s: float | None = None
    """Where a request does not say."""
    slo_tpot_s: float | None = None
    objective_priority: Callable[[str], int | None] | None = None
    """Priority of an InferenceObjective by its name; None for one that nobody knows."""

    def tenant(self, headers: Headers) -> Tenant:
        """Who asks.

        Raises:
            InvalidApiKey: a key is required, and this request has none that is known.
        """
        return ANONYMOUS if self.tenants is None else self.tenants.of_key(_key(headers))

    def named(self, name: str) -> Tenant | None:
        """A tenant by name."""
        known = self.tenants.get(name) if self.tenants is not None else None
        return known or (ANONYMOUS if name == ANONYMOUS.name else None)

    def apply(self, request: InferenceRequest, headers: Headers, tenant: Tenant) -> InferenceRequest:
        """The request with its tenant, its urgency and the salt of its blocks.

        Raises:
            HeaderRefused: names the header, its value and what is accepted.
        """
        objective = self._objective(headers)
        return replace(
            request,
            tenant=tenant,
            cache_salt=tenant.cache_salt(request.cache_salt),
            priority=_priority(headers, _most_urgent(objective, tenant)),
            sheddable=objective is not None and objective < 0,
            slo_ttft_s=_seconds(headers, _TTFT, self.slo_ttft_s),
            slo_tpot_s=_seconds(headers, _TPOT, self.slo_tpot_s),
        )

    def _objective(self, headers: Headers) -> int | None:
        """Priority of the objective that a request names; None where it names none that is known."""
        name = next((value for one in _OBJECTIVE if (value := header(headers, one)) is not None), None)
        if name is None or self.objective_priority is None:
            return None
        return self.objective_priority(name.decode("latin-1").strip())


def _most_urgent(objective: int | None, tenant: Tenant) -> int:
    """The priority of a request that does not say, and the most that one may ask for."""
    if objective is None:
        return tenant.priority
    return objective if tenant is ANONYMOUS else min(objective, tenant.priority)


def without_key(headers: Headers, tenant: Tenant) -> Sequence[tuple[bytes, bytes]]:
    """What may go to a worker: a tenant's key ends here. A key that nobody knows here may be the worker's own."""
    if tenant.name == ANONYMOUS.name:
        return headers
    return [pair for pair in headers if pair[0] not in (_AUTHORIZATION, _API_KEY)]


def _key(headers: Headers) -> bytes | None:
    scheme, _, token = (header(headers, _AUTHORIZATION) or b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return (header(headers, _API_KEY) or b"").strip() or None


def _seconds(headers: Headers, name: bytes, default_s: float | None) -> float | None:
    value = header(headers, name)
    if value is None:
        return default_s
    text = value.strip()
    milliseconds = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < milliseconds < math.inf:
        raise _refused(name, value, "a positive number of milliseconds")
    return milliseconds / 1000


def _priority(headers: Headers, most: int) -> int:
    value = header(headers, _PRIORITY)
    if value is None:
        return max(most, MIN_PRIORITY)
    if not _WHOLE.fullmatch(value.strip()):
        raise _refused(_PRIORITY, value, "a whole number")
    return max(min(int(value), most), MIN_PRIORITY)


def _refused(name: bytes, value: bytes, accepted: str) -> HeaderRefused:
    text = value[:64].decode("latin-1")
    return HeaderRefused(f"header {name.decode()}: {text!r} is not accepted; accepted: {accepted}")
