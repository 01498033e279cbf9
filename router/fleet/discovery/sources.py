# SPDX-License-Identifier: Apache-2.0
"""All sources of workers that are configured beside ``fleet.workers``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.config_fleet import FleetConfig, WorkerEntry
from router.fleet.discovery.api import check_usable
from router.fleet.discovery.file import FileDiscovery
from router.fleet.discovery.kubernetes import KubernetesDiscovery
from router.fleet.fleet import Fleet


class Source(Protocol):
    """Where workers come from, while it runs."""

    name: str

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def synced(self) -> bool: ...
    def priority_of(self, objective: str) -> int | None: ...
    def objectives(self) -> Mapping[str, int]: ...
    def troubles(self) -> list[str]: ...
    def counts(self) -> dict[str, int]: ...


class Discovery(Collector):
    """Starts and stops them, and says how they are; also a collector of metrics."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)

    async def start(self) -> None:
        """Returns once the first workers are known, as far as sources answer in time.

        Raises:
            ConfigError: a source cannot be used at all.
        """
        for source in self._sources:
            await source.start()

    async def stop(self) -> None:
        for source in self._sources:
            await source.stop()

    def synced(self) -> bool:
        """Whether every source has told its workers at least once."""
        return all(source.synced() for source in self._sources)

    def priority_of(self, objective: str) -> int | None:
        """The priority of a named objective; None where nobody knows it."""
        found = (source.priority_of(objective) for source in self._sources)
        return next((priority for priority in found if priority is not None), None)

    def objectives(self) -> dict[str, int]:
        """Priorities of all of them by name."""
        return {name: n for source in reversed(self._sources) for name, n in source.objectives().items()}

    def troubles(self) -> list[str]:
        """Why workers may not be those that should be, each with its source."""
        return [f"{source.name}: {trouble}" for source in self._sources for trouble in source.troubles()]

    def collect(self) -> Iterable[Metric]:
        label = ["source"]
        degraded = GaugeMetricFamily(
            "pointsman_discovery_degraded", "1 while workers may not be those that should be.", labels=label
        )
        workers = GaugeMetricFamily(
            "pointsman_discovery_workers", "Workers in the fleet by source.", labels=label
        )
        rejected = GaugeMetricFamily(
            "pointsman_discovery_rejected", "Entries or pods that are left out.", labels=label
        )
        lists = CounterMetricFamily("pointsman_discovery_lists", "Whole lists taken in.", labels=label)
        failures = CounterMetricFamily(
            "pointsman_discovery_failures", "Reads and watches that failed.", labels=label
        )
        for source in self._sources:
            counts, name = source.counts(), [source.name]
            degraded.add_metric(name, float(bool(source.troubles())))
            workers.add_metric(name, counts["workers"])
            rejected.add_metric(name, counts["rejected"])
            lists.add_metric(name, counts["lists"])
            failures.add_metric(name, counts["failures"])
        yield from (degraded, workers, rejected, lists, failures)


def open_discovery(
    config: FleetConfig,
    fleet: Fleet,
    check: Callable[[Sequence[WorkerEntry], str], None] | None = None,
) -> Discovery:
    """The configured sources; workers of the file are in the fleet when this returns.

    ``check`` is given the entries of the file and its name, and may refuse them.

    Raises:
        ConfigError: the file is bad, or the extra that a source needs is missing.
    """
    sources: list[Source] = []
    if config.file is not None:
        sources.append(FileDiscovery(config.file, fleet, check=check))
    if config.kubernetes.followed:
        check_usable(config.kubernetes)
        sources.append(KubernetesDiscovery(config.kubernetes, fleet))
    return Discovery(sources)
