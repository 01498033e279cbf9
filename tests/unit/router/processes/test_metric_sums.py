# SPDX-License-Identifier: Apache-2.0
"""Metrics of several processes as those of one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.processes.metric_sums import MergedMetrics, MetricChanges, MetricTotals


class Process:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("requests", "Requests.", ["worker"], registry=self.registry)
        self.waiting = Gauge("waiting", "Waiting.", registry=self.registry)
        self.seconds = Histogram("seconds", "Seconds.", buckets=(1.0, 2.0), registry=self.registry)
        self.info = Gauge("build_info", "Version.", registry=self.registry)
        self.info.set(1)
        self.changes = MetricChanges(self.registry)


def read(*collectors: object) -> dict[str, float]:
    found = {}
    for metric in MergedMetrics(*collectors).collect():  # type: ignore[arg-type]
        for sample in metric.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_counters_and_histograms_add_up_and_gauges_are_those_of_the_living() -> None:
    one, two, totals = Process(), Process(), MetricTotals()
    one.requests.labels("a").inc(3)
    two.requests.labels("a").inc(4)
    two.requests.labels("b").inc()
    one.waiting.set(2)
    two.waiting.set(5)
    one.seconds.observe(0.5)
    two.seconds.observe(1.5)
    totals.add(0, one.changes.take())
    totals.add(1, two.changes.take())
    one.requests.labels("a").inc()
    totals.add(0, one.changes.take())
    found = read(totals)
    assert found["requests_total{worker=a}"] == 8
    assert found["requests_total{worker=b}"] == 1
    assert found["waiting"] == 7
    assert [found[f"seconds_bucket{{le={le}}}"] for le in ("1.0", "2.0", "+Inf")] == [1, 2, 2]
    assert found["seconds_sum"] == 2.0
    assert found["build_info"] == 1


def test_a_total_does_not_fall_when_a_process_dies_and_another_takes_its_place() -> None:
    one, totals = Process(), MetricTotals()
    one.requests.labels("a").inc(3)
    one.waiting.set(2)
    totals.add(0, one.changes.take())
    totals.forget(0)
    assert read(totals)["requests_total{worker=a}"] == 3
    assert "waiting" not in read(totals)
    again = Process()
    again.requests.labels("a").inc()
    totals.add(0, again.changes.take())
    assert read(totals)["requests_total{worker=a}"] == 4


def test_the_keeper_s_own_metrics_of_the_same_name_are_put_together_with_those_of_others() -> None:
    own, one, totals = Process(), Process(), MetricTotals()
    one.requests.labels("a").inc(3)
    own.requests.labels("a").inc(2)
    totals.add(0, one.changes.take())
    assert read(own.registry, totals)["requests_total{worker=a}"] == 5
