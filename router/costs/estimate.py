# SPDX-License-Identifier: Apache-2.0
"""Times from prior seconds and scale factors, and how much each factor matters to them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from router.costs.observation import WORKER_TERMS, DecodeObservation, PriorSeconds
from router.costs.profile import CostProfile

_DECODES = WORKER_TERMS.index("decodes")
_DECODE_START = WORKER_TERMS.index("decode_start")


class Estimate(NamedTuple):
    """A time to first token; a slope is the change of its logarithm with the logarithm of a factor: its share."""

    ttft_s: float
    worker_slope: list[float]
    link_slope: list[float]
    pull_slope: list[float]
    """Shares of the pull alone."""
    pull_s: float
    """Connecting, lookup and transfer, whether or not a queue hides them."""
    pull_shown_s: float
    """The same, 0 where the queue hides it."""
    step_s: float
    """Fixed part of a prefill: about one step of the engine."""


def estimate(prior: PriorSeconds, queue_s: float, worker: Sequence[float], link: Sequence[float]) -> Estimate:
    """The formula of ``router.costs.model``; factors in the order of ``WORKER_TERMS`` and ``LINK_TERMS``."""
    start, token, square, decodes, ram, storage, _ = worker
    start_s, token_s, square_s = prior.start_s * start, prior.token_s * token, prior.square_s * square
    decodes_s = prior.decodes_s * decodes
    admit_s, ram_s, storage_s = prior.admit_s * start, prior.ram_s * ram, prior.storage_s * storage
    connect, lookup, wire, share = link
    connect_s, lookup_s = prior.connect_s * connect, prior.lookup_s * lookup
    log_share = prior.share_exponent * share * prior.log_pulls
    wire_s = prior.wire_s * wire * math.exp(log_share)
    pull_s = connect_s + lookup_s + wire_s
    step_s = start_s + prior.step_token_s * token + prior.step_square_s * square
    load_s = max(queue_s - step_s, 0.0) + admit_s + ram_s + storage_s + pull_s
    ttft_s = max(queue_s, load_s) + start_s + token_s + square_s + decodes_s
    # A load that is shorter than the queue costs nothing, so its time says nothing.
    shown = 1.0 / ttft_s if load_s >= queue_s else 0.0
    pull_seconds = [connect_s, lookup_s, wire_s, wire_s * log_share]
    return Estimate(
        ttft_s,
        [
            start_s / ttft_s + admit_s * shown,
            token_s / ttft_s,
            square_s / ttft_s,
            decodes_s / ttft_s,
            ram_s * shown,
            storage_s * shown,
            0.0,
        ],
        [seconds * shown for seconds in pull_seconds],
        [seconds / pull_s for seconds in pull_seconds] if pull_s else [0.0] * len(pull_seconds),
        pull_s,
        pull_s * ttft_s * shown,
        start_s,
    )


class DecodeEstimate(NamedTuple):
    """Seconds that an answer takes after its first token."""

    decode_s: float
    worker_slope: list[float]


def estimate_decode(profile: CostProfile, seen: DecodeObservation, worker: Sequence[float]) -> DecodeEstimate:
    """One step per token, and the prefills beside it, which are no constant of this estimate."""
    steps = seen.output_tokens - 1
    start_s = steps * profile.decode_start_s * worker[_DECODE_START]
    others_s = steps * profile.decode_s_per_request * worker[_DECODES] * max(seen.decodes - 1, 0)
    decode_s = start_s + others_s + seen.prefill_s
    slope = [0.0] * len(WORKER_TERMS)
    slope[_DECODES], slope[_DECODE_START] = others_s / decode_s, start_s / decode_s
    return DecodeEstimate(decode_s, slope)
