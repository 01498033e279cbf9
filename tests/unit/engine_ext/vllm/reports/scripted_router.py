# SPDX-License-Identifier: Apache-2.0
"""A router that takes reports as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ScriptedRouter:
    """Listens on a port of its own, that it keeps over a restart."""

    statuses: list[int] = field(default_factory=list)
    """Of the next calls; 200 after them."""
    silent: bool = False
    """Takes connections and bytes, and never answers."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of the calls that were answered 200."""
    calls: int = 0
    tokens: list[str | None] = field(default_factory=list)
    port: int = 0
    open: int = 0
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def plans(self) -> list[str]:
        return [report["plan_id"] for body in self.bodies for report in body["reports"]]

    async def start(self) -> ScriptedRouter:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            await self._call(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        assert head[0] == "POST /admin/api/reports HTTP/1.1"
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        body = await reader.readexactly(int(headers["content-length"]))
        self.calls += 1
        self.tokens.append(headers.get("authorization"))
        if self.silent:
            await reader.read()
            return
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            self.bodies.append(json.loads(body))
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}" % status)
        await writer.drain()
