# SPDX-License-Identifier: Apache-2.0
"""Requests at given times, whatever the answers do: a load whose latencies hide no waiting.

    python tests/support/paced_load.py HOST:PORT FILE RATE SECONDS    prints JSON: count, p50_ms, p99_ms

FILE holds one JSON body a line. Gaps are exponential; a latency counts from when the request was to be sent.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import uvloop


class _Connection(asyncio.Protocol):
    """One request at a time over a connection that is kept; an answer has a content-length or is chunked."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer = b""
        self._done: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, end, body = self._answer.partition(b"\r\n\r\n")
        if not end or self._done is None:
            return
        fields = head.lower()
        if b"transfer-encoding: chunked" in fields:
            whole = body.endswith(b"0\r\n\r\n")
        else:
            whole = len(body) >= int(fields.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if whole:
            self._done.set_result(head)

    async def ask(self, request: bytes) -> bytes:
        assert self._transport is not None
        self._answer, self._done = b"", asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def _run(address: str, requests: list[bytes], rate: float, seconds: float) -> list[float]:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    idle: list[_Connection] = []
    taken: list[float] = []

    async def one(request: bytes, due_s: float) -> None:
        connection = idle.pop() if idle else (await loop.create_connection(_Connection, host, int(port)))[1]
        head = await connection.ask(request)
        taken.append(loop.time() - due_s)
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(head.decode())
        idle.append(connection)

    for request in requests[:20]:  # connections and caches
        await one(request, loop.time())
    taken.clear()
    chance = random.Random(1)
    begin_s = due_s = loop.time()
    async with asyncio.TaskGroup() as group:
        number = 0
        while due_s < begin_s + seconds:
            due_s += chance.expovariate(rate)
            await asyncio.sleep(max(due_s - loop.time(), 0))
            group.create_task(one(requests[number % len(requests)], due_s))
            number += 1
    for connection in idle:
        connection.close()
    return sorted(taken)


def main() -> None:
    address, file, rate, seconds = sys.argv[1:]
    head = "POST /v1/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
    bodies = Path(file).read_bytes().splitlines()
    requests = [head.format(address, len(body)).encode() + body for body in bodies]
    taken = uvloop.run(_run(address, requests, float(rate), float(seconds)))
    of = {f"p{share:g}_ms": round(taken[int(len(taken) * share / 100)] * 1e3, 3) for share in (50, 99)}
    print(json.dumps({"count": len(taken), **of}))


if __name__ == "__main__":
    main()
