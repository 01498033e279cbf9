# SPDX-License-Identifier: Apache-2.0
"""However a stream ends, its load and its place in the queue are gone, once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import msgspec
import pytest
from eventually import eventually
from picker_client import FULL_DUPLEX, POST, Conversation, PickerClient, headers_set, picker_client
from service import BLOCK, MODEL, entry, sim_workers

from router.extproc.app import PickerApp

from .conftest import address, picker

BODY = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4}).encode()
LONG = json.dumps({"model": MODEL, "prompt": list(range(1000, 1000 + 200 * BLOCK + 3))}).encode()
SSE = {":status": "200", "content-type": "text/event-stream"}
STREAMED = json.dumps({"model": MODEL, "prompt": "hello", "stream": True}).encode()


@contextlib.asynccontextmanager
async def picker_and_client(
    home: Path, workers: int = 1, **overrides: object
) -> AsyncIterator[tuple[PickerApp, PickerClient]]:
    more = {key.replace("__", "."): value for key, value in overrides.items()}
    async with (
        sim_workers(workers) as running,
        picker([entry(worker) for worker in running], home, more) as (app, _),
        picker_client(f"127.0.0.1:{app.servers.grpc_port}") as client,
    ):
        yield app, client


def in_flight(app: PickerApp) -> int:
    return sum(app.brain.board.in_flight(one.spec.id) for one in app.brain.fleet.statuses())


async def until(app: PickerApp, *, load: int, streams: int, waiting: int = 0) -> None:
    async def so() -> bool:
        queue = app.brain.room.view()["waiting"]
        count = queue if isinstance(queue, int) else len(queue)
        return (in_flight(app), app.processor.open_streams, count) == (load, streams, waiting)

    await eventually(so, f"{load} in flight, {streams} streams, {waiting} waiting")


async def routed(one: Conversation, body: bytes = BODY) -> None:
    await one.headers()
    await one.body(body)
    await one.until_body_ends()


@pytest.mark.parametrize("progress", range(4))
@pytest.mark.parametrize("how", ["half close", "cancel"])
async def test_a_stream_may_end_at_any_point(tmp_path: Path, progress: int, how: str) -> None:
    async with picker_and_client(tmp_path) as (app, client):
        async with client.conversation() as one:
            await routed(one, STREAMED)
            if progress > 0:
                await one.response(SSE)
                await one.until("response_headers")
            if progress > 1:
                await one.response_body(b'data: {"choices":[{"text":"a"}]}\n\n', end=False)
                await one.until("response_body")
            if progress > 2:
                await one.response_body(b"data: [DONE]\n\n")
                await one.until("response_body", 2)
            assert in_flight(app) == (progress <= 2)
            if how == "half close":
                await one.hang_up()
        await until(app, load=0, streams=0)
        [record] = app.brain.log.select(10, None, None, None)
        assert record.observed.outcome == ("ok" if progress > 2 else "client_gone")


async def test_a_deadline_of_the_proxy_s_ends_a_stream(tmp_path: Path) -> None:
    async with picker_and_client(tmp_path) as (app, client):
        one = Conversation(client.stub.Process(timeout=1.5), (FULL_DUPLEX, FULL_DUPLEX))
        one.start()
        await routed(one)
        assert in_flight(app) == 1
        await one.ended.wait()
        assert one.status is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(app, load=0, streams=0)
        await one.stop()


@pytest.mark.parametrize("how", ["half close", "cancel"])
async def test_who_leaves_while_waiting_leaves_the_queue(tmp_path: Path, how: str) -> None:
    async with picker_and_client(tmp_path, admission__max_in_flight_per_worker=1) as (app, client):
        async with client.conversation() as first:
            await routed(first)
            async with client.conversation() as second:
                await second.headers()
                await second.body(BODY)
                await until(app, load=1, streams=2, waiting=1)
                if how == "half close":
                    await second.hang_up()
                    assert second.kinds() == []
            await until(app, load=1, streams=1)
            async with client.conversation() as third:
                await third.headers()
                await third.body(BODY)
                await until(app, load=1, streams=2, waiting=1)
                await first.hang_up()
                await third.destination()
        await until(app, load=0, streams=0)


async def test_who_waits_for_too_long_is_answered_429(tmp_path: Path) -> None:
    limits = {"admission__max_in_flight_per_worker": 1, "admission__max_wait_s": 0.2}
    async with picker_and_client(tmp_path, **limits) as (app, client):
        async with client.conversation() as first:
            await routed(first)
            async with client.conversation() as second:
                await second.headers()
                await second.body(BODY)
                answer = await second.refusal()
                assert answer.status.code == 429
                told = {one.header.key: one.header.raw_value.decode() for one in answer.headers.set_headers}
                assert told["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
                assert int(told["retry-after"]) >= 1
                assert json.loads(answer.body)["error"]["code"] == "rate_limit_exceeded"
        await until(app, load=0, streams=0)


async def test_a_split_request_names_its_prefill_worker_for_the_sidecar(tmp_path: Path) -> None:
    async with sim_workers(2) as running:
        roles = ("prefill", "decode")
        entries = [
            msgspec.structs.replace(entry(worker), role=role, transfer="nixl", p2p=None)
            for worker, role in zip(running, roles, strict=True)
        ]
        async with (
            picker(entries, tmp_path) as (app, _),
            picker_client(f"127.0.0.1:{app.servers.grpc_port}") as client,
        ):
            prefill, decode = (address(worker.url) for worker in running)
            board, now_s = app.brain.board, asyncio.get_running_loop().time()
            for _ in range(400):  # so many answers that no prompt is computed beside them
                board.first_token(board.promise(decode, 0, 0.0, 0.0, now_s), now_s)
            async with client.conversation() as one:
                await one.headers({**POST, "x-prefiller-host-port": "192.0.2.1:1"})
                await one.body(LONG)
                sent = await one.until_body_ends()
                assert await one.destination() == [decode]
                answer = one.of("request_headers")[0].response
                assert headers_set(answer)["x-prefiller-host-port"] == prefill
                assert sent == LONG, "the sidecar's own parameters come later"
                assert (board.in_flight(prefill), board.in_flight(decode)) == (1, 401)
                await one.response({":status": "200", "content-type": "application/json"})
                await one.response_body(b"{", end=False)
                await one.until("response_body")
                assert board.in_flight(prefill) == 0, "its prompt is computed"
                assert (
                    headers_set(one.of("response_headers")[0].response)["x-pointsman-prefill-worker"]
                    == prefill
                )


async def test_what_is_sheddable_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with picker_and_client(tmp_path, admission__max_in_flight_per_worker=1) as (app, client):
        priorities = {"batch": -1, "chat": 0}
        monkeypatch.setattr(app.brain.discovery, "priority_of", priorities.get)
        object.__setattr__(app.brain.terms, "objective_priority", priorities.get)
        batch, chat = ({**POST, "x-gateway-inference-objective": name} for name in priorities)
        async with client.conversation() as alone:
            await alone.headers(batch)
            await alone.body(BODY)
            await alone.destination()
            async with client.conversation() as refused:
                await refused.headers(batch)
                await refused.body(BODY)
                answer = await refused.refusal()
                assert answer.status.code == 429
                told = {one.header.key: one.header.raw_value.decode() for one in answer.headers.set_headers}
                assert told["x-llm-d-request-dropped-reason"] == "rejected-saturated"
            async with client.conversation() as waits:
                await waits.headers(chat)
                await waits.body(BODY)
                await until(app, load=1, streams=2, waiting=1)
                await alone.hang_up()
                await waits.destination()
        await until(app, load=0, streams=0)


async def test_scores_are_told_of_every_endpoint_where_they_are_wanted(tmp_path: Path) -> None:
    async with picker_and_client(tmp_path, workers=3, epp__scores=True) as (app, client):
        busy = app.brain.fleet.statuses()[0].spec.id
        app.brain.board.promise(busy, 0, 5.0, 5.0, asyncio.get_running_loop().time())
        async with client.conversation() as one:
            await routed(one)
            chosen, *others = await one.destination()
            fields = one.answers[0].dynamic_metadata.fields["envoy.lb"].struct_value.fields
            scores = dict(fields["x-gateway-destination-endpoint-scores"].struct_value)
        assert set(scores) == {chosen, *others}
        assert all(0 < score <= 1 for score in scores.values())
        assert min(scores, key=lambda name: scores[name]) == others[-1] == busy
    async with picker_and_client(tmp_path / "b") as (_, client), client.conversation() as one:
        await routed(one)
        fields = one.answers[0].dynamic_metadata.fields["envoy.lb"].struct_value.fields
        assert set(fields) == {"x-gateway-destination-endpoint"}


def leftovers() -> list[str]:
    """Types of ours among what only the collector can free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("router.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


async def test_requests_leave_no_circles_for_the_collector(tmp_path: Path) -> None:
    """Collections held everything up for 60 to 160 ms when each request left its body in one."""
    async with picker_and_client(tmp_path) as (app, client):
        gc.collect()
        for body in (BODY, LONG, STREAMED):
            async with client.conversation() as one:
                await routed(one, body)
                await one.response({":status": "200", "content-type": "application/json"})
                await one.response_body(b"{}")
                await one.until("response_body")
                await one.hang_up()
        await until(app, load=0, streams=0)
        assert leftovers() == []
