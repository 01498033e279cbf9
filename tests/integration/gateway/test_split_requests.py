# SPDX-License-Identifier: Apache-2.0
"""Both legs of a split request, with workers that do byte for byte what a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from router.errors import NoWorkerAvailable
from router.gateway.proxy import GatewayApp
from router.gateway.routing import PrefillLeg, Route
from router.gateway.settings import GatewaySettings
from router.gateway.upstream import UpstreamClient
from router.request import InferenceRequest, Outcome, Usage

from .conftest import PATIENCE_S, Call, Client, Gateway, Worker, serving

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m", "stream":true,"max_tokens":9}'
EVENTS = b'data: {"choices":[{"text":"x"}]}\n\ndata: [DONE]\n\n'
ONE_TOKEN = b'{"usage":{"prompt_tokens":7,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":3}}}'
PREFILL_KEYS = {"remote_decoder": {"kv_request_id": "id"}}
DECODE_KEYS = {"remote_prefiller": {"kv_request_id": "id"}}
HANDED = {"remote_engine_id": "e", "remote_block_ids": [[18446744073709551615, 2]], "do_remote_prefill": True}


@dataclass
class Attempt:
    """What the gateway told of one attempt."""

    route: Route
    changed: asyncio.Event
    legs: list[tuple[Outcome, int | None]] = field(default_factory=list)
    leg_usage: Usage | None = None
    ends: list[tuple[Outcome, int | None]] = field(default_factory=list)

    def first_byte(self) -> None: ...

    def usage(self, usage: Usage) -> None: ...

    def prefill_finished(self, outcome: Outcome, status: int | None, usage: Usage | None) -> None:
        self.legs.append((outcome, status))
        self.leg_usage = usage
        self.changed.set()

    def finish(self, outcome: Outcome, status: int | None) -> None:
        self.ends.append((outcome, status))
        self.changed.set()


@dataclass
class Splitting:
    """Splits the first attempt between ``p`` and ``d``; retries go to those that are left."""

    prefill: PrefillLeg
    workers: dict[str, str]
    attempts: list[Attempt] = field(default_factory=list)
    tried: list[frozenset[str]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def dispatch(self, request: InferenceRequest, tried: frozenset[str]) -> Attempt:
        self.tried.append(tried)
        split = not tried
        for name, url in self.workers.items():
            if name not in tried:
                keys = {} if self.prefill.first or not split else {"kv_transfer_params": DECODE_KEYS}
                headers = ((b"x-pointsman-worker", name.encode()),)
                route = Route(
                    request.request_id, name, url, keys, (), headers, self.prefill if split else None
                )
                self.attempts.append(Attempt(route, self.changed))
                return self.attempts[-1]
        raise NoWorkerAvailable("all_tried")

    @property
    def in_flight(self) -> int:
        return sum(not attempt.ends for attempt in self.attempts)

    async def prefilled(self) -> None:
        """Wait until the gateway has seen the first prefill leg end."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.attempts[0].legs:
                self.changed.clear()
                await self.changed.wait()

    async def settled(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while any(not a.ends or (a.route.prefill and not a.legs) for a in self.attempts):
                self.changed.clear()
                await self.changed.wait()

    def check_once(self) -> None:
        for attempt in self.attempts:
            assert len(attempt.ends) == 1
            assert len(attempt.legs) == (1 if attempt.route.prefill else 0)


@dataclass
class Scene:
    """A gateway over ``p``, ``d`` and a spare worker."""

    gateway: Gateway
    splitting: Splitting
    p: Worker
    d: Worker
    spare: Worker

    async def ask(self, body: bytes = BODY, target: str = CHAT) -> tuple[int, bytes, str | None]:
        reply = await self.gateway.ask(target, body)
        await self.splitting.settled()
        self.splitting.check_once()
        return reply.status, reply.body, reply.header("x-pointsman-worker")


Script = Callable[[Call], Awaitable[None]]
Stage = Callable[..., Awaitable[Scene]]


async def streams(call: Call) -> None:
    await call.begin()
    await call.chunk(EVENTS)
    await call.end()


async def one_token(call: Call) -> None:
    await call.answer(200, "application/json", ONE_TOKEN)


async def hands_over(call: Call) -> None:
    await call.answer(200, "application/json", json.dumps({"kv_transfer_params": HANDED}).encode())


async def refuses(call: Call) -> None:
    await call.answer(400, "application/json", b'{"error":"too long"}')


async def breaks(call: Call) -> None:
    await call.answer(500, "application/json", b"{}")


async def resets(call: Call) -> None:
    call.reset()


async def hangs(call: Call) -> None:
    await call.hung_up()


@pytest.fixture
async def stage(start_worker: Callable[[Script], Awaitable[Worker]]) -> AsyncIterator[Stage]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            prefill: Script,
            decode: Script,
            *,
            first: bool = False,
            timeout_s: float | None = None,
            **limits: float,
        ) -> Scene:
            p, d, spare = [await start_worker(script) for script in (prefill, decode, streams)]
            leg = PrefillLeg("p", p.url, {"kv_transfer_params": PREFILL_KEYS}, (), first, timeout_s)
            splitting = Splitting(leg, {"d": d.url, "spare": spare.url})
            settings = GatewaySettings(**limits)  # type: ignore[arg-type]
            client = UpstreamClient(settings)
            stack.push_async_callback(client.aclose)
            app = GatewayApp(splitting, client, settings, models=lambda: b"{}")
            port = await stack.enter_async_context(serving(app))
            return Scene(Gateway(port, splitting), splitting, p, d, spare)  # type: ignore[arg-type]

        yield start


async def test_the_client_gets_the_decode_worker_s_bytes_and_each_worker_its_own_body(stage: Stage) -> None:
    async def decode_after_prefill(call: Call) -> None:
        await scene.splitting.prefilled()
        await streams(call)

    scene = await stage(one_token, decode_after_prefill)
    assert await scene.ask() == (200, EVENTS, "d")
    [decode], [prefill] = scene.d.calls, scene.p.calls
    keys = json.dumps(DECODE_KEYS, separators=(",", ":")).encode()
    assert decode.body == BODY[:-1] + b',"kv_transfer_params":' + keys + b"}"
    assert prefill.body.startswith(BODY[:-1])
    assert json.loads(prefill.body) == {
        "model": "m",
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "kv_transfer_params": PREFILL_KEYS,
    }
    assert prefill.line == decode.line
    assert prefill.header("x-request-id") == decode.header("x-request-id")
    [attempt] = scene.splitting.attempts
    assert attempt.legs == [(Outcome.OK, 200)]
    assert attempt.leg_usage == Usage(7, 1, 3)
    assert attempt.ends == [(Outcome.OK, 200)]


async def test_what_the_engine_refuses_beside_one_token_is_made_neutral(stage: Stage) -> None:
    scene = await stage(one_token, streams)
    body = (
        b'{"stream":true,"stream_options":{"include_usage":true},"min_tokens":5,"max_completion_tokens":50}'
    )
    await scene.ask(body)
    sent = json.loads(scene.p.calls[0].body)
    assert (sent["stream"], sent["stream_options"], sent["min_tokens"]) == (False, None, 0)
    assert (sent["max_tokens"], sent["max_completion_tokens"]) == (1, 1)
    await scene.ask(b'{"prompt":"a"}', "/v1/completions")
    assert "max_completion_tokens" not in json.loads(scene.p.calls[1].body)


async def test_both_legs_run_at_the_same_time(stage: Stage) -> None:
    asked = {"p": asyncio.Event(), "d": asyncio.Event()}

    async def prefill(call: Call) -> None:
        asked["p"].set()
        await asked["d"].wait()
        await one_token(call)

    async def decode(call: Call) -> None:
        asked["d"].set()
        await asked["p"].wait()
        await streams(call)

    scene = await stage(prefill, decode)
    assert await scene.ask() == (200, EVENTS, "d")


async def test_where_the_answer_of_the_prefill_is_needed_it_comes_first(stage: Stage) -> None:
    answered = asyncio.Event()

    async def prefill(call: Call) -> None:
        assert not scene.d.calls
        await hands_over(call)
        answered.set()

    async def decode(call: Call) -> None:
        assert answered.is_set()
        await streams(call)

    scene = await stage(prefill, decode, first=True)
    assert await scene.ask() == (200, EVENTS, "d")
    assert json.loads(scene.d.calls[0].body)["kv_transfer_params"] == HANDED


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("prefill", "told"),
    [
        (refuses, (Outcome.CLIENT_ERROR, 400)),
        (breaks, (Outcome.WORKER_ERROR, 500)),
        (resets, (Outcome.WORKER_ERROR, None)),
    ],
)
async def test_a_failed_prefill_ends_the_other_leg_and_the_request_is_served_alone(
    stage: Stage, prefill: Script, told: tuple[Outcome, int | None], first: bool
) -> None:
    left = asyncio.Event()
    began = asyncio.Event()

    async def fails_once_the_other_has_begun(call: Call) -> None:
        if not first:
            await began.wait()
        await prefill(call)

    async def waits_the_first_time(call: Call) -> None:
        if len(scene.d.calls) > 1 or first:
            await streams(call)
            return
        await call.begin()  # headers are no byte of the answer
        began.set()
        await call.hung_up()
        left.set()

    scene = await stage(fails_once_the_other_has_begun, waits_the_first_time, first=first, retries=0)
    assert await scene.ask() == (200, EVENTS, "d")
    assert first or left.is_set()
    assert scene.splitting.tried == [frozenset(), frozenset({"p"})]
    split, alone = scene.splitting.attempts
    assert split.legs == [told]
    assert split.ends[0][0] is Outcome.CANCELLED
    assert alone.ends == [(Outcome.OK, 200)]
    assert json.loads(scene.d.calls[-1].body).get("kv_transfer_params") is None
    assert len(scene.p.calls) == 1


@pytest.mark.parametrize("first", [False, True])
async def test_a_silent_prefill_is_given_up_at_its_limit(stage: Stage, first: bool) -> None:
    async def waits_the_first_time(call: Call) -> None:
        await (streams(call) if len(scene.splitting.attempts) > 1 else hangs(call))

    scene = await stage(hangs, waits_the_first_time, first=first, timeout_s=0.2)
    assert await scene.ask() == (200, EVENTS, "d")
    assert scene.splitting.attempts[0].legs == [(Outcome.WORKER_ERROR, None)]


async def test_an_answer_without_parameters_is_a_failed_prefill_where_they_are_needed(stage: Stage) -> None:
    scene = await stage(one_token, streams, first=True)
    assert await scene.ask() == (200, EVENTS, "d")
    assert scene.splitting.attempts[0].legs == [(Outcome.WORKER_ERROR, 200)]
    assert len(scene.d.calls) == 1


@pytest.mark.parametrize("decode", [breaks, resets])
async def test_a_failed_decode_worker_ends_the_prefill_and_another_takes_over(
    stage: Stage, decode: Script
) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def prefill(call: Call) -> None:
        asked.set()
        await call.hung_up()
        left.set()

    async def fails_once_the_prefill_runs(call: Call) -> None:
        await asked.wait()
        await decode(call)

    scene = await stage(prefill, fails_once_the_prefill_runs)
    assert await scene.ask() == (200, EVENTS, "spare")
    await asyncio.wait_for(left.wait(), PATIENCE_S)
    assert scene.splitting.tried == [frozenset(), frozenset({"d"})]
    assert scene.splitting.attempts[0].legs == [(Outcome.CANCELLED, None)]
    assert scene.splitting.attempts[0].ends[0][0] is Outcome.WORKER_ERROR


async def test_a_prefill_that_fails_after_the_first_byte_changes_nothing(stage: Stage) -> None:
    begun, failed = asyncio.Event(), asyncio.Event()

    async def prefill(call: Call) -> None:
        await begun.wait()
        await breaks(call)

    async def decode(call: Call) -> None:
        await call.begin()
        await call.chunk(EVENTS[:10])
        await failed.wait()
        await call.chunk(EVENTS[10:])
        await call.end()

    scene = await stage(prefill, decode)
    client = await scene.gateway.connect()
    await client.send(CHAT, BODY)
    await client.reader.readuntil(b"\r\n\r\n")
    assert await client.read_chunk() == EVENTS[:10]
    begun.set()
    await scene.splitting.prefilled()
    failed.set()
    assert await client.read_chunk() == EVENTS[10:]
    assert await client.read_chunk() == b""
    await client.close()
    await scene.splitting.settled()
    assert scene.splitting.attempts[0].legs == [(Outcome.WORKER_ERROR, 500)]
    assert scene.splitting.attempts[0].ends == [(Outcome.OK, 200)]


async def leave(client: Client, *reached: asyncio.Event) -> None:
    for event in reached:
        await asyncio.wait_for(event.wait(), PATIENCE_S)
    await client.close()


@pytest.mark.parametrize("first", [False, True])
async def test_a_client_that_leaves_ends_every_leg(stage: Stage, first: bool) -> None:
    asked = [asyncio.Event(), asyncio.Event()]
    left = [asyncio.Event(), asyncio.Event()]

    def waiting(number: int) -> Script:
        async def wait(call: Call) -> None:
            asked[number].set()
            await call.hung_up()
            left[number].set()

        return wait

    scene = await stage(waiting(0), waiting(1), first=first)
    client = await scene.gateway.connect()
    await client.send(CHAT, BODY)
    legs = asked[:1] if first else asked
    await leave(client, *legs)
    for event in left[: len(legs)]:
        await asyncio.wait_for(event.wait(), PATIENCE_S)
    await scene.splitting.settled()
    scene.splitting.check_once()
    [attempt] = scene.splitting.attempts
    assert (attempt.legs, attempt.ends) == ([(Outcome.CANCELLED, None)], [(Outcome.CLIENT_GONE, None)])
    assert len(scene.d.calls) == (0 if first else 1)
    assert scene.spare.calls == []


async def test_an_answer_that_comes_without_its_prefill_ends_it(stage: Stage) -> None:
    left = asyncio.Event()

    async def prefill(call: Call) -> None:
        await call.hung_up()
        left.set()

    scene = await stage(prefill, streams)
    assert await scene.ask() == (200, EVENTS, "d")
    assert scene.splitting.attempts[0].legs == [(Outcome.CANCELLED, None)]
    if scene.p.calls:
        await asyncio.wait_for(left.wait(), PATIENCE_S)


async def test_a_dispatcher_that_always_splits_ends_the_search_too(stage: Stage) -> None:
    scene = await stage(breaks, hangs, retries=1)
    splitting = scene.splitting
    original = splitting.dispatch

    async def always(request: InferenceRequest, tried: frozenset[str]) -> Attempt:
        assert len(splitting.attempts) < 10
        return await original(request, frozenset())

    splitting.dispatch = always  # type: ignore[method-assign]
    reply = await scene.gateway.ask(CHAT, BODY)
    assert (reply.status, reply.error["code"]) == (502, "worker_failed")
    assert "prefill leg" in reply.error["message"]
    assert len(splitting.attempts) == 3
