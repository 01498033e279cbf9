# SPDX-License-Identifier: Apache-2.0
"""How uncertain the logarithms of load times are, from what the owners of the constants have learnt. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.costs.observation import LINK_TERMS, WORKER_TERMS
from router.costs.owners import LINK_VARIANCES, WORKER_VARIANCES, Owners, Pair

_RAM, _STORAGE = WORKER_TERMS.index("ram"), WORKER_TERMS.index("storage")
_LOOKUP, _WIRE = LINK_TERMS.index("lookup"), LINK_TERMS.index("wire")


def tier_variances(owners: Owners, worker: str) -> tuple[float, float]:
    """(of a promotion, of a read from storage)."""
    fleet, own = owners.fleet, owners.workers.get(worker)

    def of(term: int) -> float:
        return fleet.covariance[term][term] + (own.covariance[term][term] if own else WORKER_VARIANCES[term])

    return of(_RAM), of(_STORAGE)


def pull_variance(owners: Owners, pair: Pair, lookup: float) -> float:
    """Of a pull over a session, of which ``lookup`` is that share and the wire the rest."""
    own = owners.links.get(pair)
    variance = _variance(owners.fleet_links.covariance, lookup)
    if own is not None:
        return variance + _variance(own.covariance, lookup)
    return variance + lookup**2 * LINK_VARIANCES[_LOOKUP] + (1.0 - lookup) ** 2 * LINK_VARIANCES[_WIRE]


def _variance(covariance: Sequence[Sequence[float]], lookup: float) -> float:
    wire = 1.0 - lookup
    return max(
        lookup * lookup * covariance[_LOOKUP][_LOOKUP]
        + 2.0 * lookup * wire * covariance[_LOOKUP][_WIRE]
        + wire * wire * covariance[_WIRE][_WIRE],
        0.0,
    )
