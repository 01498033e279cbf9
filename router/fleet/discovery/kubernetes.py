# SPDX-License-Identifier: Apache-2.0
"""Workers from the pods of a pool, followed at the API server.

Three informers: the InferencePool (unless selector and ports are configured), the pods that its selector finds, and
the InferenceObjectives of the pool, whose priorities requests get by name. News is taken in at most every 50 ms, so a
thousand pods that change at once are worked out a few times, not a thousand.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping

from router.config_discovery import KubernetesConfig
from router.fleet.discovery.api import KubernetesApi, open_api
from router.fleet.discovery.endpoints import PodRules, endpoints
from router.fleet.discovery.informer import Informer, InformerState, Pace
from router.fleet.discovery.objects import InferenceObjective, InferencePool, Pod
from router.fleet.discovery.roster import Roster
from router.fleet.discovery.store import ObjectT
from router.fleet.discovery.watching import Wire
from router.fleet.fleet import Fleet

_log = logging.getLogger(__name__)

_POOL_GROUP = "inference.networking.k8s.io/v1"
_SPACING_S = 0.05


class KubernetesDiscovery:
    """One source of workers. ``start`` and ``stop`` run once each, on the fleet's event loop."""

    name = "kubernetes"

    def __init__(
        self,
        config: KubernetesConfig,
        fleet: Fleet,
        connect: Callable[[KubernetesConfig], Awaitable[KubernetesApi]] = open_api,
        pace: Pace | None = None,
    ) -> None:
        self._config = config
        self._roster = Roster(fleet)
        self._connect = connect
        self._pace = pace or Pace(config.watch_s)
        self._api: KubernetesApi | None = None
        self._pools: Informer[InferencePool] | None = None
        self._pods: Informer[Pod] | None = None
        self._objectives: Informer[InferenceObjective] | None = None
        self._selector: Mapping[str, str] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._settled = asyncio.Event()
        self._rejected: Mapping[str, str] = {}
        self._priorities: Mapping[str, int] = {}
        self._ended: list[InformerState] = []

    async def start(self) -> None:
        """Follow the API server; returns once the first lists are worked out, or after ``start_timeout_s``.

        Raises:
            ConfigError: there are no credentials.
        """
        config = self._config
        self._api = await self._connect(config)
        self._tasks["reconcile"] = asyncio.create_task(self._reconcile(), name="kubernetes reconcile")
        if config.pool is not None:
            self._pools = self._follow(InferencePool, f"/apis/{_POOL_GROUP}", "inferencepools")
        else:
            self._follow_pods(config.selector)
        if config.objectives is not None:
            group = f"/apis/{config.objectives}"
            self._objectives = self._follow(InferenceObjective, group, "inferenceobjectives")
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await self._settled.wait()
        except TimeoutError:
            _log.error("no list of the workers after %s s; going on without", config.start_timeout_s)

    async def stop(self) -> None:
        """End all watches; the workers stay as they are."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        if self._api is not None:
            await self._api.close()
            self._api = None

    def synced(self) -> bool:
        """Whether the workers were ever those that should be."""
        return self._settled.is_set()

    def priority_of(self, objective: str) -> int | None:
        """The priority of an InferenceObjective of our pool; None for a name that is none. O(1)."""
        return self._priorities.get(objective)

    def objectives(self) -> Mapping[str, int]:
        """All of them; another object after every change."""
        return self._priorities

    def troubles(self) -> list[str]:
        """Why the workers may not be those that should be; empty when all is well."""
        found = [state.trouble for state in self._states() if state.trouble is not None]
        if self._pools is not None and self._pools.state.synced and self._pool() is None:
            found.append(f"there is no InferencePool {self._config.pool}")
        found += [f"pod {name}: {why}" for name, why in self._rejected.items()]
        found += [f"worker {name} is there twice" for name in self._roster.clashes]
        return found

    def counts(self) -> dict[str, int]:
        """``workers``, ``rejected`` (now) and ``lists``, ``failures`` (since the start)."""
        states = [*self._states(), *self._ended]
        malformed = sum(state.malformed for state in self._states())
        return {
            "workers": len(self._roster),
            "rejected": len(self._rejected) + len(self._roster.clashes) + malformed,
            "lists": sum(state.lists for state in states),
            "failures": sum(state.failures for state in states),
        }

    def _states(self) -> Iterator[InformerState]:
        for informer in (self._pools, self._pods):
            if informer is not None:
                yield informer.state
        if self._objectives is not None and not self._objectives.state.absent:
            yield self._objectives.state

    def _pool(self) -> InferencePool | None:
        if self._pools is None:
            return None
        return next((one for one in self._pools.objects if one.metadata.name == self._config.pool), None)

    def _follow(
        self, kind: type[ObjectT], group: str, plural: str, selector: Mapping[str, str] | None = None
    ) -> Informer[ObjectT]:
        """A running informer; one of the same resource that runs already is ended."""
        assert self._api is not None  # noqa: S101  only called between start and stop
        running = self._tasks.pop(plural, None)
        if running is not None:
            running.cancel()
        path = f"{group}/namespaces/{self._api.namespace}/{plural}"
        informer = Informer(self._api, path, Wire(kind), self._news.set, selector, self._pace)
        self._tasks[plural] = asyncio.create_task(informer.run(), name=f"watch {plural}")
        return informer

    def _follow_pods(self, selector: Mapping[str, str]) -> None:
        if self._pods is not None:
            self._ended.append(self._pods.state)
        self._selector = selector
        self._pods = self._follow(Pod, "/api/v1", "pods", selector)

    async def _reconcile(self) -> None:
        """Takes in news; what one look goes wrong with is logged, and the next one tries again."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                self._look()
            except Exception:
                _log.exception("the workers could not be brought up to date")
            await asyncio.sleep(_SPACING_S)

    def _look(self) -> None:
        ports = self._config.ports
        if self._pools is not None:
            if not self._pools.state.synced:
                return
            pool = self._pool()
            if pool is None:
                self._leave()
                return
            ports = tuple(port.number for port in pool.spec.target_ports)
            if pool.spec.selector.match_labels != self._selector:
                self._follow_pods(pool.spec.selector.match_labels)
        self._take_objectives()
        if self._pods is None or not self._pods.state.synced:
            return  # until the pods of a changed selector are known, those of the old one serve
        config = self._config
        found = endpoints(
            self._pods.objects, PodRules(ports, config.defaults, config.scheme, config.container)
        )
        for name, why in found.rejected.items():
            if self._rejected.get(name) != why:
                _log.warning("pod %s is left out: %s", name, why)
        self._rejected = found.rejected
        self._roster.set(found.targets)
        self._settled.set()

    def _leave(self) -> None:
        """A pool that is not there has no workers."""
        self._rejected, self._priorities = {}, {}
        self._roster.set(())
        self._settled.set()

    def _take_objectives(self) -> None:
        if self._objectives is None:
            return
        pool = self._config.pool
        self._priorities = {
            one.metadata.name: one.spec.priority or 0
            for one in self._objectives.objects
            if pool is None or (one.spec.pool_ref is not None and one.spec.pool_ref.name == pool)
        }
