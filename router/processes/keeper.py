# SPDX-License-Identifier: Apache-2.0
"""The keeper: the one process that follows events, writes the index, asks the workers and learns; the others serve.

It has a whole brain, as a single process has, and takes no requests. What the brain knows goes to the serving
processes by ``feed.py``; what those observe comes back the same way. It answers the admin API for all of them, on a
socket that only they can open.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer.stream import StreamState
from router.admin.api import make_admin_app
from router.app import AsgiApp, Receive, Scope, Send
from router.brain import Brain
from router.config import Config
from router.lifespan import live
from router.processes.client_address import KnowsClients
from router.processes.everyone import ServedByAll
from router.processes.feed import Feed
from router.processes.metric_sums import MergedMetrics, MetricTotals, reaped_promises
from router.processes.observations import Observations
from router.processes.published import Published
from router.processes.publisher import Publisher
from router.processes.shared_index import publish_index, remove_older
from router.processes.start import ProcessState
from router.processes.told import GeneralTold, IndexTold

_log = logging.getLogger(__name__)
_TICK_S = 0.05
_REAP_S = 1.0
_LOOK_S = 0.02


class Keeper:
    """An ASGI app for the admin API; ``start`` and ``stop`` run once each, by its lifespan."""

    def __init__(self, config: Config, brain: Brain, index: IndexTold, feed_listener: socket.socket) -> None:
        """``index``: where what ``brain`` writes can be read; ``feed_listener``: a listening Unix socket."""
        self.config = config
        self._brain = brain
        self._listener = feed_listener
        self._index = index
        self._published = Published()
        self._publisher = Publisher(
            brain.fleet,
            brain.holders,
            brain.trust,
            brain.calibration,
            brain.maps,
            self._general,
            index,
            time.monotonic,
        )
        self._totals = MetricTotals()
        self._reaped = reaped_promises(brain.metrics.registry)
        self._observations = Observations(
            brain.fleet,
            brain.trust,
            brain.calibration,
            brain.dispatcher.block_makers,
            brain.maps,
            self._publisher,
            self._totals,
        )
        self._feed = Feed(self._published, self._observations)
        self._states: Sequence[ProcessState] = ()
        everybody = MergedMetrics(
            brain.metrics.registry,
            self._totals,
            ProcessesCollector(lambda: self._states, self._feed, self._observations),
        )
        self._app: AsgiApp = KnowsClients(
            make_admin_app(
                brain.views(ServedByAll(self._feed, brain.deciding.reports, everybody)),
                config.admin.token,
                enabled=config.admin.enabled,
                report_token=config.admin.report_token,
            )
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.failed: Exception | None = None
        """Why it could not start."""

    async def start(self) -> None:
        """Learn the fleet, fill the index as far as workers replay, then tell whoever serves."""
        await self._brain.start()
        await self._filled()
        publish_index(self._brain.holders.index)
        self._tick()
        await self._feed.start(self._listener)
        remove_older(self._index)
        self._tasks = [asyncio.create_task(self._publish()), asyncio.create_task(self._reap())]

    async def stop(self) -> None:
        """Close everything that ``start`` opened; the serving processes have ended before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._feed.stop()
        await self._brain.stop()

    def processes_are(self, states: Sequence[ProcessState]) -> None:
        """The supervisor tells of all processes."""
        self._states = states

    def addresses(self, _url: str) -> dict[str, str]:
        return {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(self, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _filled(self) -> None:
        """Wait until every event stream has its history, as long as one replay may take."""
        deadline_s = time.monotonic() + self.config.index.replay_timeout_s
        while time.monotonic() < deadline_s and not self._is_filled():  # noqa: ASYNC110 - a thread fills it
            await asyncio.sleep(_LOOK_S)

    def _is_filled(self) -> bool:
        streams = self._brain.subscriber.streams()
        workers = self._brain.holders.workers()
        ranks = [state for one in [*workers.values()] for state in one.ranks]
        return (
            len(streams) >= len(ranks)
            and all(stream.state is StreamState.LIVE for stream in streams.values())
            and all(state.connected for state in ranks)
        )

    def _general(self) -> GeneralTold:
        return GeneralTold(self._brain.synced(), self._brain.discovery.objectives())

    def _tick(self) -> None:
        try:
            changes = self._publisher.changes()
        except Exception:
            _log.exception("what has changed could not be published")
            return
        self._published.tell(changes)
        self._feed.publish()

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._tick()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_S)
            self._reaped.inc(self._brain.board.reap(time.monotonic()))


class ProcessesCollector(Collector):
    """Metrics of the processes themselves."""

    def __init__(
        self, states: Callable[[], Sequence[ProcessState]], feed: Feed, observations: Observations
    ) -> None:
        self._states = states
        self._feed = feed
        self._observations = observations

    def collect(self) -> Iterable[Metric]:
        alive = GaugeMetricFamily("pointsman_process_up", "1 while the process lives.", labels=["process"])
        restarts = CounterMetricFamily(
            "pointsman_process_restarts",
            "Times that a process died and was started again.",
            labels=["process"],
        )
        hangs = CounterMetricFamily(
            "pointsman_process_hangs",
            "Times that a process was killed because it did not answer.",
            labels=["process"],
        )
        for state in self._states():
            alive.add_metric([state.name], float(state.pid is not None))
            restarts.add_metric([state.name], state.restarts)
            hangs.add_metric([state.name], state.hangs)
        yield alive
        yield restarts
        yield hangs
        yield GaugeMetricFamily(
            "pointsman_serving_processes", "Processes that take requests.", value=len(self._feed.processes)
        )
        yield CounterMetricFamily(
            "pointsman_observations_dropped",
            "Observations that serving processes could not tell the keeper.",
            value=self._observations.dropped,
        )
