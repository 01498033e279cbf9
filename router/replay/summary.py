# SPDX-License-Identifier: Apache-2.0
"""The figures of one replay. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from router.replay.virtual import ReplayedRequest

SOURCES = ("hbm", "ram", "peer", "storage")


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """The figures of one replay."""

    requests: int
    hit_rate: float
    """Cached prompt tokens over prompt tokens."""
    hit_rates: dict[str, float]
    """The same by where the tokens came from: hbm, ram, peer, storage."""
    recomputed_tokens: int
    """Prompt tokens that were not cached."""
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    requests_per_s: float
    """Over the time from the first arrival to the last token."""
    output_tokens_per_s: float
    largest_share: float
    """Requests of the busiest worker over the mean."""
    pulls: int
    stale: int
    """Requests whose cached tokens were fewer than predicted."""
    ttft_error_median: float
    """Distance of the predicted from the observed time to first token, over the observed."""


def summarize(replayed: Sequence[ReplayedRequest], workers: int) -> ReplaySummary:
    """The figures of a replay whose requests are all answered.

    Raises:
        ValueError: no requests.
    """
    if not replayed:
        raise ValueError("a summary needs requests")
    ttfts = sorted(one.ttft_s for one in replayed if one.ttft_s is not None)
    prompt = sum(one.prompt_tokens for one in replayed)
    cached = sum(one.cached_tokens or 0 for one in replayed)
    span_s = max(one.finished_s or 0.0 for one in replayed) - min(one.arrival_s for one in replayed)
    errors = [abs(one.predicted_ttft_s - one.ttft_s) / one.ttft_s for one in replayed if one.ttft_s]
    return ReplaySummary(
        requests=len(replayed),
        hit_rate=cached / prompt,
        hit_rates={
            source: sum(one.cached_by_tier.get(source, 0) for one in replayed) / prompt for source in SOURCES
        },
        recomputed_tokens=prompt - cached,
        ttft_p50_s=_quantile(ttfts, 0.50),
        ttft_p99_s=_quantile(ttfts, 0.99),
        ttft_mean_s=fmean(ttfts),
        requests_per_s=len(replayed) / span_s,
        output_tokens_per_s=sum(one.output_tokens for one in replayed) / span_s,
        largest_share=max(Counter(one.worker for one in replayed).values()) * workers / len(replayed),
        pulls=sum(one.source is not None for one in replayed),
        stale=sum((one.cached_tokens or 0) < one.predicted_cached_tokens for one in replayed),
        ttft_error_median=median(errors),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
