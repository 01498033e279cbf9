# SPDX-License-Identifier: Apache-2.0
"""Metrics of several processes as those of one.

Counters and histograms are told as what was added since the last time, so that a total never falls because a process
died: it loses what that process had not told yet. Gauges are told as they are and summed over the processes that live.
A metric named ``*_info`` is the same everywhere and is not summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.processes.seen import FamilyTold, SampleTold

_Sample = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels."""
_GROWING = {"counter", "histogram", "summary"}
_SAME_EVERYWHERE = "_info"


class MetricChanges:
    """Of one registry: what to tell. O(samples)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._told: dict[_Sample, float] = {}

    def take(self) -> list[FamilyTold]:
        """What was added since the last call; gauges as they are now."""
        families = []
        for metric in self._registry.collect():
            grows = metric.type in _GROWING
            samples = []
            for sample in metric.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = tuple(sorted(sample.labels.items()))
                value = sample.value
                if grows:
                    key = (sample.name, labels)
                    value -= self._told.get(key, 0.0)
                    if not value and key in self._told:
                        continue
                    self._told[key] = sample.value
                samples.append(SampleTold(sample.name, labels, value))
            if samples:
                families.append(FamilyTold(metric.name, metric.documentation, metric.type, samples))
        return families


@dataclass(slots=True)
class _Family:
    text: str
    kind: str
    samples: dict[_Sample, float] = field(default_factory=dict)


class MetricTotals(Collector):
    """Of all processes that ever told; a collector."""

    def __init__(self) -> None:
        self._grown: dict[str, _Family] = {}
        self._gauges: dict[int, dict[str, _Family]] = {}
        """By process."""

    def add(self, process: int, families: Iterable[FamilyTold]) -> None:
        """What a process has told."""
        gauges: dict[str, _Family] = {}
        for told in families:
            grows = told.kind in _GROWING
            into = self._grown if grows else gauges
            family = into.setdefault(told.name, _Family(told.text, told.kind))
            for sample in told.samples:
                key = (sample.name, sample.labels)
                family.samples[key] = sample.value + (family.samples.get(key, 0.0) if grows else 0.0)
        self._gauges[process] = gauges

    def forget(self, process: int) -> None:
        """It is gone, and its gauges with it."""
        self._gauges.pop(process, None)

    def collect(self) -> Iterable[Metric]:
        yield from map(_metric, self._grown.keys(), self._grown.values())
        summed: dict[str, _Family] = {}
        for gauges in self._gauges.values():
            _add(summed, gauges)
        yield from map(_metric, summed.keys(), summed.values())


class MergedMetrics(Collector):
    """Several collectors as one: families of one name are put together."""

    def __init__(self, *collectors: Collector) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, _Family] = {}
        for collector in self._collectors:
            families: dict[str, _Family] = {}
            for metric in collector.collect():
                family = families.setdefault(metric.name, _Family(metric.documentation, metric.type))
                for sample in metric.samples:
                    if not sample.name.endswith("_created"):
                        labels = tuple(sorted(sample.labels.items()))
                        family.samples[sample.name, labels] = sample.value
            _add(merged, families)
        yield from map(_metric, merged.keys(), merged.values())


def reaped_promises(registry: CollectorRegistry) -> Counter:
    """Every process ends what dead ones left open, and counts it."""
    return Counter(
        "pointsman_promises_reaped",
        "Requests on the load board that ended because their process had died.",
        registry=registry,
    )


def _add(into: dict[str, _Family], families: Mapping[str, _Family]) -> None:
    for name, family in families.items():
        total = into.setdefault(name, _Family(family.text, family.kind))
        for key, value in family.samples.items():
            if name.endswith(_SAME_EVERYWHERE):
                total.samples[key] = max(value, total.samples.get(key, value))
            else:
                total.samples[key] = total.samples.get(key, 0.0) + value


def _metric(name: str, family: _Family) -> Metric:
    metric = Metric(name, family.text, family.kind)
    for (sample, labels), value in family.samples.items():
        metric.add_sample(sample, dict(labels), value)
    return metric
