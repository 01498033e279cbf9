# SPDX-License-Identifier: Apache-2.0
import asyncio
import random
import time

import pytest

from router.request import Outcome

CHAT = "/v1/chat/completions"
TOKEN = b'data: {"choices":[{"text":"x"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("stream", [b'{"stream":true}', b'{"stream":false}'])
@pytest.mark.parametrize("stage", ["before_headers", "after_headers", "in_the_body"])
async def test_a_client_that_leaves_closes_the_workers_connection_at_once(
    start_worker, start_gateway, stream, stage
):
    reached = asyncio.Event()
    hung_up = asyncio.Event()

    async def answer_slowly(call):
        if stage != "before_headers":
            await call.begin()
        if stage == "in_the_body":
            await call.chunk(TOKEN)
        reached.set()
        await call.hung_up()
        hung_up.set()

    gateway = await start_gateway(await start_worker(answer_slowly))
    client = await gateway.connect()
    await client.send(CHAT, stream)
    await asyncio.wait_for(reached.wait(), 10)
    if stage == "in_the_body":
        await client.reader.readuntil(b"\r\n\r\n")
        assert await client.read_chunk() == TOKEN
    left_at = time.monotonic()
    await client.close()
    await asyncio.wait_for(hung_up.wait(), 10)
    assert time.monotonic() - left_at < 1
    await gateway.dispatcher.settled()
    status = None if stage == "before_headers" else 200
    assert gateway.dispatcher.outcomes == [(Outcome.CLIENT_GONE, status)]


async def test_a_client_that_leaves_during_dispatch_reaches_no_worker(start_worker, start_gateway):
    async def answer(call):
        await call.answer(200, "text/plain", b"")

    worker = await start_worker(answer)
    gateway = await start_gateway(worker)
    gateway.dispatcher.gate = asyncio.Event()
    client = await gateway.connect()
    await client.send(CHAT, b"{}")
    await asyncio.wait_for(gateway.dispatcher.asked.wait(), 10)
    await client.close()
    await asyncio.wait_for(gateway.dispatcher.cancelled.wait(), 10)
    gateway.dispatcher.gate.set()
    assert (await gateway.ask(CHAT, b"{}")).status == 200
    assert len(worker.calls) == len(gateway.dispatcher.attempts) == 1


async def test_a_client_that_leaves_after_the_end_mark_was_served(start_worker, start_gateway):
    async def stream(call):
        await call.begin()
        await call.chunk(TOKEN + DONE)
        await call.hung_up()

    gateway = await start_gateway(await start_worker(stream))
    client = await gateway.connect()
    await client.send(CHAT, b'{"stream":true}')
    await client.reader.readuntil(b"\r\n\r\n")
    assert await client.read_chunk() == TOKEN + DONE
    await client.close()
    await gateway.dispatcher.settled()
    assert gateway.dispatcher.outcomes == [(Outcome.OK, 200)]


async def test_a_slow_client_slows_the_worker_and_is_no_stall(start_worker, start_gateway):
    size = 64 * 1024
    count = 1000
    written = 0
    blocked = asyncio.Event()

    async def flood(call):
        nonlocal written
        await call.begin("application/octet-stream")
        for _ in range(count):
            write = asyncio.ensure_future(call.chunk(b"x" * size))
            # Longer than the idle time-out: the gateway must not take the client's pause for the worker's.
            _, pending = await asyncio.wait([write], timeout=1.0)
            if pending:
                blocked.set()
            await write
            written += size
        await call.end()

    gateway = await start_gateway(await start_worker(flood), idle_timeout_s=0.3)
    client = await gateway.connect()
    client.reader._transport.pause_reading()
    await client.send("/v1/files/1/content", b"{}")
    await asyncio.wait_for(blocked.wait(), 20)
    assert written < 32 * 1024 * 1024
    client.reader._transport.resume_reading()
    reply = await asyncio.wait_for(client.read_reply(), 30)
    assert (len(reply.body), reply.clean) == (size * count, True)
    await client.close()
    assert gateway.dispatcher.outcomes == [(Outcome.OK, 200)]


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_requests_cut_at_any_stage_leave_nothing_in_flight(start_worker, start_gateway, stream):
    chance = random.Random(54)
    body = b'{"stream":' + stream + b"}"
    reached: dict[str, asyncio.Event] = {}

    async def answer(call):
        stage, number = call.header("x-stage"), call.header("x-number")
        if stage != "headers":
            await call.begin()
        if stage in ("middle", "end"):
            await call.chunk(TOKEN)
        reached[number].set()
        if stage == "end":
            await call.chunk(DONE)
            await call.end()
        else:
            await call.hung_up()

    worker = await start_worker(answer)
    gateway = await start_gateway(worker)

    async def cut(number):
        stage = chance.choice(["connect", "body", "headers", "first_byte", "middle", "end"])
        reached[str(number)] = asyncio.Event()
        client = await gateway.connect()
        if stage == "body":
            client.writer.write(b"POST %b HTTP/1.1\r\nhost: g\r\ncontent-length: 9\r\n\r\n{" % CHAT.encode())
            await client.writer.drain()
        elif stage != "connect":
            await client.send(CHAT, body, f"x-stage: {stage}", f"x-number: {number}")
            await asyncio.wait_for(reached[str(number)].wait(), 20)
        if stage in ("middle", "end"):
            await client.reader.readuntil(b"\r\n\r\n")
        if stage == "end":
            while await client.read_chunk():
                pass
        if chance.random() < 0.5:
            client.reset()
        await client.close()

    for start in range(0, 200, 25):
        await asyncio.gather(*(cut(number) for number in range(start, start + 25)))
    await gateway.dispatcher.settled()
    assert gateway.dispatcher.in_flight == 0
    assert {outcome for outcome, _ in gateway.dispatcher.outcomes} == {Outcome.OK, Outcome.CLIENT_GONE}
    assert len(gateway.dispatcher.attempts) == len(worker.calls) > 100
