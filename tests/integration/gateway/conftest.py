# SPDX-License-Identifier: Apache-2.0
"""A real server, a client that sees raw bytes, and workers that do byte for byte what a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import uvicorn

from router.errors import NoWorkerAvailable
from router.gateway.proxy import GatewayApp
from router.gateway.routing import Route
from router.gateway.settings import GatewaySettings
from router.gateway.upstream import UpstreamClient
from router.request import InferenceRequest, Outcome, Usage

MODELS = b'{"object":"list","data":[]}'
PATIENCE_S = 20.0


async def read_head(reader: asyncio.StreamReader) -> tuple[str, list[tuple[str, str]]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = [line.partition(": ")[::2] for line in lines[1:] if line]
    return lines[0], [(name.lower(), value) for name, value in pairs]


def rst(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of a FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@dataclass
class Call:
    """One request as a worker got it, and the means to answer."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, content_type: str, body: bytes, *extra: str) -> None:
        lines = [
            f"HTTP/1.1 {status} X",
            f"content-type: {content_type}",
            f"content-length: {len(body)}",
            *extra,
        ]
        await self.raw("\r\n".join([*lines, "", ""]).encode() + body)

    async def begin(self, content_type: str = "text/event-stream; charset=utf-8") -> None:
        await self.raw(
            f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        )

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def hung_up(self) -> None:
        """Wait until the gateway closes this connection."""
        with contextlib.suppress(ConnectionError):
            assert await self.reader.read(1) == b""

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        rst(self.writer)


Script = Callable[[Call], Awaitable[None]]


class Worker:
    """A TCP server that hands each request to a script and keeps the connection unless the script ends it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 20, backlog=2048)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        try:
            while not writer.is_closing():
                line, headers = await read_head(reader)
                size = int(dict(headers).get("content-length", "0"))
                call = Call(line, headers, await reader.readexactly(size), reader, writer)
                self.calls.append(call)
                await self.script(call)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.connections.discard(writer)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


@dataclass
class TriedWorker:
    """An attempt that writes down what the gateway tells it."""

    dispatcher: ScriptedDispatcher
    route: Route
    first_bytes: int = 0
    usages: list[Usage] = field(default_factory=list)
    ends: list[tuple[Outcome, int | None]] = field(default_factory=list)

    def first_byte(self) -> None:
        assert not self.ends
        self.first_bytes += 1

    def usage(self, usage: Usage) -> None:
        assert not self.ends
        self.usages.append(usage)

    def finish(self, outcome: Outcome, status: int | None) -> None:
        self.ends.append((outcome, status))
        self.dispatcher.changed.set()


class ScriptedDispatcher:
    """Goes through its workers in order; counts what is in flight."""

    def __init__(self, urls: list[str]) -> None:
        self.routes = {f"w{number}": url for number, url in enumerate(urls, 1)}
        self.insert: dict[str, object] = {}
        self.upstream_headers: tuple[tuple[bytes, bytes], ...] = ()
        self.attempts: list[TriedWorker] = []
        self.requests: list[InferenceRequest] = []
        self.refusal: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.changed = asyncio.Event()

    async def dispatch(self, request: InferenceRequest, tried: frozenset[str]) -> TriedWorker:
        self.requests.append(request)
        self.asked.set()
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if self.refusal is not None:
            raise self.refusal
        for worker_id, url in self.routes.items():
            if worker_id not in tried:
                route = Route(
                    request_id=request.request_id,
                    worker_id=worker_id,
                    base_url=url,
                    insert=self.insert,
                    upstream_headers=self.upstream_headers,
                    response_headers=((b"x-pointsman-worker", worker_id.encode()),),
                )
                attempt = TriedWorker(self, route)
                self.attempts.append(attempt)
                return attempt
        raise NoWorkerAvailable("all_failed" if tried else "no_workers")

    @property
    def in_flight(self) -> int:
        return sum(not attempt.ends for attempt in self.attempts)

    @property
    def outcomes(self) -> list[tuple[Outcome, int | None]]:
        assert all(len(attempt.ends) == 1 for attempt in self.attempts)
        return [attempt.ends[0] for attempt in self.attempts]

    async def settled(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.in_flight:
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Reply:
    """An answer as it was on the wire; ``clean`` tells whether it was ended as HTTP demands."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    clean: bool

    def header(self, name: str) -> str | None:
        values = [value for candidate, value in self.headers if candidate == name]
        assert len(values) <= 1, values
        return values[0] if values else None

    @property
    def error(self) -> dict[str, str]:
        return json.loads(self.body)["error"]


class Client:
    """One connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, target: str, body: bytes, *headers: str, method: str = "POST") -> None:
        lines = [
            f"{method} {target} HTTP/1.1",
            "host: gateway",
            f"content-length: {len(body)}",
            *headers,
            "",
            "",
        ]
        self.writer.write("\r\n".join(lines).encode("latin-1") + body)
        await self.writer.drain()

    async def read_chunk(self) -> bytes:
        """One HTTP chunk; empty is the end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def read_reply(self, head: tuple[str, list[tuple[str, str]]] | None = None) -> Reply:
        line, headers = head or await read_head(self.reader)
        reply = Reply(int(line.split()[1]), headers, b"", clean=False)
        length = reply.header("content-length")
        pieces: list[bytes] = []
        try:
            if length is not None:
                pieces.append(await self.reader.readexactly(int(length)))
            else:
                while piece := await self.read_chunk():
                    pieces.append(piece)
            reply.clean = True
        except asyncio.IncompleteReadError as error:
            if length is not None:
                pieces.append(error.partial)
        reply.body = b"".join(pieces)
        return reply

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def reset(self) -> None:
        rst(self.writer)


class Gateway:
    """A running gateway and how to reach it."""

    def __init__(self, port: int, dispatcher: ScriptedDispatcher) -> None:
        self.port = port
        self.dispatcher = dispatcher

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        return Client(reader, writer)

    async def ask(self, target: str, body: bytes = b"", *headers: str, method: str = "POST") -> Reply:
        client = await self.connect()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await client.send(target, body, *headers, method=method)
                return await client.read_reply()
        finally:
            await client.close()


@pytest.fixture
async def start_worker() -> AsyncIterator[Callable[[Script], Awaitable[Worker]]]:
    workers: list[Worker] = []

    async def start(script: Script) -> Worker:
        worker = Worker(script)
        await worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        await worker.stop()


@pytest.fixture
async def start_gateway() -> AsyncIterator[Callable[..., Awaitable[Gateway]]]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(*workers: Worker | str, **limits: float) -> Gateway:
            urls = [worker if isinstance(worker, str) else worker.url for worker in workers]
            dispatcher = ScriptedDispatcher(urls)
            settings = GatewaySettings(**limits)  # type: ignore[arg-type]
            client = UpstreamClient(settings)
            stack.push_async_callback(client.aclose)
            app = GatewayApp(dispatcher, client, settings, models=lambda: MODELS)
            port = await stack.enter_async_context(serving(app))
            return Gateway(port, dispatcher)

        yield start


@contextlib.asynccontextmanager
async def serving(app: GatewayApp) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    # asyncio turns Nagle off only where the protocol number says TCP; with it on, each stream waits 40 ms for an ACK.
    sock = socket.socket(proto=socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    sock.listen(2048)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[sock]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        sock.close()


@pytest.fixture
def refused_url() -> str:
    """The URL of a port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"
