# SPDX-License-Identifier: Apache-2.0
"""Runs the app under uvicorn: for good as a command, or within a block for tests and the demo."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

import uvicorn
import uvloop

from router.app import PointsmanApp
from router.config import Config
from router.errors import ConfigError


class ServedApp(Protocol):
    """An ASGI app that knows where to listen and what to say of it."""

    config: Config

    def addresses(self, url: str) -> dict[str, str]:
        """What the command prints once it listens at ``url``."""
        ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


_ServerT = TypeVar("_ServerT", bound=uvicorn.Server)
_AppT = TypeVar("_AppT", bound=ServedApp)

_BACKLOG = 4096
_GRACE_S = 10
_YOUNG_OBJECTS = 50_000


def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Prints one JSON line with the address when it listens.

    Raises:
        ConfigError: the address cannot be bound, or a value that only its user can judge.
    """
    uvloop.run(serve_app(PointsmanApp(config)))


def say_where(server: uvicorn.Server, listener: socket.socket) -> None:
    """Print one JSON line."""
    app: ServedApp = server.config.app  # type: ignore[assignment]
    print(json.dumps(app.addresses(url_of(listener))), flush=True)


async def serve_app(
    app: ServedApp,
    listener: socket.socket | None = None,
    on_up: Callable[[uvicorn.Server, socket.socket], None] = say_where,
) -> None:
    """The same of any app, on its configured port or on a socket that is bound already. ``on_up``: when it listens."""
    # What is loaded by now stays. Of what each request makes little is cyclic, and kept records make full collections
    # long: by default these took a fifth of the time of a busy picker.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 50)
    try:
        async with _server(app, _CommandServer, listener) as (server, bound):
            server.on_up = on_up
            await server.serve(sockets=[bound])
    finally:
        gc.unfreeze()


@asynccontextmanager
async def running_gateway(config: Config) -> AsyncIterator[tuple[PointsmanApp, str]]:
    """The service on its configured port within a block: (app, URL). It stops when the block ends."""
    async with running_app(PointsmanApp(config)) as both:
        yield both


@asynccontextmanager
async def running_app(app: _AppT) -> AsyncIterator[tuple[_AppT, str]]:
    """The same of any app."""
    async with _server(app, _EmbeddedServer) as (server, listener):
        task = asyncio.create_task(server.serve(sockets=[listener]))
        started = asyncio.create_task(server.ready.wait())
        await asyncio.wait((task, started), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await task
            raise RuntimeError("the service did not start")
        try:
            yield app, url_of(listener)
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def _server(
    app: ServedApp, kind: type[_ServerT], listener: socket.socket | None = None
) -> AsyncIterator[tuple[_ServerT, socket.socket]]:
    listener = listener or listen(app.config)
    settings = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        access_log=False,
        # What a worker answers goes out with its own headers.
        server_header=False,
        date_header=False,
        log_level="warning",
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=75,
    )
    try:
        yield kind(settings), listener
    finally:
        listener.close()


class _CommandServer(uvicorn.Server):
    """The server of the command: says where it listens once it does, and ends with 0 when told to stop."""

    on_up: Callable[[uvicorn.Server, socket.socket], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            self.on_up(self, sockets[0])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, which raises the signal once more at the end; that would make the exit code 128 + n."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class _EmbeddedServer(uvicorn.Server):
    """A server that is part of a larger program: signals are not its business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(config: Config, *, shares_port: bool = False) -> socket.socket:
    """A socket that is bound to the configured address, and does not listen yet.

    ``shares_port``: others of this user that say so too may be bound to it; the kernel spreads connections over those
    that listen.

    Raises:
        ConfigError: the address cannot be bound.
    """
    host, port = config.server.host, config.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares_port))
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError("server.port", port, f"a port that is free on {host} ({error.strerror})") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
