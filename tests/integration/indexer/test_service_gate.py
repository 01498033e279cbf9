# SPDX-License-Identifier: Apache-2.0
"""Plain questions and all other calls on one connection, however their bytes arrive."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import uvloop

from indexer.hashing import HashKey
from indexer.service.app import IndexerApp
from indexer.service.http import HttpProtocol
from indexer.service.server import running_indexer

MODEL = "m"
QUERY = {"model_name": MODEL, "token_ids": list(range(64))}
# In the general path only: by its head, by its body, by what it asks.
REQUESTS = {
    "plain": (200, QUERY, "POST /query HTTP/1.1\r\n"),
    "general": (200, QUERY, "POST /query?x HTTP/1.1\r\n"),
    "unknown": (404, {**QUERY, "model_name": "x"}, "POST /query HTTP/1.1\r\n"),
    "wrong": (422, {"model_name": MODEL, "token_ids": [-1]}, "POST /query HTTP/1.1\r\n"),
    "peers": (200, [], "GET /peers HTTP/1.1\r\n"),
    "dump": (200, {}, "GET /dump HTTP/1.1\r\n"),
}


@dataclass
class Connection:
    """A client that writes bytes and reads answers."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    app: IndexerApp
    by_gate: list[bool] = field(default_factory=list)

    async def answer(self) -> tuple[int, bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        return int(head.split()[1]), await self.reader.readexactly(int(length.split(b":")[1]))


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    app = IndexerApp(HashKey(bytes(16)))
    by_gate: list[bool] = []
    gate = app.gate

    def watched(received: bytes) -> bytes | int | None:
        shown = gate(received)
        by_gate.append(isinstance(shown, bytes))
        return shown

    app.gate = watched  # type: ignore[method-assign]
    async with running_indexer(app) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        one = Connection(reader, writer, app, by_gate)
        register = {"instance_id": 1, "endpoint": "tcp://127.0.0.1:1", "model_name": MODEL, "block_size": 16}
        writer.write(request("POST /register HTTP/1.1\r\n", register))
        assert (await one.answer())[0] == 201
        by_gate.clear()
        yield one
        writer.close()
        await writer.wait_closed()


def request(start: str, body: object) -> bytes:
    data = json.dumps(body).encode() if body else b""
    return f"{start}Host: h\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def cut(data: bytes, random: Random) -> Iterator[bytes]:
    """The bytes in pieces, mostly few and long, sometimes single ones."""
    while data:
        size = random.choice([1, 2, 7, 30, 300, 5000])
        yield data[:size]
        data = data[size:]


@pytest.mark.parametrize("seed", range(10))
async def test_requests_in_any_pieces_are_answered_in_order(connection: Connection, seed: int) -> None:
    random = Random(seed)
    names = [random.choice(list(REQUESTS)) for _ in range(30)]
    sent = b"".join(request(REQUESTS[name][2], REQUESTS[name][1]) for name in names)

    for piece in cut(sent, random):
        connection.writer.write(piece)
        await asyncio.sleep(0)  # the server, in the same loop, may read before the next piece
    answers = [await connection.answer() for _ in names]
    assert [status for status, _ in answers] == [REQUESTS[name][0] for name in names]


async def test_plain_questions_are_answered_by_the_gate(connection: Connection) -> None:
    whole = request(*REQUESTS["plain"][:0:-1])
    for _ in range(3):
        connection.writer.write(whole)
        assert (await connection.answer())[0] == 200
    assert sum(connection.by_gate) == 3


async def test_both_paths_answer_alike_on_one_connection(connection: Connection) -> None:
    answers = []
    for start in ("POST /query HTTP/1.1\r\n", "POST /query?general HTTP/1.1\r\n"):
        connection.writer.write(request(start, QUERY))
        answers.append(await connection.answer())
    assert answers[0] == answers[1]
    assert sum(connection.by_gate) == 1


async def test_connection_that_ends_within_a_request_leaves_nothing(connection: Connection) -> None:
    whole = request(*REQUESTS["plain"][:0:-1])
    connection.writer.write(whole[:-5])
    connection.writer.write_eof()
    assert await connection.reader.read() == b""


async def test_error_behind_the_gate_is_answered_and_ends_the_connection(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(connection.app._quick, "request", broken)
    connection.writer.write(request(*REQUESTS["plain"][:0:-1]))
    assert (await connection.answer())[0] == 500
    assert await connection.reader.read() == b""
    assert "gate" in caplog.text


async def test_metrics_count_plain_questions_too(connection: Connection) -> None:
    for start in ("POST /query HTTP/1.1\r\n", "POST /query?general HTTP/1.1\r\n"):
        connection.writer.write(request(start, QUERY))
        await connection.answer()
    connection.writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    _, text = await connection.answer()
    assert b'pointsman_indexer_requests_total{endpoint="/query",status="200"} 2.0' in text
    assert b'pointsman_indexer_request_duration_seconds_count{endpoint="/query"} 2.0' in text


def test_answers_are_sent_at_once() -> None:
    """A small answer must not wait for the client's acknowledgement of the one before (Nagle's algorithm)."""

    async def no_delay() -> int:
        opened: asyncio.Queue[asyncio.Transport] = asyncio.Queue()

        class Watched(HttpProtocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                opened.put_nowait(self._transport)

        app = IndexerApp(HashKey(bytes(16)))
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Watched(app.answer, set()), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        transport = await opened.get()
        option: int = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for one in (writer, transport, server):
            one.close()
        await writer.wait_closed()
        await server.wait_closed()
        return option

    assert uvloop.run(no_delay())
