# SPDX-License-Identifier: Apache-2.0
"""What the parts of a load, as an engine extension measured them, teach the owners of the constants. Pure.

A part is its prior times the factors, so that its logarithm is a measurement of theirs with known slopes. The noise is
larger than that of a time to first token: a request waits for steps of the engine that these parts do not have, and
its own time to first token is learnt from too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from router.costs.filter import learn_failed_part, learn_part
from router.costs.observation import LINK_TERMS, WORKER_TERMS, PullObservation, TierObservation
from router.costs.profile import CostProfile
from router.costs.scales import LogScales, factors

_LOOKUP_NOISE = 0.5
_TRANSFER_NOISE = 0.3
_LEAST_TRANSFER_S = 1e-3
"""A shorter transfer is mostly what the formula counts as lookup."""
_RAM, _STORAGE = WORKER_TERMS.index("ram"), WORKER_TERMS.index("storage")


class _Part(NamedTuple):
    """Expected seconds, and the share of each factor in them."""

    seconds: float
    slope: list[float]


def learn_pull(profile: CostProfile, seen: PullObservation, fleet: LogScales, link: LogScales) -> bool:
    """Lookup and transfer of one pull; False where it said nothing."""
    owners = [fleet, link]
    learnt = False
    if seen.lookup_s is not None:
        part = _lookup(profile, seen, factors(fleet, link))
        learn_part(owners, part.slope, part.seconds, seen.lookup_s, _LOOKUP_NOISE, "lookup")
        learnt = True
    wire = _wire(profile, seen, factors(fleet, link))
    if seen.failed:
        learn_failed_part(link, [0.0, 0.0, 1.0, 0.0])
        return True
    if seen.transfer_s is not None and wire.seconds >= _LEAST_TRANSFER_S:
        learn_part(owners, wire.slope, wire.seconds, seen.transfer_s, _TRANSFER_NOISE, "wire")
        learnt = True
    return learnt


def learn_tier(profile: CostProfile, seen: TierObservation, fleet: LogScales, worker: LogScales) -> bool:
    """Promotion, or reading from storage; False where it said nothing."""
    term = _RAM if seen.tier == "ram" else _STORAGE
    size = seen.tokens * profile.kv_bytes_per_token
    prior_s = (
        profile.ram_start_s + size / profile.ram_bytes_per_s
        if seen.tier == "ram"
        else profile.storage_start_s + size / profile.storage_bytes_per_s
    )
    expected_s = prior_s * factors(fleet, worker)[term]
    if expected_s <= 0.0 or seen.tokens <= 0:
        return False
    slope = [0.0] * len(WORKER_TERMS)
    slope[term] = 1.0
    learn_part([fleet, worker], slope, expected_s, seen.seconds, _TRANSFER_NOISE, seen.tier)
    return True


def _lookup(profile: CostProfile, seen: PullObservation, link: list[float]) -> _Part:
    connect_s = 0.0 if seen.connected else profile.peer_connect_s * link[LINK_TERMS.index("connect")]
    lookup_s = profile.peer_lookup_s * link[LINK_TERMS.index("lookup")]
    seconds = max(connect_s + lookup_s, 1e-6)
    return _Part(seconds, [connect_s / seconds, lookup_s / seconds, 0.0, 0.0])


def _wire(profile: CostProfile, seen: PullObservation, link: list[float]) -> _Part:
    log_share = profile.peer_share_exponent * link[LINK_TERMS.index("share")] * math.log1p(seen.other_pulls)
    alone_s = seen.tokens * profile.kv_bytes_per_token / profile.peer_bytes_per_s
    seconds = alone_s * link[LINK_TERMS.index("wire")] * math.exp(log_share)
    return _Part(seconds, [0.0, 0.0, 1.0, log_share])
