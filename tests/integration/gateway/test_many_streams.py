# SPDX-License-Identifier: Apache-2.0
import asyncio
import os
import resource
import time

import pytest

from router.request import Outcome

STREAMS = 500
DESCRIPTORS = 4 * STREAMS + 500
TOKEN = b'data: {"choices":[{"text":"x"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def enough_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        pytest.skip(f"needs {DESCRIPTORS} file descriptors, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, DESCRIPTORS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


async def test_hundreds_of_open_streams_leave_the_gateway_quick_and_no_descriptor_behind(
    enough_descriptors, start_worker, start_gateway
):
    release = asyncio.Event()

    async def stream(call):
        await call.begin()
        await call.chunk(TOKEN)
        await release.wait()
        await call.chunk(DONE)
        await call.end()
        call.close()

    worker = await start_worker(stream)
    gateway = await start_gateway(worker)
    before = open_descriptors()
    clients = [await gateway.connect() for _ in range(STREAMS)]

    async def begin(client):
        await client.send("/v1/chat/completions", b'{"stream":true}')
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head
        assert await client.read_chunk() == TOKEN

    async with asyncio.timeout(60):
        await asyncio.gather(*(begin(client) for client in clients))
    assert gateway.dispatcher.in_flight == STREAMS
    for _ in range(20):
        asked_at = time.monotonic()
        assert (await gateway.ask("/v1/models", method="GET")).status == 200
        assert time.monotonic() - asked_at < 1
    release.set()

    async def finish(client):
        rest = b""
        while piece := await client.read_chunk():
            rest += piece
        assert rest == DONE
        await client.close()

    async with asyncio.timeout(60):
        await asyncio.gather(*(finish(client) for client in clients))
        await gateway.dispatcher.settled()
        while open_descriptors() > before or worker.connections:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.01)
    assert set(gateway.dispatcher.outcomes) == {(Outcome.OK, 200)}
