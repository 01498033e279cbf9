# SPDX-License-Identifier: Apache-2.0
"""Listens for the service: for good as a command, or within a block."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from indexer.service.app import IndexerApp
from indexer.service.http import HttpProtocol

_BACKLOG = 4096
_GRACE_S = 5
_YOUNG_OBJECTS = 50_000
_SWITCH_INTERVAL_S = 0.0002


async def serve_indexer(app: IndexerApp, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT; prints one JSON line with the address once it listens.

    Raises:
        OSError: the address cannot be bound.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_indexer(app, host, port) as url:
        with _rare_collections(), _quick_handover():
            print(json.dumps({"indexer": url}), flush=True)
            await stop.wait()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """What is loaded by now stays, and an answer makes nothing cyclic: full collections would only cost time."""
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


@contextmanager
def _quick_handover() -> Iterator[None]:
    """Event loop and subscriber share the interpreter lock: neither may keep the other waiting for 5 ms."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


@asynccontextmanager
async def running_indexer(app: IndexerApp, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """The service within a block; yields its URL. Port 0 takes a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    connections: set[HttpProtocol] = set()
    with _bound(host, port) as listener:
        try:
            await app.start()
            loop = asyncio.get_running_loop()
            server = await loop.create_server(
                lambda: HttpProtocol(app.answer, connections, app.gate), sock=listener, backlog=_BACKLOG
            )
            try:
                yield _url(listener)
            finally:
                server.close()
                await _close(connections)
        finally:
            await app.stop()


async def _close(connections: set[HttpProtocol]) -> None:
    running = [one.task for one in connections if one.task is not None]
    if running:
        await asyncio.wait(running, timeout=_GRACE_S)
    for one in list(connections):
        one.close()
    await asyncio.sleep(0)  # the transports close in the next turn


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        yield listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
