# SPDX-License-Identifier: Apache-2.0
"""One step of the filter: what a surprise teaches the owners of a prediction. Pure.

Robust in two ways: a surprise counts for at most two standard deviations, so one outlier moves little; three large
surprises of one kind and direction in a row mean that the worker or link has changed, and its variance is raised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.costs.estimate import DecodeEstimate, Estimate
from router.costs.scales import LogScales

_NOISE = 0.15  # relative standard deviation of a time on an idle worker
_CLIP = 2.0
_SURPRISE = 3.0
_RUN = 3
_BLAMES_LINK = 0.3
_FAILED_PULL = math.log(4.0)

Owners = Sequence[tuple[LogScales, list[float]]]
"""Each owner with the slopes of its factors."""


def learn_ttft(
    expected: Estimate,
    workers: Sequence[LogScales],
    links: Sequence[LogScales],
    queue_s: float,
    ttft_s: float,
) -> None:
    """A time to first token of a plan that was followed; of each sequence, the last is the member itself."""
    innovation = math.log(max(ttft_s, 1e-6) / expected.ttft_s)
    owners = [(owner, expected.worker_slope) for owner in workers]
    owners += [(owner, expected.link_slope) for owner in links]
    queue_share = queue_s / expected.ttft_s
    # The step that runs when a request comes must end first: half a step of jitter.
    step_share = expected.step_s / expected.ttft_s / 2
    noise = _NOISE**2 + queue_share**2 + step_share**2
    blames_link = links and expected.pull_shown_s / expected.ttft_s > _BLAMES_LINK
    _correct(owners, innovation, noise, links[-1] if blames_link else workers[-1], "ttft")


def learn_failed_pull(expected: Estimate, link: LogScales, ttft_s: float) -> None:
    """Blocks were promised and did not come: stalled, refused or gone.

    Only the link is blamed, for the time that the rest does not explain, and at least as for a slow one.
    """
    pull_s = ttft_s - (expected.ttft_s - expected.pull_s)
    innovation = math.log(pull_s / expected.pull_s) if pull_s > 0 else 0.0
    _correct([(link, expected.pull_slope)], max(innovation, _FAILED_PULL), _NOISE**2, link, "ttft")


def learn_part(
    owners: Sequence[LogScales],
    slope: list[float],
    expected_s: float,
    seconds: float,
    noise: float,
    kind: str,
) -> None:
    """A measured part of a load; the last owner is the member itself. ``noise``: relative standard deviation."""
    innovation = math.log(max(seconds, 1e-6) / expected_s)
    _correct([(owner, slope) for owner in owners], innovation, noise**2, owners[-1], kind)


def learn_failed_part(link: LogScales, slope: list[float]) -> None:
    """Nothing came within the deadline: as for a link that is four times slower."""
    _correct([(link, slope)], _FAILED_PULL, _NOISE**2, link, "wire")


def learn_decode(
    expected: DecodeEstimate, workers: Sequence[LogScales], steps: int, prefill_s: float, decode_s: float
) -> None:
    """The time that an answer took after its first token, in ``steps`` steps and beside ``prefill_s`` of others."""
    innovation = math.log(max(decode_s, 1e-6) / expected.decode_s)
    prefill_share = prefill_s / expected.decode_s
    noise = _NOISE**2 + prefill_share**2 + (1.0 / steps) ** 2
    owners = [(owner, expected.worker_slope) for owner in workers]
    _correct(owners, innovation, noise, workers[-1], "decode")


def _correct(owners: Owners, innovation: float, noise: float, blamed: LogScales, kind: str) -> None:
    spreads = [owner.project(slope) for owner, slope in owners]
    variance = noise + sum(own_variance for _, own_variance in spreads)
    deviation = math.sqrt(variance)
    surprise = innovation / deviation
    clipped = min(max(surprise, -_CLIP), _CLIP) * deviation
    for (owner, slope), (spread, _) in zip(owners, spreads, strict=True):
        owner.correct(spread, slope, clipped, variance)
    if blamed.count_surprise(kind, surprise, _SURPRISE) >= _RUN:
        blamed.doubt()
