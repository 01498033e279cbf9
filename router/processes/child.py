# SPDX-License-Identifier: Apache-2.0
"""The program of each process that a supervisor starts: ``python -m router.processes.child DESCRIPTOR``."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn
import uvloop

from router.app import Gateway
from router.config import Config, build
from router.errors import ConfigError
from router.extproc.app import ExtProcApp
from router.processes.frames import Frames, frame
from router.processes.keeper import Keeper
from router.processes.link import KeeperLink
from router.processes.making import keeper_app, serving_app
from router.processes.start import ADMIN, FEED, FromSupervisor, Ping, Pong, Start, States, Up
from router.serve import listen, serve_app, url_of

EXIT_USAGE = 2
EXIT_ALONE = 1
_log = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Run one process; returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = socket.socket(fileno=int(arguments[0]))
    try:
        uvloop.run(_run(channel))
    except ConfigError as error:
        print(f"pointsman: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


async def _run(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    frames: Frames[FromSupervisor] = Frames(reader, FromSupervisor)  # type: ignore[arg-type]
    start = await frames.next()
    if not isinstance(start, Start):
        return
    supervisor = _Supervisor(frames, writer)
    config = build(start.config)
    if start.process is None:
        await _keep(start, config, supervisor)
    else:
        await _serve(start, config, supervisor)
    await supervisor.close()


class _Supervisor:
    """The supervisor as its child sees it: heard from the start, so that no child outlives it."""

    def __init__(self, frames: Frames[FromSupervisor], writer: asyncio.StreamWriter) -> None:
        self._frames = frames
        self._writer = writer
        self._server: uvicorn.Server | None = None
        self.keeper: Keeper | None = None
        """Who wants to know of the other processes."""
        self._task = asyncio.create_task(self._hear(), name="hear the supervisor")

    def up(self, server: uvicorn.Server, addresses: dict[str, str]) -> None:
        """We serve."""
        self._server = server
        self._writer.write(frame(Up(addresses)))

    async def close(self) -> None:
        """We have ended in order; what becomes of the supervisor is of no interest any more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()

    async def _hear(self) -> None:
        while (message := await self._frames.next()) is not None:
            if isinstance(message, Ping):
                self._writer.write(frame(Pong(message.number)))
            elif isinstance(message, States) and self.keeper is not None:
                self.keeper.processes_are(message.processes)
        _log.error("the supervisor is gone")
        if self._server is None:
            os._exit(EXIT_ALONE)  # nothing is served yet, so there is nothing to end in order
        self._server.handle_exit(signal.SIGTERM, None)


async def _keep(start: Start, config: Config, supervisor: _Supervisor) -> None:
    app = keeper_app(start, config)
    listener = socket.socket(fileno=start.listeners[ADMIN])
    supervisor.keeper = app
    await serve_child(app, listener, lambda server, _: supervisor.up(server, {}))


async def _serve(start: Start, config: Config, supervisor: _Supervisor) -> None:
    link = KeeperLink(Path(start.directory) / FEED, start.process or 0)
    first = await link.start()
    app = serving_app(start, config, link, first)
    listener = listen(config, shares_port=True)

    def up(server: uvicorn.Server, bound: socket.socket) -> None:
        supervisor.up(server, app.addresses(url_of(bound)))

    await serve_child(app, listener, up)


async def serve_child(
    app: Keeper | Gateway | ExtProcApp,
    listener: socket.socket,
    on_up: Callable[[uvicorn.Server, socket.socket], None],
) -> None:
    """Serve until told to end.

    Raises:
        Exception: why the app could not start.
    """
    try:
        await serve_app(app, listener, on_up)
    except SystemExit:  # how uvicorn ends when an app does not start
        if app.failed is None:
            raise
    if app.failed is not None:
        raise app.failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
