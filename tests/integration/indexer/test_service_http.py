# SPDX-License-Identifier: Apache-2.0
"""HTTP as such: what comes in parts, at once, too large or broken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable

import pytest
from eventually import eventually

from indexer.service import http
from indexer.service.http import Answer, HttpProtocol, Request

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo:
    """Answers with method, path and body; ``/later`` once it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    def __call__(self, request: Request) -> Answer | Awaitable[Answer]:
        if request.path == "/broken":
            raise ValueError("broken")
        return self._later(request) if request.path == "/later" else _echo(request)

    async def _later(self, request: Request) -> Answer:
        await self.go.wait()
        return _echo(request)


def _echo(request: Request) -> Answer:
    return Answer(200, f"{request.method} {request.path} {request.body.decode()}".encode(), b"text/plain")


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def stream(echo: Echo) -> AsyncIterator[Stream]:
    connections: set[HttpProtocol] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpProtocol(echo, connections), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    yield reader, writer
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()

    async def gone() -> bool:
        return not connections

    await eventually(gone, "connections are closed")


async def answer(stream: Stream) -> tuple[int, dict[str, str], str]:
    head = (await stream[0].readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = await stream[0].readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, body.decode()


async def test_request_in_single_bytes_is_answered_once(stream: Stream) -> None:
    for byte in b"POST /a?b=c HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi":
        stream[1].write(bytes([byte]))
        await stream[1].drain()
        await asyncio.sleep(0)
    status, headers, body = await answer(stream)
    assert (status, body, headers["connection"]) == (200, "POST /a hi", "keep-alive")


async def test_chunked_body_is_put_together(stream: Stream) -> None:
    stream[1].write(b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n")
    assert (await answer(stream))[2] == "POST /a hi!"


async def test_requests_behind_a_slow_one_are_answered_after_it(stream: Stream, echo: Echo) -> None:
    stream[1].write(
        b"GET /later HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\nGET /later HTTP/1.1\r\n\r\nGET /c HTTP/1.1\r\n\r\n"
    )
    await stream[1].drain()
    echo.go.set()
    assert [(await answer(stream))[2] for _ in range(4)] == [
        "GET /later ",
        "GET /b ",
        "GET /later ",
        "GET /c ",
    ]
    stream[1].write(b"GET /d HTTP/1.1\r\n\r\n")
    assert (await answer(stream))[2] == "GET /d "


async def test_client_that_waits_for_continue_is_told_to_go_on(stream: Stream) -> None:
    stream[1].write(b"POST /a HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert await stream[0].readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    stream[1].write(b"hi")
    assert (await answer(stream))[2] == "POST /a hi"


async def test_connection_ends_where_the_client_wants_it(stream: Stream) -> None:
    stream[1].write(b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert (await answer(stream))[1]["connection"] == "close"
    assert await stream[0].read() == b""


async def test_head_has_no_body(stream: Stream) -> None:
    stream[1].write(b"HEAD /a HTTP/1.1\r\nConnection: close\r\n\r\n")
    head, _, rest = (await stream[0].read()).partition(b"\r\n\r\n")
    assert b"content-length: 8" in head
    assert rest == b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: 9\r\n\r\n123456789", 413),
        (b"GET /" + b"a" * 65 + b" HTTP/1.1\r\n\r\n", 431),
    ],
)
async def test_what_cannot_be_served_ends_the_connection(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int
) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 8)
    monkeypatch.setattr(http, "MAX_HEAD_BYTES", 64)
    stream[1].write(sent)
    found, _, body = await answer(stream)
    assert found == status
    assert json.loads(body)["error"]
    assert await stream[0].read() == b""


async def test_error_of_a_handler_is_an_answer(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    stream[1].write(b"GET /broken HTTP/1.1\r\n\r\n")
    assert (await answer(stream))[0] == 500
    assert "broken" in caplog.text
    stream[1].write(b"GET /a HTTP/1.1\r\n\r\n")
    assert (await answer(stream))[0] == 200
