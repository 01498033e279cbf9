# SPDX-License-Identifier: Apache-2.0
"""Log scale factors with their covariance, of one owner: the fleet, a worker or a link. Pure.

A constant is its prior times ``exp`` of the sum of its owners' log factors, so a factor is 0 until something is
learnt. Left alone, the log factors follow an Ornstein-Uhlenbeck process: their mean returns to 0 and their variance
to that of the prior. That is the process noise that lets the filter follow drifts, and what makes a link that was
slow worth another try.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

LARGEST = math.log(50.0)
"""A constant stays within 1/50 to 50 times its prior."""
_PUBLISH = 0.01
_RELAX_STEP = 0.005
_COUNTED_SHARE = 0.05


class LogScales:
    """Mean and covariance of log factors; operations cost O(their number squared)."""

    __slots__ = (
        "at_s",
        "counts",
        "covariance",
        "mean",
        "observed_s",
        "published",
        "relax_s",
        "runs",
        "variances",
    )

    def __init__(self, variances: Sequence[float], relax_s: float, now_s: float = 0.0) -> None:
        """Variance of the prior of each log factor; ``relax_s`` is the time constant of the return to it.

        A factor whose prior has no variance is never learnt.
        """
        size = len(variances)
        self.variances = variances
        self.relax_s = relax_s
        self.at_s = now_s
        self.observed_s = now_s
        self.mean = [0.0] * size
        self.published = [0.0] * size
        """The mean that planning was last given."""
        self.covariance = [
            [variance if i == j else 0.0 for j in range(size)] for i, variance in enumerate(variances)
        ]
        self.counts = [0] * size
        """Observations of which a factor scaled more than a twentieth."""
        self.runs: dict[str, int] = {}
        """Large surprises of one direction in a row, by kind of observation: positive slower than predicted."""

    def relax(self, now_s: float) -> None:
        """Let time pass."""
        passed_s = now_s - self.at_s
        if passed_s < _RELAX_STEP * self.relax_s:
            return  # too little to matter; it adds up
        self.at_s = now_s
        keep = math.exp(-passed_s / self.relax_s)
        keep2 = keep * keep
        self.mean = [keep * value for value in self.mean]
        self.covariance = [[keep2 * value for value in row] for row in self.covariance]
        self._widen(1.0 - keep2)

    def project(self, slope: list[float]) -> tuple[list[float], float]:
        """Covariance times ``slope``, and the variance of a prediction with that slope."""
        spread = [sum(map(mul, row, slope)) for row in self.covariance]
        return spread, max(sum(map(mul, spread, slope)), 0.0)

    def correct(self, spread: list[float], slope: list[float], innovation: float, variance: float) -> None:
        """One Kalman step; ``spread`` is from ``project``, ``variance`` that of the whole prediction."""
        self.observed_s = self.at_s
        step = innovation / variance
        self.mean = [
            min(max(value + part * step, -LARGEST), LARGEST)
            for value, part in zip(self.mean, spread, strict=True)
        ]
        for i, part in enumerate(spread):
            if part:
                share = part / variance
                row = self.covariance[i]
                self.covariance[i] = [a - share * b for a, b in zip(row, spread, strict=True)]
            if slope[i] > _COUNTED_SHARE:
                self.counts[i] += 1

    def count_surprise(self, kind: str, surprise: float, large: float) -> int:
        """Length of the run of large surprises that this one makes."""
        run = self.runs.get(kind, 0)
        if surprise > large:
            run = max(run, 0) + 1
        elif surprise < -large:
            run = min(run, 0) - 1
        else:
            run = 0
        self.runs[kind] = run
        return abs(run)

    def doubt(self) -> None:
        """What was learnt no longer holds: around the present mean, everything is as uncertain as the prior."""
        self._widen(1.0)
        self.runs.clear()

    def _widen(self, share: float) -> None:
        """Add that share of the prior's variance. Rows are replaced, never changed: a dump may hold them."""
        self.covariance = [
            [*row[:i], row[i] + share * self.variances[i], *row[i + 1 :]]
            for i, row in enumerate(self.covariance)
        ]

    def idle(self, now_s: float) -> float:
        """Time constants since the last observation."""
        return (now_s - self.observed_s) / self.relax_s

    def mark(self) -> None:
        """Planning is given the present mean."""
        self.published = self.mean

    def moved(self) -> bool:
        """Whether a factor has changed by a percent since ``mark``."""
        return any(abs(a - b) > _PUBLISH for a, b in zip(self.mean, self.published, strict=True))


def factors(fleet: LogScales, own: LogScales | None) -> list[float]:
    """Scale factors of the fleet and one of its members together, bounded."""
    if own is None:
        return [math.exp(value) for value in fleet.mean]
    return [math.exp(min(max(a + b, -LARGEST), LARGEST)) for a, b in zip(fleet.mean, own.mean, strict=True)]
