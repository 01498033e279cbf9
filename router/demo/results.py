# SPDX-License-Identifier: Apache-2.0
"""What a run of the workload came to: samples of the client and records of the gateway as figures. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.decisions.record import DecisionRecord
from router.demo.client import Sample

PATHS = ("hbm", "ram", "peer", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One policy's run."""

    policy: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """As the engines reported them."""
    ttft_p50_s: float
    ttft_p99_s: float
    path_blocks: Mapping[str, int] | None
    """Blocks by planned path; None for a policy that plans no paths."""
    peer_pulls: int
    """Requests for which a pull was planned and whose engine reported its tokens as cached."""
    stale: int
    """Decisions whose engine found less than was promised."""
    largest_share: float
    """Of the requests, at the worker that got most."""
    overhead_p50_s: float
    """TTFT outside of the chosen worker: client, gateway, tokenisation."""
    prediction_error_p50_s: float | None
    """Between predicted TTFT and the one that the gateway observed, absolute; None without predictions."""


def summarise(policy: str, samples: Sequence[Sample], records: Sequence[DecisionRecord]) -> RunResult:
    """The figures of a run; ``records`` are joined by request id, the last attempt counts.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a run without requests")
    last = {record.id: record for record in sorted(records, key=lambda record: record.attempt)}
    joined = [(sample, last[sample.request_id]) for sample in samples if sample.request_id in last]
    planned = [record for _, record in joined if record.prompt_tokens]
    blocks: Counter[str] = Counter()
    for record in planned:
        blocks.update(record.path_blocks)
    times_s = [sample.ttft_s for sample in samples]
    workers = Counter(sample.worker for sample in samples)
    outside = [
        sample.ttft_s - record.observed.ttft_s
        for sample, record in joined
        if record.observed.ttft_s is not None
    ]
    errors = [
        abs(record.predicted_ttft_s - record.observed.ttft_s)
        for record in planned
        if record.observed.ttft_s is not None
    ]
    return RunResult(
        policy=policy,
        requests=len(samples),
        prompt_tokens=sum(sample.prompt_tokens for sample in samples),
        cached_tokens=sum(sample.cached_tokens for sample in samples),
        ttft_p50_s=percentile(times_s, 50),
        ttft_p99_s=percentile(times_s, 99),
        path_blocks={path: blocks[path] for path in PATHS} if planned else None,
        peer_pulls=sum(pulled(record, sample.cached_tokens) for sample, record in joined),
        stale=sum(bool(record.observed.stale) for record in planned),
        largest_share=max(workers.values()) / len(samples),
        overhead_p50_s=percentile(outside, 50) if outside else 0.0,
        prediction_error_p50_s=percentile(errors, 50) if errors else None,
    )


def pulled(record: DecisionRecord, cached_tokens: int) -> bool:
    """Whether a planned pull took place: all that was promised, the peer's blocks included, was cached.

    The engine's count has no sources, so a pull that brought only a part is not counted.
    """
    return record.path_blocks.get("peer", 0) > 0 and cached_tokens >= record.predicted_cached_tokens


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that at least ``percent`` per cent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1]
