# SPDX-License-Identifier: Apache-2.0
import asyncio
import gzip
import hashlib
import json
import random

import pytest

from router.request import Outcome, Usage

CHAT = "/v1/chat/completions"
STREAM = b'{"stream":true}'
USAGE = b'{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}'
RECORDED = (
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    b'data: {"choices":[],"usage":' + USAGE + b"}\r\n\r\n"
    b"data: [DONE]\n\n"
)


async def answer_ok(call):
    await call.answer(200, "application/json", b'{"ok":true}')


async def test_a_body_of_5_mb_reaches_the_worker_byte_for_byte_but_for_the_inserted_keys(
    start_worker, start_gateway
):
    worker = await start_worker(answer_ok)
    gateway = await start_gateway(worker)
    head = (
        b'{"z":1,"a":18446744073709551616000,"a":"\\ud800","b":"\xed\xa0\x80","t":"'
        + b"x" * 5_000_000
        + b'" '
    )
    for insert, inserted in (({}, b""), ({"kv_transfer_params": {"n": 1}}, b',"kv_transfer_params":{"n":1}')):
        gateway.dispatcher.insert = insert
        reply = await gateway.ask(CHAT, head + b"} \n", "content-type: application/json")
        assert (reply.status, reply.body) == (200, b'{"ok":true}')
        assert worker.calls[-1].body == head + inserted + b"} \n"
        assert gateway.dispatcher.requests[-1].body == head + b"} \n"


async def test_request_line_and_headers_reach_the_worker_unchanged(start_worker, start_gateway):
    worker = await start_worker(answer_ok)
    gateway = await start_gateway(worker)
    gateway.dispatcher.upstream_headers = ((b"x-data-parallel-rank", b"2"),)
    target = "/v1/files/a%2Fb%20c;x?q=%c3%a9+1&&r#".rstrip("#")
    await gateway.ask(
        target, b"", "x-request-id: mine", "Accept-Encoding: gzip", "X-Data-Parallel-Rank: 1", method="GET"
    )
    call = worker.calls[0]
    assert call.line == f"GET {target} HTTP/1.1"
    assert sorted(call.headers) == [
        ("accept-encoding", "identity"),
        ("host", worker.url.removeprefix("http://")),
        ("x-data-parallel-rank", "2"),
        ("x-request-id", "mine"),
    ]


async def test_the_answer_carries_request_id_and_route(start_worker, start_gateway):
    gateway = await start_gateway(await start_worker(answer_ok))
    reply = await gateway.ask("/v1/embeddings", b"{}", "x-request-id: mine")
    assert reply.headers == [
        ("content-type", "application/json"),
        ("content-length", "11"),
        ("x-pointsman-worker", "w1"),
        ("x-request-id", "mine"),
    ]
    assert (await gateway.ask("/v1/embeddings", b"{}")).header("x-request-id") not in (None, "mine", "")


@pytest.mark.parametrize("chunked", [False, True])
async def test_audio_passes_with_its_own_type(start_worker, start_gateway, chunked):
    audio = random.Random(5).randbytes(1_000_000)

    async def speak(call):
        if not chunked:
            await call.answer(200, "audio/mpeg", audio)
            return
        await call.begin("audio/mpeg")
        for start in range(0, len(audio), 77_777):
            await call.chunk(audio[start : start + 77_777])
        await call.end()

    gateway = await start_gateway(await start_worker(speak))
    reply = await gateway.ask("/v1/audio/speech", b'{"input":"hi"}')
    assert (reply.status, reply.header("content-type"), reply.clean) == (200, "audio/mpeg", True)
    assert hashlib.sha256(reply.body).digest() == hashlib.sha256(audio).digest()
    await gateway.dispatcher.settled()
    assert gateway.dispatcher.outcomes == [(Outcome.OK, 200)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, Outcome.CLIENT_ERROR),
        (422, Outcome.CLIENT_ERROR),
        (404, Outcome.CLIENT_ERROR),
        (408, Outcome.BUSY),
        (429, Outcome.BUSY),
        (500, Outcome.WORKER_ERROR),
        (503, Outcome.WORKER_ERROR),
    ],
)
async def test_errors_before_the_first_byte_keep_status_headers_and_body(
    start_worker, start_gateway, status, outcome, stream
):
    error = b'{"object":"error","message":"' + b"m" * 200_000 + b'"}'

    async def refuse(call):
        await call.answer(status, "application/json", error, "retry-after: 7")

    gateway = await start_gateway(await start_worker(refuse))
    reply = await gateway.ask(CHAT, json.dumps({"stream": stream}).encode())
    assert (reply.status, reply.body, reply.clean) == (status, error, True)
    assert reply.header("content-length") == str(len(error))
    assert reply.header("content-type") == "application/json"
    assert reply.header("retry-after") == "7"
    assert reply.header("transfer-encoding") is None
    assert gateway.dispatcher.outcomes == [(outcome, status)]


async def test_a_malformed_body_gets_the_workers_own_answer(start_worker, start_gateway):
    async def refuse(call):
        await call.answer(400, "application/json", b'{"got":%d}' % len(call.body))

    gateway = await start_gateway(await start_worker(refuse))
    reply = await gateway.ask(CHAT, b'{"messages": [')
    assert (reply.status, reply.body) == (400, b'{"got":14}')
    assert gateway.dispatcher.requests[0].document is None


async def test_a_body_that_keys_cannot_join_is_not_sent_without_them(start_worker, start_gateway):
    worker = await start_worker(answer_ok)
    gateway = await start_gateway(worker)
    gateway.dispatcher.insert = {"cache_salt": "tenant"}
    reply = await gateway.ask(CHAT, '{"messages":[]}'.encode("utf-16"))
    assert (reply.status, reply.error["code"]) == (400, "body_not_routable")
    assert worker.calls == []
    assert gateway.dispatcher.outcomes == [(Outcome.CLIENT_ERROR, None)]


async def test_a_stream_cut_at_any_byte_passes_unchanged_and_its_usage_is_seen(start_worker, start_gateway):
    cut = 0
    first_part_arrived = asyncio.Event()

    async def stream(call):
        await call.begin()
        if cut:
            await call.chunk(RECORDED[:cut])
            await first_part_arrived.wait()
        await call.chunk(RECORDED[cut:])
        await call.end()

    gateway = await start_gateway(await start_worker(stream))
    client = await gateway.connect()
    for cut in range(len(RECORDED)):
        first_part_arrived.clear()
        await client.send(CHAT, STREAM)
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 10)
        assert b"content-type: text/event-stream; charset=utf-8\r\n" in head
        got = b""
        while len(got) < cut:
            got += await client.read_chunk()
        first_part_arrived.set()
        while piece := await client.read_chunk():
            got += piece
        assert got == RECORDED, cut
    await client.close()
    await gateway.dispatcher.settled()
    assert all(attempt.usages == [Usage(9, 2, 4)] for attempt in gateway.dispatcher.attempts)
    assert all(attempt.first_bytes == 1 for attempt in gateway.dispatcher.attempts)
    assert set(gateway.dispatcher.outcomes) == {(Outcome.OK, 200)}


@pytest.mark.parametrize("asked", [{"include_usage": True}, {"include_usage": False}, None])
@pytest.mark.parametrize("given", [True, False])
async def test_no_chunk_is_added_or_dropped_whether_usage_is_asked_or_given(
    start_worker, start_gateway, asked, given
):
    events = [b'data: {"choices":[{"text":"a"}],"usage":null}\n\n', b"data: [DONE]\n\n"]
    if given:
        events.insert(1, b'data: {"choices":[],"usage":' + USAGE + b"}\n\n")

    async def stream(call):
        await call.begin()
        for event in events:
            await call.chunk(event)
        await call.end()

    worker = await start_worker(stream)
    gateway = await start_gateway(worker)
    body = json.dumps({"stream": True, "stream_options": asked}).encode()
    reply = await gateway.ask("/v1/completions", body)
    assert worker.calls[0].body == body
    assert (reply.body, reply.clean) == (b"".join(events), True)
    assert gateway.dispatcher.attempts[0].usages == ([Usage(9, 2, 4)] if given else [])


async def test_usage_of_a_whole_answer_is_reported(start_worker, start_gateway):
    async def answer(call):
        await call.answer(200, "application/json", b'{"choices":[],"usage":' + USAGE + b"}")

    gateway = await start_gateway(await start_worker(answer))
    assert (await gateway.ask(CHAT, b"{}")).clean
    assert gateway.dispatcher.attempts[0].usages == [Usage(9, 2, 4)]
    assert gateway.dispatcher.attempts[0].first_bytes == 1


async def test_a_compressed_answer_passes_as_it_is(start_worker, start_gateway):
    packed = gzip.compress(b'{"usage":' + USAGE + b"}")

    async def answer(call):
        await call.answer(200, "application/json", packed, "content-encoding: gzip")

    gateway = await start_gateway(await start_worker(answer))
    reply = await gateway.ask(CHAT, b"{}")
    assert (reply.body, reply.header("content-encoding")) == (packed, "gzip")
    assert gateway.dispatcher.attempts[0].usages == []


async def test_head_and_empty_answers_pass(start_worker, start_gateway):
    async def answer(call):
        if call.line.startswith("HEAD"):
            await call.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n")
        else:
            await call.raw(b"HTTP/1.1 204 No Content\r\n\r\n")

    gateway = await start_gateway(await start_worker(answer))
    client = await gateway.connect()
    await client.send("/v1/files/1", b"", method="HEAD")
    assert b"content-length: 99\r\n" in await client.reader.readuntil(b"\r\n\r\n")
    await client.send("/v1/files/1", b"", method="DELETE")
    assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204 ")
    await client.close()
    assert gateway.dispatcher.outcomes == [(Outcome.OK, 200), (Outcome.OK, 204)]


async def test_the_proxy_answers_the_list_of_models_itself(start_gateway):
    gateway = await start_gateway()
    reply = await gateway.ask("/v1/models", method="GET")
    assert (reply.status, reply.header("content-type")) == (200, "application/json")
    assert json.loads(reply.body) == {"object": "list", "data": []}
    assert gateway.dispatcher.requests == []


@pytest.mark.parametrize("target", ["/metrics", "/v1/../metrics", "/v1/%2e%2e/metrics", "/v1"])
async def test_paths_outside_v1_never_reach_a_worker(start_worker, start_gateway, target):
    worker = await start_worker(answer_ok)
    gateway = await start_gateway(worker)
    reply = await gateway.ask(target, method="GET")
    assert (reply.status, reply.error["code"]) == (404, "unknown_path")
    assert worker.calls == []
