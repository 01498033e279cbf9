# SPDX-License-Identifier: Apache-2.0
"""What was learnt, as plain values: to keep over a restart, and to show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.costs.profile import CostProfile
from router.costs.scales import LARGEST, LogScales

_INTERVAL = 1.96
_RATES = {"ram_bytes_per_s", "storage_bytes_per_s", "peer_bytes_per_s"}


class ScalesState(msgspec.Struct, frozen=True):
    """The log factors of one owner; ages in seconds, so that another process's clock can go on."""

    mean: list[float]
    covariance: list[list[float]]
    counts: list[int]
    relaxed_age_s: float
    observed_age_s: float

    def fits(self, size: int) -> bool:
        """Whether this is a state of ``size`` factors, with variances that are none below 0."""
        lengths = {len(self.mean), len(self.counts), len(self.covariance), *map(len, self.covariance)}
        numbers = (*self.mean, *(value for row in self.covariance for value in row))
        return (
            lengths == {size}
            and all(map(math.isfinite, numbers))
            and all(row[i] >= 0 for i, row in enumerate(self.covariance))
            and min(self.relaxed_age_s, self.observed_age_s) >= 0
        )


class CalibrationState(msgspec.Struct, frozen=True):
    """Everything learnt over one profile."""

    profile: CostProfile
    observations: int
    decode_observations: int
    fleet: ScalesState
    fleet_links: ScalesState
    workers: dict[str, ScalesState]
    links: list[tuple[str, str, ScalesState]]
    """(source, destination, factors)."""

    def fits(self, worker_terms: int, link_terms: int) -> bool:
        """Whether all owners have as many factors as the present formulas."""
        workers = [self.fleet, *self.workers.values()]
        links = [self.fleet_links, *(one[2] for one in self.links)]
        return all(one.fits(worker_terms) for one in workers) and all(one.fits(link_terms) for one in links)


def dump_scales(scales: LogScales, now_s: float) -> ScalesState:
    """Rows and means are replaced when they change, so they need no copy."""
    return ScalesState(
        mean=scales.mean,
        covariance=[*scales.covariance],
        counts=[*scales.counts],
        relaxed_age_s=now_s - scales.at_s,
        observed_age_s=now_s - scales.observed_s,
    )


def load_scales(scales: LogScales, state: ScalesState, now_s: float) -> None:
    """Replace what ``scales`` holds; the sizes are the same."""
    scales.mean = [min(max(value, -LARGEST), LARGEST) for value in state.mean]
    scales.covariance = [[*row] for row in state.covariance]
    scales.counts = [*state.counts]
    scales.at_s = now_s - state.relaxed_age_s
    scales.observed_s = now_s - state.observed_age_s


def prior_constants(profile: CostProfile) -> tuple[dict[str, float], dict[str, float]]:
    """The constant that each factor is shown as, in the order of ``WORKER_TERMS`` and ``LINK_TERMS``.

    The factor of ``prefill_start_s`` is also that of ``admit_s``, the bandwidths' factors also those of their starts.
    """
    worker = (
        "prefill_start_s",
        "prefill_s_per_token",
        "prefill_s_per_token_squared",
        "decode_s_per_request",
        "ram_bytes_per_s",
        "storage_bytes_per_s",
        "decode_start_s",
    )
    link = ("peer_connect_s", "peer_lookup_s", "peer_bytes_per_s", "peer_share_exponent")
    return {name: getattr(profile, name) for name in worker}, {name: getattr(profile, name) for name in link}


def show_constants(priors: Mapping[str, float], owners: Sequence[LogScales]) -> dict[str, Any]:
    """By constant: prior, fit, n (of the last owner) and the interval that holds it with 95 %."""
    shown: dict[str, Any] = {}
    for i, (name, prior) in enumerate(priors.items()):
        log = min(max(sum(owner.mean[i] for owner in owners), -LARGEST), LARGEST)
        half = _INTERVAL * math.sqrt(max(sum(owner.covariance[i][i] for owner in owners), 0.0))
        sign = -1.0 if name in _RATES else 1.0
        shown[name] = {
            "prior": prior,
            "fit": prior * math.exp(sign * log),
            "n": owners[-1].counts[i],
            "interval": [prior * math.exp(sign * log - half), prior * math.exp(sign * log + half)],
        }
    return shown
