# SPDX-License-Identifier: Apache-2.0
"""The figures of one replay. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from router.replay.virtual import ReplayedRequest

SOURCES = ("hbm", "ram", "peer", "storage")
LINKS = ("ram_load", "ram_store", "peer", "storage_read", "storage_write")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a client wants: a first token in time and the others at a pace. Seconds."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05
    """Per output token behind the first, on average over one answer."""


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """The figures of one replay. Times, tokens and rates are those of answered requests; NaN where there are none."""

    requests: int
    """All of them, answered or not."""
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
    tpot_p50_s: float
    """Seconds per output token behind the first; of answers with more than one."""
    tpot_p99_s: float
    goodput: float
    """Share of all requests that were answered within the SLO."""
    goodput_requests_per_s: float
    goodput_output_tokens_per_s: float
    failed: int
    retried: int
    """Requests that more than one worker was tried for, answered or not."""
    lookup_total_s: float
    """From questions to peers to their last answers, lost attempts included."""
    lookup_mean_s: float
    """Per question."""
    promotion_total_s: float
    """From the starts of loads from RAM into HBM to their ends."""
    promotion_mean_s: float
    """Per load."""
    moved_bytes: dict[str, int]
    """By link: ram_load (RAM to HBM), ram_store, peer, storage_read, storage_write."""
    evicted_before_reuse: int
    """Prompt blocks that were computed again after a worker had given them up for others, on its last tier."""


def summarize(replayed: Sequence[ReplayedRequest], workers: int, slo: Slo | None = None) -> ReplaySummary:
    """The figures of a replay that is over.

    Raises:
        ValueError: no requests.
    """
    if not replayed:
        raise ValueError("a summary needs requests")
    slo = slo or Slo()
    answered = [one for one in replayed if one.ttft_s is not None and one.finished_s is not None]
    good = [one for one in answered if _within(one, slo)]
    ttfts = sorted(one.ttft_s or 0.0 for one in answered)
    tpots = sorted(tpot_s for one in answered if (tpot_s := _tpot_s(one)) is not None)
    prompt = sum(one.prompt_tokens for one in answered)
    cached = sum(one.cached_tokens or 0 for one in answered)
    span_s = _span_s(replayed)
    busiest = Counter(one.worker for one in replayed if one.worker)
    moved = [one.moved for one in replayed]
    lookup_s = sum(one.lookup_s for one in moved)
    promotion_s = sum(one.promotion_s for one in moved)
    return ReplaySummary(
        requests=len(replayed),
        hit_rate=_ratio(cached, prompt),
        hit_rates={
            source: _ratio(sum(one.cached_by_tier.get(source, 0) for one in answered), prompt)
            for source in SOURCES
        },
        recomputed_tokens=prompt - cached,
        ttft_p50_s=_quantile(ttfts, 0.50),
        ttft_p99_s=_quantile(ttfts, 0.99),
        ttft_mean_s=fmean(ttfts) if ttfts else math.nan,
        requests_per_s=len(answered) / span_s,
        output_tokens_per_s=sum(one.output_tokens for one in answered) / span_s,
        largest_share=_ratio(max(busiest.values(), default=0) * workers, busiest.total()),
        pulls=sum(one.source is not None for one in replayed),
        stale=sum((one.cached_tokens or 0) < one.predicted_cached_tokens for one in answered),
        ttft_error_median=_ttft_error(answered),
        tpot_p50_s=_quantile(tpots, 0.50),
        tpot_p99_s=_quantile(tpots, 0.99),
        goodput=len(good) / len(replayed),
        goodput_requests_per_s=len(good) / span_s,
        goodput_output_tokens_per_s=sum(one.output_tokens for one in good) / span_s,
        failed=sum(one.failed for one in replayed),
        retried=sum(one.attempts > 1 for one in replayed),
        lookup_total_s=lookup_s,
        lookup_mean_s=_ratio(lookup_s, sum(one.lookups for one in moved)),
        promotion_total_s=promotion_s,
        promotion_mean_s=_ratio(promotion_s, sum(one.promotions for one in moved)),
        moved_bytes={link: sum(getattr(one, f"{link}_bytes") for one in moved) for link in LINKS},
        evicted_before_reuse=sum(one.evicted_blocks for one in replayed),
    )


def _within(one: ReplayedRequest, slo: Slo) -> bool:
    ttft_s, tpot_s = one.ttft_s, _tpot_s(one)
    return ttft_s is not None and ttft_s <= slo.ttft_s and (tpot_s is None or tpot_s <= slo.tpot_s)


def _tpot_s(one: ReplayedRequest) -> float | None:
    if one.ttft_s is None or one.finished_s is None or one.output_tokens < 2:
        return None
    return (one.finished_s - one.arrival_s - one.ttft_s) / (one.output_tokens - 1)


def _ttft_error(answered: Sequence[ReplayedRequest]) -> float:
    """What was predicted counts from when the last attempt was sent."""
    errors = []
    for one in answered:
        observed_s = (one.ttft_s or 0.0) - one.delay_s
        if observed_s > 0:
            errors.append(abs(one.predicted_ttft_s - observed_s) / observed_s)
    return median(errors) if errors else math.nan


def _span_s(replayed: Sequence[ReplayedRequest]) -> float:
    ends_s = [one.finished_s for one in replayed if one.finished_s is not None]
    return max(ends_s) - min(one.arrival_s for one in replayed) if ends_s else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else math.nan
