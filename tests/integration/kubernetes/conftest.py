# SPDX-License-Identifier: Apache-2.0
"""A fake API server, and discovery that follows it for a fleet that polls nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from eventually import PATIENCE_S
from fake_kube import FakeKube

from router.config_discovery import KubernetesConfig
from router.config_fleet import FleetConfig
from router.fleet.discovery.informer import Pace
from router.fleet.discovery.kubernetes import KubernetesDiscovery
from router.fleet.fleet import Fleet, FleetCallbacks

PROMPTLY_S = 1.0
"""How soon the fleet is what the cluster is, whatever happened."""
_PAUSE_S = 0.01


@dataclass
class Followed:
    """Discovery with the fleet it fills, and what the fleet said."""

    kube: FakeKube
    fleet: Fleet
    discovery: KubernetesDiscovery
    told: list[tuple[str, str]]

    def taken(self) -> set[str]:
        """``ip:port`` of the workers that may be given requests."""
        members = self.fleet._members.values()
        return {member.status.spec.url.removeprefix("http://") for member in members if member.ready}

    def held(self) -> set[str]:
        """``ip:port`` of all workers."""
        return {status.spec.url.removeprefix("http://") for status in self.fleet.statuses()}

    async def promptly(self, *endpoints: str) -> None:
        """The workers are just these, within a second."""
        await self.promptly_so(lambda: self.taken() == set(endpoints), lambda: sorted(self.taken()))

    async def promptly_so(self, condition: Callable[[], Any], show: Callable[[], Any] = lambda: None) -> None:
        """Time that the machine gave to others does not count: our own CPU time and our pauses do."""
        cpu_s, pauses, started_s = time.process_time(), 0, time.monotonic()
        while not condition():
            spent_s = time.process_time() - cpu_s + pauses * _PAUSE_S
            assert spent_s < PROMPTLY_S, f"not so after {spent_s:.2f} s: {show()}"
            assert time.monotonic() - started_s < PATIENCE_S, f"a machine that has no time for us: {show()}"
            await asyncio.sleep(_PAUSE_S)
            pauses += 1


Follow = Callable[..., Awaitable[Followed]]


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    async with FakeKube() as one:
        yield one


@pytest.fixture
async def follow(kube: FakeKube, tmp_path: Path) -> AsyncIterator[Follow]:
    """``await follow(pool="llama", ...)``: discovery under that configuration, started."""
    started: list[KubernetesDiscovery] = []

    async def start(pace: Pace | None = None, **settings: object) -> Followed:
        values = {"kubeconfig": kube.kubeconfig(tmp_path), **settings}
        if "selector" not in values:
            values.setdefault("pool", "llama")
        config = msgspec.convert(values, KubernetesConfig)
        told: list[tuple[str, str]] = []
        fleet = Fleet(
            (),
            FleetConfig(),
            callbacks=FleetCallbacks(
                on_removed=lambda name: told.append(("removed", name)),
                on_restarted=lambda name: told.append(("restarted", name)),
            ),
        )
        quick = Pace(config.watch_s, 0.02, 0.2)
        discovery = KubernetesDiscovery(config, fleet, pace=pace or quick)
        started.append(discovery)
        await discovery.start()
        return Followed(kube, fleet, discovery, told)

    yield start
    for one in started:
        await one.stop()
