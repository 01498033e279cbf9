# SPDX-License-Identifier: Apache-2.0
"""A time to first token from prior seconds and scale factors, and how much each factor matters to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.costs.observation import PriorSeconds


class Estimate(NamedTuple):
    """A prediction; a slope is the change of its logarithm with the logarithm of a factor: the share of the time."""

    ttft_s: float
    worker_slope: list[float]
    link_slope: list[float]
    pull_slope: list[float]
    """Shares of the pull alone."""
    pull_s: float
    """Connecting, lookup and transfer, whether or not a queue hides them."""
    step_s: float
    """Fixed part of a prefill: about one step of the engine."""


def estimate(prior: PriorSeconds, queue_s: float, worker: Sequence[float], link: Sequence[float]) -> Estimate:
    """The formula of ``router.costs.model``; factors in the order of ``WORKER_TERMS`` and ``LINK_TERMS``."""
    start_s, token_s, square_s = (
        prior.start_s * worker[0],
        prior.token_s * worker[1],
        prior.square_s * worker[2],
    )
    alone_s = start_s + token_s + square_s
    slow = prior.slowdown * worker[3]
    admit_s, ram_s, storage_s = (
        prior.admit_s * worker[0],
        prior.ram_s * worker[4],
        prior.storage_s * worker[5],
    )
    connect_s, lookup_s, wire_s = prior.connect_s * link[0], prior.lookup_s * link[1], prior.wire_s * link[2]
    pull_s = connect_s + lookup_s + wire_s
    load_s = admit_s + ram_s + storage_s + pull_s
    ttft_s = max(queue_s, load_s) + alone_s * (1 + slow)
    # A load that is shorter than the queue costs nothing, so its time says nothing.
    shown = 1.0 / ttft_s if load_s >= queue_s else 0.0
    stretched = (1 + slow) / ttft_s
    return Estimate(
        ttft_s,
        [
            start_s * stretched + admit_s * shown,
            token_s * stretched,
            square_s * stretched,
            alone_s * slow / ttft_s,
            ram_s * shown,
            storage_s * shown,
        ],
        [connect_s * shown, lookup_s * shown, wire_s * shown],
        [connect_s / pull_s, lookup_s / pull_s, wire_s / pull_s] if pull_s else [0.0, 0.0, 0.0],
        pull_s,
        start_s,
    )
