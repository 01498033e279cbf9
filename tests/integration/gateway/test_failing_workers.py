# SPDX-License-Identifier: Apache-2.0
import asyncio
import json

import pytest

from router.errors import NoWorkerAvailable, TransferParamsRefused
from router.request import Outcome, Usage

CHAT = "/v1/chat/completions"
STREAM = b'{"stream":true}'
TOKENS = [b'data: {"choices":[{"text":"%d"}]}\n\n' % number for number in range(5)]
DONE = b"data: [DONE]\n\n"
GOOD = (Outcome.OK, 200)


async def answer_ok(call):
    await call.answer(200, "application/json", b'{"ok":true}')


async def fail_500(call):
    await call.answer(500, "application/json", b'{"error":"mine"}')


async def reset_at_once(call):
    call.reset()


async def close_at_once(call):
    call.close()


async def reset_after_headers(call):
    await call.begin()
    call.reset()


async def empty_stream(call):
    await call.begin()
    await call.end()


async def silence(call):
    await call.hung_up()


async def silence_after_headers(call):
    await call.begin()
    await call.hung_up()


@pytest.mark.parametrize(
    "failure",
    [
        fail_500,
        reset_at_once,
        close_at_once,
        reset_after_headers,
        empty_stream,
        silence,
        silence_after_headers,
    ],
    ids=lambda script: script.__name__,
)
async def test_another_worker_takes_over_before_the_first_byte(start_worker, start_gateway, failure):
    async def good(call):
        await call.begin()
        await call.chunk(TOKENS[0] + DONE)
        await call.end()

    bad = await start_worker(failure)
    spare = await start_worker(good)
    gateway = await start_gateway(bad, spare, first_byte_timeout_s=0.5)
    reply = await gateway.ask(CHAT, STREAM)
    assert (reply.status, reply.body, reply.clean) == (200, TOKENS[0] + DONE, True)
    assert reply.header("x-pointsman-worker") == "w2"
    assert len(bad.calls) == len(spare.calls) == 1
    assert [outcome for outcome, _ in gateway.dispatcher.outcomes] == [Outcome.WORKER_ERROR, Outcome.OK]


async def test_each_attempt_gets_its_own_body(start_worker, start_gateway, refused_url):
    worker = await start_worker(answer_ok)
    gateway = await start_gateway(refused_url, worker)
    gateway.dispatcher.insert = {"k": 1}
    assert (await gateway.ask(CHAT, b'{"a":1}')).status == 200
    assert worker.calls[0].body == b'{"a":1,"k":1}'
    assert gateway.dispatcher.outcomes == [(Outcome.WORKER_ERROR, None), GOOD]


async def test_no_more_workers_are_tried_than_configured(start_worker, start_gateway):
    workers = [await start_worker(fail_500) for _ in range(5)]
    gateway = await start_gateway(*workers, retries=2)
    reply = await gateway.ask(CHAT, b"{}")
    assert (reply.status, reply.body) == (500, b'{"error":"mine"}')
    assert [len(worker.calls) for worker in workers] == [1, 1, 1, 0, 0]
    assert reply.header("x-pointsman-worker") == "w3"
    assert gateway.dispatcher.outcomes == [(Outcome.WORKER_ERROR, 500)] * 3


async def test_a_5xx_passes_when_the_other_workers_do_not_even_answer(
    start_worker, start_gateway, refused_url
):
    gateway = await start_gateway(await start_worker(fail_500), refused_url)
    reply = await gateway.ask(CHAT, b"{}")
    assert (reply.status, reply.body, reply.clean) == (500, b'{"error":"mine"}', True)
    assert gateway.dispatcher.outcomes == [(Outcome.WORKER_ERROR, 500), (Outcome.WORKER_ERROR, None)]


async def test_a_5xx_that_breaks_off_becomes_a_502(start_worker, start_gateway):
    async def half(call):
        await call.raw(b"HTTP/1.1 500 X\r\ncontent-length: 10\r\n\r\n")
        call.reset()

    reply = await (await start_gateway(await start_worker(half))).ask(CHAT, b"{}")
    assert (reply.status, reply.error["code"], reply.clean) == (502, "worker_failed", True)


async def test_without_any_worker_the_client_gets_503_and_the_reason(start_gateway):
    gateway = await start_gateway()
    reply = await gateway.ask(CHAT, b"{}", "x-request-id: mine")
    assert (reply.status, reply.header("x-request-id")) == (503, "mine")
    assert reply.header("x-pointsman-fallback") is None
    assert reply.error == {
        "message": "No worker can take this request: no_workers",
        "type": "service_unavailable",
        "code": "no_workers",
    }


async def test_an_unreachable_fleet_gives_503_and_a_cut_short_search_502(start_gateway, refused_url):
    gateway = await start_gateway(refused_url, refused_url)
    assert (await gateway.ask(CHAT, b"{}")).error["code"] == "all_failed"
    gateway = await start_gateway(refused_url, refused_url, retries=0)
    reply = await gateway.ask(CHAT, b"{}")
    assert (reply.status, reply.error["type"]) == (502, "upstream_error")


async def test_a_refused_request_is_told_why(start_gateway):
    gateway = await start_gateway()
    gateway.dispatcher.refusal = TransferParamsRefused("kv_transfer_params are not accepted")
    reply = await gateway.ask(CHAT, b"{}")
    assert (reply.status, reply.error["code"]) == (400, "transfer_params_refused")
    assert reply.error["type"] == "invalid_request_error"


async def test_a_fault_of_the_gateway_is_a_500_in_the_same_shape(start_gateway):
    gateway = await start_gateway()
    gateway.dispatcher.refusal = ZeroDivisionError()
    reply = await gateway.ask(CHAT, b"{}")
    assert (reply.status, reply.error["type"]) == (500, "internal_error")


async def test_a_body_above_the_limit_is_413_announced_or_not(start_worker, start_gateway):
    worker = await start_worker(answer_ok)
    gateway = await start_gateway(worker, max_body_bytes=1000)
    assert (await gateway.ask(CHAT, b"x" * 1000)).status == 200
    reply = await gateway.ask(CHAT, b"x" * 1001)
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    client = await gateway.connect()
    client.writer.write(b"POST %b HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode())
    client.writer.write(b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n")
    assert (await client.read_reply()).status == 413
    await client.close()
    assert len(worker.calls) == 1


async def test_a_stale_kept_alive_connection_costs_no_failover(start_worker, start_gateway):
    async def answer_once_per_connection(call):
        if worker.calls[-2:-1] and worker.calls[-2].writer is call.writer:
            call.reset()  # what a worker does that closes just as the gateway picks the connection
        else:
            await answer_ok(call)

    worker = await start_worker(answer_once_per_connection)
    gateway = await start_gateway(worker)
    for _ in range(2):
        assert (await gateway.ask(CHAT, b"{}")).status == 200
    assert len(worker.calls) == 3
    assert gateway.dispatcher.outcomes == [GOOD, GOOD]


async def test_a_fresh_connection_that_breaks_is_not_tried_again_on_the_same_worker(
    start_worker, start_gateway
):
    worker = await start_worker(reset_at_once)
    gateway = await start_gateway(worker)
    assert (await gateway.ask(CHAT, b"{}")).status == 503
    assert len(worker.calls) == 1


async def broken_stream(start_worker, start_gateway, ending, *, target=CHAT, pieces=TOKENS):
    """Five tokens reach the client, then the worker does ``ending``; the spare worker must stay unused."""
    proceed = asyncio.Event()

    async def stream(call):
        await call.begin()
        await call.chunk(b"".join(pieces))
        await proceed.wait()
        await ending(call)

    spare = await start_worker(answer_ok)
    gateway = await start_gateway(await start_worker(stream), spare, idle_timeout_s=0.5)
    client = await gateway.connect()
    await client.send(target, STREAM)
    head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 10)
    got = b""
    while len(got) < sum(map(len, pieces)):
        got += await client.read_chunk()
    assert got == b"".join(pieces)
    proceed.set()
    rest = b""
    clean = True
    try:
        async with asyncio.timeout(10):
            while piece := await client.read_chunk():
                rest += piece
    except asyncio.IncompleteReadError:
        clean = False
    await client.close()
    await gateway.dispatcher.settled()
    assert b" 200 " in head
    assert spare.calls == []
    assert len(gateway.dispatcher.attempts) == 1
    return rest, clean, gateway.dispatcher.outcomes[0]


async def clean_end(call):
    await call.end()


async def fin(call):
    call.close()


async def reset(call):
    call.reset()


@pytest.mark.parametrize("ending", [clean_end, fin, reset, silence], ids=lambda script: script.__name__)
async def test_a_stream_without_its_end_is_an_error_to_the_client(start_worker, start_gateway, ending):
    rest, clean, outcome = await broken_stream(start_worker, start_gateway, ending)
    assert rest.startswith(b"data: ")
    assert rest.endswith(b"\n\n")
    assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "worker_failed"
    assert not clean
    assert outcome == (Outcome.WORKER_ERROR, 200)


async def test_an_event_cut_in_its_middle_is_closed_before_the_error_event(start_worker, start_gateway):
    rest, clean, _ = await broken_stream(
        start_worker, start_gateway, reset, pieces=[b'data: {"choices":[{"te']
    )
    assert rest.startswith(b'\n\ndata: {"error":')
    assert not clean


async def test_an_error_event_of_the_worker_passes_unchanged_and_counts_against_it(
    start_worker, start_gateway
):
    event = b'data: {"error":{"message":"died","code":500}}\n\n'

    async def with_end(call):
        await call.chunk(event + DONE)
        await call.end()

    async def without_end(call):
        await call.chunk(event)
        await call.end()

    assert await broken_stream(start_worker, start_gateway, with_end) == (
        event + DONE,
        True,
        (Outcome.WORKER_ERROR, 200),
    )
    assert await broken_stream(start_worker, start_gateway, without_end) == (
        event,
        False,
        (Outcome.WORKER_ERROR, 200),
    )


@pytest.mark.parametrize("ending", [fin, reset, silence], ids=lambda script: script.__name__)
async def test_nothing_is_missing_after_the_end_mark(start_worker, start_gateway, ending):
    rest, clean, outcome = await broken_stream(start_worker, start_gateway, ending, pieces=[*TOKENS, DONE])
    assert (rest, clean, outcome) == (b"", True, GOOD)


async def test_other_event_streams_may_end_without_the_mark_but_not_break(start_worker, start_gateway):
    whole = await broken_stream(start_worker, start_gateway, clean_end, target="/v1/responses")
    assert whole == (b"", True, GOOD)
    rest, clean, outcome = await broken_stream(start_worker, start_gateway, reset, target="/v1/responses")
    assert (b'"error"' in rest, clean, outcome) == (True, False, (Outcome.WORKER_ERROR, 200))


async def test_a_body_that_is_no_event_stream_breaks_without_an_added_byte(start_worker, start_gateway):
    proceed = asyncio.Event()

    async def half(call):
        await call.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ncontent-length: 100\r\n\r\n" + b"x" * 50
        )
        await proceed.wait()
        call.reset()

    gateway = await start_gateway(await start_worker(half))
    client = await gateway.connect()
    await client.send("/v1/audio/speech", b"{}")
    await client.reader.readuntil(b"\r\n\r\n")
    assert await client.reader.readexactly(50) == b"x" * 50
    proceed.set()
    assert await asyncio.wait_for(client.reader.read(), 10) == b""
    await client.close()
    assert gateway.dispatcher.outcomes == [(Outcome.WORKER_ERROR, 200)]


async def test_usage_seen_before_a_break_is_still_reported(start_worker, start_gateway):
    async def stream(call):
        await call.begin()
        await call.chunk(b'data: {"choices":[{}],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n')
        await call.end()

    gateway = await start_gateway(await start_worker(stream), retries=0)
    assert (await gateway.ask(CHAT, STREAM)).status == 502  # came whole, and lacks its end: nothing was sent
    assert gateway.dispatcher.attempts[0].usages == [Usage(3, 1, None)]


async def test_dispatcher_errors_after_a_failed_attempt_keep_the_accounts(start_gateway, refused_url):
    gateway = await start_gateway(refused_url)
    reply = await gateway.ask(CHAT, b"{}")
    assert reply.status == 503
    gateway.dispatcher.refusal = NoWorkerAvailable("draining")
    assert (await gateway.ask(CHAT, b"{}")).error["code"] == "draining"
    assert gateway.dispatcher.outcomes == [(Outcome.WORKER_ERROR, None)]
