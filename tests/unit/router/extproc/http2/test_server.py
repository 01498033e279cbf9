# SPDX-License-Identifier: Apache-2.0
"""The server on real sockets: peers that fall silent, connections that are lost, an orderly end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
import uvloop
from eventually import eventually
from http2_peer import data, frame, frames_of, greeting, headers, message

from router.extproc.http2 import frames as f
from router.extproc.http2.grpc import Call
from router.extproc.http2.server import GrpcServer


@dataclass
class Echo:
    call: Call
    happened: list[str] = field(default_factory=list)

    def message(self, data: bytes) -> None:
        self.call.write(data)

    def half_closed(self) -> None:
        self.call.finish()

    def gone(self) -> None:
        self.happened.append("gone")


@dataclass
class Scene:
    server: GrpcServer
    port: int
    handlers: list[Echo]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()


@asynccontextmanager
async def serving(keepalive_s: float = 60.0, handler: type[Echo] = Echo) -> AsyncIterator[Scene]:
    handlers: list[Echo] = []

    def make(call: Call) -> Echo:
        handlers.append(handler(call))
        return handlers[-1]

    server = GrpcServer({b"/echo": make}, 10_000_000, keepalive_s=keepalive_s)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    await server.open(listener)
    try:
        yield Scene(server, listener.getsockname()[1], handlers)
    finally:
        await server.close(0)


async def calls(one: Scene, count: int) -> None:
    async def so() -> bool:
        return one.server.open_calls == count

    await eventually(so, f"not {count} open calls")


async def test_bytes_of_any_size_come_back_to_a_client_of_grpc() -> None:
    async with (
        serving() as one,
        grpc.aio.insecure_channel(
            f"127.0.0.1:{one.port}", options=[("grpc.max_receive_message_length", -1)]
        ) as channel,
    ):
        call = channel.stream_stream("/echo")()
        for size in (0, 1, 16_384, 70_000, 5_000_000):
            await call.write(bytes(size))
            assert len(await call.read()) == size
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await channel.unary_unary("/other")(b"x")
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await calls(one, 0)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_answer_does_not_wait_for_all_that_came_with_its_message(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Coroutine[None, None, None]], None]
) -> None:
    monkeypatch.setattr("router.extproc.http2.server.LINGER_S", -1.0)
    heard_first = threading.Event()

    class Slow(Echo):
        def message(self, data: bytes) -> None:
            if data == b"second":
                assert heard_first.wait(60), "the answer to the first message waits for the second"
            super().message(data)

    def client(port: int) -> bytes:
        heard = b""
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            both = data(message(b"first")) + data(message(b"second"), end=True)
            connection.sendall(greeting() + headers(1) + both)
            while b"second" not in heard:
                heard += connection.recv(65_536)
                if b"first" in heard:
                    heard_first.set()
        return heard

    async def scene() -> None:
        async with serving(handler=Slow) as one:
            assert b"second" in await asyncio.to_thread(client, one.port)

    run(scene())


async def test_a_lost_connection_ends_its_calls() -> None:
    async with serving() as one:
        async with one.client() as (_, writer):
            writer.write(greeting() + headers(1) + headers(3))
            await calls(one, 2)
        await calls(one, 0)
        assert [handler.happened for handler in one.handlers] == [["gone"], ["gone"]]


async def test_a_peer_that_answers_no_ping_is_gone() -> None:
    async with serving(keepalive_s=0.2) as one, one.client() as (reader, writer):
        writer.write(greeting() + headers(1))
        async with asyncio.timeout(60):
            heard = await reader.read(-1)  # until the server ends the connection
        assert any(kind == f.PING for kind, *_ in frames_of(heard))
        assert one.handlers[0].happened == ["gone"]


async def test_an_end_waits_for_open_calls_and_cuts_those_that_last_too_long() -> None:
    async with serving() as one, one.client() as (reader, writer):
        writer.write(greeting() + headers(1) + headers(3))
        await calls(one, 2)
        ending = asyncio.create_task(one.server.close(60))
        async with asyncio.timeout(60):
            while not any(kind == f.GOAWAY for kind, *_ in frames_of(await reader.read(4096))):
                pass
        writer.write(data(message(b"x"), 1, end=True) + frame(f.RST_STREAM, 0, 3, bytes(4)))
        await ending
        assert one.handlers[1].happened == ["gone"]

    async with serving() as one, one.client() as (reader, writer):
        writer.write(greeting() + headers(1))
        await calls(one, 1)
        await one.server.close(0)
        heard = frames_of(await reader.read(-1))
        assert heard[-2][0] == f.HEADERS
        assert one.handlers[0].happened == ["gone"]
