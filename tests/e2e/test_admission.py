# SPDX-License-Identifier: Apache-2.0
"""Tenants and the queue, as clients meet them: who goes first, who is refused, whose blocks are whose."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from eventually import eventually
from recorder import Recorder
from service import BLOCK, CALM, MODEL, Reply, Service, entry, service, sim_workers

from router.config_fleet import WorkerEntry

KEYS = {name: f"key-of-{name}" for name in ("flood", "calm", "open1", "open2")}
ENTRIES: list[dict[str, Any]] = [
    {"name": "flood", "api_keys": [KEYS["flood"]]},
    {"name": "calm", "api_keys": [KEYS["calm"]]},
    {"name": "open1", "api_keys": [KEYS["open1"]], "shared_prefix": True},
    {"name": "open2", "api_keys": [KEYS["open2"]], "shared_prefix": True},
]
TENANTS: Mapping[str, object] = {**CALM, "tenants.entries": ENTRIES}
ONE_AT_A_TIME: Mapping[str, object] = {**TENANTS, "admission.max_in_flight_per_worker": 1}


def key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


def prompt(random: Random, blocks: int = 6) -> list[int]:
    return [random.randrange(97, 123) for _ in range(blocks * BLOCK + 1)]


async def complete(one: Service, tenant: str, tokens: list[int], **headers: str) -> Reply:
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
    return await one.post("/v1/completions", body, {**key(tenant), **headers})


@contextlib.asynccontextmanager
async def occupied(one: Service) -> AsyncIterator[None]:
    """A stream that keeps the only worker's only place until the block ends."""
    body = {"model": MODEL, "prompt": "stay", "max_tokens": 50_000, "stream": True}
    async with one.session.post(one.url + "/v1/completions", json=body) as answer:
        assert await answer.content.readany()
        yield


async def until_waiting(one: Service, count: int) -> None:
    async def reached() -> bool:
        return bool((await one.get("/admin/api/queue"))["waiting"] == count)

    await eventually(reached, f"a queue without {count} waiting")


async def test_one_tenant_s_flood_does_not_hold_up_another(tmp_path: Path) -> None:
    random, ended = Random(1), list[str]()

    async def ask(one: Service, tenant: str) -> Reply:
        reply = await complete(one, tenant, prompt(random))
        ended.append(tenant)
        return reply

    async with sim_workers(1) as workers, service([entry(workers[0])], tmp_path, ONE_AT_A_TIME) as one:
        async with occupied(one):
            flood = [asyncio.create_task(ask(one, "flood")) for _ in range(100)]
            await until_waiting(one, 100)
            calm = [asyncio.create_task(ask(one, "calm")) for _ in range(3)]
            await until_waiting(one, 103)
            rows = {row["tenant"]: row for row in (await one.get("/admin/api/queue"))["tenants"]}
            assert (rows["flood"]["waiting"], rows["calm"]["waiting"]) == (100, 3)
            assert await one.metric("pointsman_waiting_requests", tenant="flood") == 100
        replies = await asyncio.gather(*flood, *calm)
        assert {reply.status for reply in replies} == {200}
        # Turn by turn: the third of the calm tenant ends sixth, give or take the order of two answers on the wire.
        assert max(at for at, tenant in enumerate(ended) if tenant == "calm") <= 7
        records = [await one.decision(task.result()) for task in (flood[-1], calm[-1])]
        assert [record["tenant"] for record in records] == ["flood", "calm"]
        assert 0 < records[1]["waited_s"] < records[0]["waited_s"]
        assert await one.metric("pointsman_wait_seconds_count") == 103
        assert await one.metric("pointsman_waiting_requests") == 0
        await one.idle()


async def test_urgent_requests_go_first_within_what_their_tenant_may_ask_for(tmp_path: Path) -> None:
    entries = [{**ENTRIES[0], "priority": 10}, ENTRIES[1]]
    random, ended = Random(2), list[str]()

    async def ask(one: Service, tenant: str, priority: str) -> None:
        reply = await complete(one, tenant, prompt(random), **{"x-pointsman-priority": priority})
        assert reply.status == 200
        ended.append(f"{tenant} {(await one.decision(reply))['priority']}")

    settings = {**ONE_AT_A_TIME, "tenants.entries": entries}
    async with (
        sim_workers(1, time_scale=1.0) as workers,
        service([entry(workers[0])], tmp_path, settings) as one,
    ):
        async with occupied(one):
            asked = []
            for number, (tenant, priority) in enumerate([("calm", "99"), ("flood", "1"), ("flood", "50")], 1):
                asked.append(asyncio.create_task(ask(one, tenant, priority)))
                await until_waiting(one, number)
        await asyncio.gather(*asked)
        assert ended == ["flood 10", "flood 1", "calm 0"]


async def check_429(one: Service, reply: Reply, why: str, reason: str) -> None:
    assert reply.status == 429
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert "x-pointsman-worker" not in reply.headers
    error = reply.json["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert why in error["message"]
    assert await one.metric("pointsman_shed_total", tenant="calm", reason=reason) == 1


async def test_one_too_many_is_answered_429_with_a_time_to_come_back(tmp_path: Path) -> None:
    settings = {**ONE_AT_A_TIME, "admission.max_waiting": 1}
    async with sim_workers(1) as workers, service([entry(workers[0])], tmp_path, settings) as one:
        async with occupied(one):
            first = asyncio.create_task(complete(one, "calm", prompt(Random(3))))
            await until_waiting(one, 1)
            await check_429(
                one, await complete(one, "calm", prompt(Random(4))), "too many requests wait", "full"
            )
        assert (await first).status == 200
        await one.idle()


async def test_whoever_waits_too_long_is_answered_429_too(tmp_path: Path) -> None:
    settings = {**ONE_AT_A_TIME, "admission.max_wait_s": 0.3}
    async with sim_workers(1) as workers, service([entry(workers[0])], tmp_path, settings) as one:
        async with occupied(one):
            reply = await complete(one, "calm", prompt(Random(3)))
            await check_429(one, reply, "waited as long", "timeout")
        await one.idle()
        assert (await complete(one, "calm", prompt(Random(5)))).status == 200


async def test_clients_that_leave_while_they_wait_leave_nothing_behind(tmp_path: Path) -> None:
    async with sim_workers(1) as workers, service([entry(workers[0])], tmp_path, ONE_AT_A_TIME) as one:
        async with occupied(one):
            asked = [
                asyncio.create_task(complete(one, "flood", prompt(Random(number)))) for number in range(20)
            ]
            await until_waiting(one, 20)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await until_waiting(one, 0)
            assert await one.metric("pointsman_waiting_requests", tenant="flood") == 0
            stays = asyncio.create_task(complete(one, "calm", prompt(Random(99))))
            await until_waiting(one, 1)
        assert (await stays).status == 200
        await one.idle()
        assert (await one.get("/admin/api/queue"))["tenants"] == []
        # None of those that left ever went to the worker.
        assert await one.metric("pointsman_attempts_total") == 2


async def known(one: Service, tenant: str, tokens: list[int]) -> int:
    """Tokens of the prompt that the router would expect to find cached for a tenant."""
    path = f"/admin/api/explain?path=/v1/completions&tenant={tenant}"
    reply = await one.post(path, {"model": MODEL, "prompt": tokens})
    assert reply.status == 200, reply.json
    assert reply.json["tenant"] == tenant
    tokens_known: int = reply.json["predicted_cached_tokens"]
    return tokens_known


async def test_tenants_never_find_each_other_s_blocks_unless_both_share(tmp_path: Path) -> None:
    tokens = prompt(Random(6), blocks=8)
    async with sim_workers(1) as workers, service([entry(workers[0])], tmp_path, TENANTS) as one:

        async def indexed(tenant: str) -> bool:
            return await known(one, tenant, tokens) == 8 * BLOCK

        assert (await complete(one, "calm", tokens)).cached == 0
        await eventually(lambda: indexed("calm"), "an index without the tenant's blocks")
        for other in ("flood", "open1", "anonymous"):
            assert await known(one, other, tokens) == 0
        stranger, owner = await complete(one, "flood", tokens), await complete(one, "calm", tokens)
        assert (stranger.cached, owner.cached) == (0, 8 * BLOCK)
        assert stranger.headers["x-pointsman-path"] == "recompute:9"
        assert owner.headers["x-pointsman-path"] == "hbm:8,recompute:1"

        assert (await complete(one, "open1", tokens)).cached == 0
        await eventually(lambda: indexed("open2"), "an index without the shared blocks")
        assert (await complete(one, "open2", tokens)).cached == 8 * BLOCK
        assert await one.metric("pointsman_stale_tokens_total") == 0


async def test_a_client_s_own_salt_divides_its_tenant_and_reaches_no_other(tmp_path: Path) -> None:
    tokens = prompt(Random(7), blocks=8)
    async with sim_workers(1) as workers, service([entry(workers[0])], tmp_path, TENANTS) as one:

        async def cached(tenant: str, salt: str | None) -> int:
            body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
            body |= {"cache_salt": salt} if salt is not None else {}
            reply = await one.post("/v1/completions", body, key(tenant))
            await one.index_equals_truth(workers[0].url)
            assert reply.cached == (await one.decision(reply))["predicted_cached_tokens"]
            return reply.cached

        asked = [("calm", "s"), ("flood", "s"), ("calm", None), ("open1", "s"), ("calm", "s"), ("open2", "s")]
        assert [await cached(*one_of) for one_of in asked] == [0, 0, 0, 0, 8 * BLOCK, 8 * BLOCK]


async def test_without_a_known_key_the_answer_is_401_only_where_one_is_required(tmp_path: Path) -> None:
    async with sim_workers(1) as workers:
        async with service([entry(workers[0])], tmp_path, {**TENANTS, "tenants.require": True}) as one:
            refused = await one.complete("hello")
            assert refused.status == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json["error"]["code"] == "invalid_api_key"
            async with one.session.get(one.url + "/v1/models") as models:
                assert models.status == 401
            assert (await complete(one, "calm", prompt(Random(8)))).status == 200
        async with service([entry(workers[0])], tmp_path, TENANTS) as one:
            reply = await one.post(
                "/v1/completions", {"model": MODEL, "prompt": "hello"}, {"x-api-key": "nobody-s-key"}
            )
            assert reply.status == 200
            assert (await one.decision(reply))["tenant"] == "anonymous"


async def test_a_header_that_is_no_number_is_named(tmp_path: Path) -> None:
    async with sim_workers(1) as workers, service([entry(workers[0])], tmp_path, TENANTS) as one:
        for name in ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-pointsman-priority"):
            refused = await complete(one, "calm", prompt(Random(9)), **{name: "soon"})
            assert refused.status == 400
            assert name in refused.json["error"]["message"]
        good = await complete(
            one, "calm", prompt(Random(9)), **{"x-slo-ttft-ms": "1500", "x-slo-tpot-ms": "40"}
        )
        record = await one.decision(good)
        assert (record["slo_ttft_s"], record["slo_tpot_s"], record["waited_s"]) == (1.5, 0.04, 0.0)


async def test_a_worker_gets_the_salt_and_never_the_key(
    tmp_path: Path, recorder: Callable[[], Awaitable[Recorder]]
) -> None:
    worker = await recorder()
    async with service([WorkerEntry(url=worker.url, id=worker.id)], tmp_path, TENANTS) as one:
        body = b'{"model":"%s","prompt":[1],"cache_salt":"mine"}' % MODEL.encode()
        assert (await one.post("/v1/completions", body, key("calm"))).status == 200
        assert (
            await one.post("/v1/completions", body, {"authorization": "Bearer worker-s-own"})
        ).status == 200
        assert worker.bodies[0].startswith(body[:-1] + b',"cache_salt":"')
        assert worker.bodies[1] == body
        assert "authorization" not in worker.headers[0]
        assert worker.headers[1]["authorization"] == "Bearer worker-s-own"
        shown: Any = [await one.get("/admin/api/decisions"), await one.get("/admin/api/queue")]
        async with one.session.get(one.url + "/metrics") as answer:
            text = await answer.text()
        assert KEYS["calm"] not in f"{shown}{text}"
        # No client: a body that cannot carry the salt is not sent at all.
        refused = await one.post("/v1/completions", b"[1]", key("calm"))
        assert (refused.status, len(worker.bodies)) == (400, 2)


async def test_requests_wait_for_prefill_time_too_and_go_on_as_it_is_worked_off(tmp_path: Path) -> None:
    settings = {**TENANTS, "admission.max_queue_s": 0.05, "costs.calibrate": False}
    async with sim_workers(2) as workers, service([entry(w) for w in workers], tmp_path, settings) as one:
        random = Random(10)
        asked = [complete(one, "flood", prompt(random, blocks=64)) for _ in range(60)]
        replies = await asyncio.gather(*asked)
        assert {reply.status for reply in replies} == {200}
        records = [await one.decision(reply) for reply in replies]
        assert sum(record["waited_s"] > 0 for record in records) > 0
        # Nobody was sent to a worker with much more ahead of it than the limit.
        assert all(record["candidates"][0]["seconds"]["queue"] <= 0.05 for record in records)
        await one.idle()
