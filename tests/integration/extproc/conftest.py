# SPDX-License-Identifier: Apache-2.0
"""A real Envoy, the picker under its own servers, simulated workers: all on loopback."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from envoy_proxy import Envoy, EnvoySettings, running_envoy
from service import Service

from router.config import load
from router.config_fleet import WorkerEntry
from router.extproc.app import PickerApp
from router.serve import running_app


@dataclass
class Front:
    """What a test talks to."""

    app: PickerApp
    envoy: Envoy
    proxy: Service
    """Through Envoy."""
    desk: Service
    """The picker's own HTTP port."""

    @property
    def session(self) -> aiohttp.ClientSession:
        return self.proxy.session

    async def last_request(self, worker_url: str) -> tuple[dict[str, str], bytes]:
        """Headers and body of the last inference call that a worker got."""
        async with self.session.get(f"{worker_url}/sim/last-request") as answer:
            told = await answer.json()
        return dict(told["headers"]), base64.b64decode(told["body_base64"])

    async def last_document(self, worker_url: str) -> Any:
        return json.loads((await self.last_request(worker_url))[1])

    def in_flight(self) -> int:
        brain = self.app.brain
        return sum(brain.board.in_flight(status.spec.id) for status in brain.fleet.statuses())


def address(worker_url: str) -> str:
    return urlsplit(worker_url).netloc


@contextlib.asynccontextmanager
async def picker(
    workers: Sequence[WorkerEntry], home: Path, overrides: Mapping[str, object] | None = None
) -> AsyncIterator[tuple[PickerApp, Service]]:
    """The picker in this process, on free ports."""
    settings = {
        "server.host": "127.0.0.1",
        "epp.host": "127.0.0.1",
        "epp.grpc_port": 0,
        "epp.health_port": 0,
        "epp.http_port": 0,
        "epp.drain_timeout_s": 1.0,
        "index.hash_key_file": str(home / "hash.key"),
        "fleet.poll_interval_s": 3600.0,
        "fleet.poll_timeout_s": 10.0,
        "tokens.worker_timeout_s": 20.0,
        "plan.explore": 0,
        **(overrides or {}),
    }
    config = load(None, environ={}, overrides=settings, workers=workers)
    async with (
        running_app(PickerApp(config)) as (app, url),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        desk = Service(app, url, session)
        if any(worker.events for worker in workers):
            await desk.connected()
        yield app, desk


@contextlib.asynccontextmanager
async def front(
    workers: Sequence[WorkerEntry],
    home: Path,
    settings: EnvoySettings | None = None,
    overrides: Mapping[str, object] | None = None,
    known: Sequence[str] | None = None,
) -> AsyncIterator[Front]:
    """Envoy in front of the picker in front of these workers; ``known``: the endpoints that Envoy has, if others."""
    endpoints = [address(worker.url) for worker in workers] if known is None else known
    async with picker(workers, home, overrides) as (app, desk):
        grpc = f"127.0.0.1:{app.servers.grpc_port}"
        async with running_envoy(grpc, endpoints, home / "envoy", settings) as proxy:
            yield Front(app, proxy, Service(app, proxy.url, desk.session), desk)
