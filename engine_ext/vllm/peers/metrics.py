# SPDX-License-Identifier: Apache-2.0
"""What the peer tier counts, under the names that vLLM exposes. Pure; `tier.py` hands it to vLLM's stats hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. Labels are values of small enums, so the number of series is bounded."""

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

PLANS = Metric(
    "vllm:pointsman_plans", Kind.COUNTER, "Plans that arrived with requests, by outcome.", ("outcome",)
)
LOOKUPS = Metric(
    "vllm:pointsman_lookups", Kind.COUNTER, "Chunks asked from peers, by how it was settled.", ("outcome",)
)
LOOKUP_SECONDS = Metric(
    "vllm:pointsman_lookup_seconds", Kind.HISTOGRAM, "From a question to a peer to its answer.", (), SECONDS
)
PULLS = Metric(
    "vllm:pointsman_pulls", Kind.COUNTER, "Pulls from one source, by outcome.", ("kind", "outcome")
)
PULL_BYTES = Metric("vllm:pointsman_pull_bytes", Kind.COUNTER, "Bytes of chunks that arrived.", ("kind",))
PULL_SECONDS = Metric(
    "vllm:pointsman_pull_seconds", Kind.HISTOGRAM, "Transfer of one complete pull.", ("kind",), SECONDS
)
SERVED = Metric(
    "vllm:pointsman_served_chunks", Kind.COUNTER, "Chunks that peers asked from us, by answer.", ("answer",)
)
LEASES = Metric("vllm:pointsman_leases", Kind.GAUGE, "Lookups of peers whose chunks are pinned now.")
LEASED = Metric("vllm:pointsman_leased_chunks", Kind.GAUGE, "Chunks that are pinned for peers now.")
QUARANTINED = Metric(
    "vllm:pointsman_quarantined_chunks",
    Kind.GAUGE,
    "Chunks that a late write may still hit, kept from reuse.",
)
UNPROVEN = Metric(
    "vllm:pointsman_unproven_releases",
    Kind.COUNTER,
    "Chunks that left quarantine because time passed, after a pull from an in-tree peer failed.",
)

METRICS = (
    PLANS,
    LOOKUPS,
    LOOKUP_SECONDS,
    PULLS,
    PULL_BYTES,
    PULL_SECONDS,
    SERVED,
    LEASES,
    LEASED,
    QUARANTINED,
    UNPROVEN,
)

Series = tuple[Metric, tuple[str, ...]]


@dataclass(slots=True)
class Tally:
    """Observations since the last `take`."""

    counts: dict[Series, float] = field(default_factory=dict)
    samples: dict[Series, list[float]] = field(default_factory=dict)

    def count(self, metric: Metric, *labels: str, by: float = 1) -> None:
        if by:
            self.counts[metric, labels] = self.counts.get((metric, labels), 0) + by

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        self.samples.setdefault((metric, labels), []).append(value)

    def take(self) -> Tally:
        """What was observed; starts again from nothing."""
        taken = Tally(self.counts, self.samples)
        self.counts, self.samples = {}, {}
        return taken
