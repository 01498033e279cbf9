# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker behind a real Envoy, in front of real workers; and a door to one of them that can be shut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from envoy_proxy import running_envoy

from router.config import load
from router.config_fleet import WorkerEntry
from router.extproc.app import PickerApp
from router.serve import running_app

from .engine import RealWorker
from .launch import MODEL_NAME
from .routed import Gateway, Pair, Role, settled, until


@dataclass(slots=True)
class Door:
    """A TCP relay to a worker at an address of its own. It remembers what the worker sent; shut, it refuses."""

    worker: RealWorker
    port: int = 0
    sent: list[bytearray] = field(default_factory=list)
    """Bytes of the worker, by connection."""
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        """Connections end, and new ones are refused."""
        if self._server is not None:
            self._server.close()
            for writer in [*self._open]:
                writer.close()
            await self._server.wait_closed()
            self._server = None

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.worker.ports.http)
        heard = bytearray()
        self.sent.append(heard)
        self._open |= {writer, back}
        try:
            await asyncio.gather(_pour(reader, back, bytearray()), _pour(there, writer, heard))
        finally:
            for one in (writer, back):
                one.close()
                with contextlib.suppress(OSError):
                    await one.wait_closed()
            self._open -= {writer, back}


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            heard += data
            writer.write(data)
            await writer.drain()
    writer.close()


@dataclass(frozen=True, slots=True)
class PickerFront(Gateway):
    """Requests go to Envoy; what is asked about them, to the picker's own port."""

    desk: str
    door: Door

    async def get(self, path: str) -> dict[str, Any]:
        async with self.session.get(self.desk + path) as response:
            assert response.status == 200, await response.text()
            found: dict[str, Any] = await response.json()
            return found

    async def keep_off(self, names: set[str]) -> None:
        """Only the other workers take requests."""
        for status in self.app.brain.fleet.statuses():
            name = status.spec.id
            path = f"{self.desk}/admin/api/workers/{name}/drain"
            async with self.session.put(path, json={"draining": name in names}) as response:
                assert response.status == 200, await response.text()

    def in_flight(self) -> int:
        brain = self.app.brain
        return sum(brain.board.in_flight(status.spec.id) for status in brain.fleet.statuses())

    async def quiet(self) -> None:
        await until(lambda: self.in_flight() == 0, "load that is never released")


@asynccontextmanager
async def picker_front(
    pair: Pair, tmp_path: Path, roles: Sequence[Role] | None = None
) -> AsyncIterator[PickerFront]:
    """Envoy and the picker before two workers, and before a door to the second: a third address of the same engine.

    With ``roles`` they have these, and there is no door.
    """
    door = Door(pair[1])
    await door.open()
    overrides: Mapping[str, object] = {
        "server.host": "127.0.0.1",
        "epp.host": "127.0.0.1",
        "epp.grpc_port": 0,
        "epp.health_port": 0,
        "epp.http_port": 0,
        "epp.drain_timeout_s": 1.0,
        "index.hash_key_file": str(tmp_path / "hash.key"),
        "tokens.local": [{"model": MODEL_NAME, "path": str(pair[0].model_dir)}],
        "costs.profile": "cpu-tiny",
        "costs.overrides": {"prefill_s_per_token": 0.01},
        "costs.calibrate": False,
        # No poll after the first: the picker is not to learn from one that a door is shut.
        "fleet.poll_interval_s": 3600.0,
        "plan.explore": 0,
    }
    urls = [pair[0].url, pair[1].url, f"http://{door.name}"]
    engines = [pair[0], pair[1], pair[1]]
    if roles is not None:
        urls, engines = urls[:2], engines[:2]
    workers = [
        WorkerEntry(url=url, events=w.events, replay=w.replay, p2p=w.p2p, role=role)
        for url, w, role in zip(urls, engines, roles or ("both",) * 3, strict=True)
    ]
    config = load(None, environ={}, overrides=overrides, workers=workers)
    try:
        async with running_app(PickerApp(config)) as (app, desk), aiohttp.ClientSession() as session:
            endpoints = [url.removeprefix("http://") for url in urls]
            grpc = f"127.0.0.1:{app.servers.grpc_port}"
            async with running_envoy(grpc, endpoints, tmp_path / "envoy") as envoy:
                one = PickerFront(app, envoy.url, session, desk, door)  # type: ignore[arg-type]
                for worker in pair:
                    await settled(one, worker)
                await until(
                    lambda: all(s.parity.value == "equal" for s in app.brain.fleet.statuses()),
                    "tokenizer parity",
                )
                yield one
    finally:
        await door.shut()
