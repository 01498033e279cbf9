# SPDX-License-Identifier: Apache-2.0
"""Load spreads, is counted while it lasts, and is gone when it is over."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random

from eventually import eventually
from service import BLOCK, CALM, MODEL, Reply, Service, entry, order_faults, service, sim_workers

from engine_ext.sim.running import RunningSimWorker


async def shared_out(
    one: Service, workers: list[RunningSimWorker], asks: list[Callable[[], Awaitable[Reply]]]
) -> list[Reply]:
    """Sends them all before anybody answers, however slowly this machine does so."""
    for worker in workers:
        await order_faults(worker.url, hang=True)
    asked: list[asyncio.Future[Reply]] = []

    async def all_placed() -> bool:
        return sum(row["in_flight"] for row in (await one.workers()).values()) == len(asked)

    for at in range(0, len(asks), 50):
        asked += [asyncio.ensure_future(ask()) for ask in asks[at : at + 50]]
        await eventually(all_placed, "requests that are not placed yet")
    for worker in workers:
        await order_faults(worker.url, hang=False)
    return await asyncio.gather(*asked)


async def test_a_burst_of_unrelated_prompts_is_shared_evenly(tmp_path: Path) -> None:
    random = Random(1)
    prompts = [[random.randrange(97, 123) for _ in range(6 * BLOCK + 5)] for _ in range(500)]
    # No poll falls into the burst: what counts is what was promised.
    async with (
        sim_workers(5) as workers,
        service([entry(w) for w in workers], tmp_path, CALM) as one,
    ):
        replies = await shared_out(one, workers, [partial(one.complete, prompt) for prompt in prompts])
        assert {reply.status for reply in replies} == {200}
        shares = Counter(reply.worker for reply in replies)
        assert len(shares) == 5
        assert all(70 <= share <= 130 for share in shares.values()), shares
        assert {reply.headers["x-pointsman-path"] for reply in replies} == {"recompute:7"}
        await one.idle()
        residents = one.app.brain.board.residents
        assert residents.prompts == residents.nodes == 0
        for worker in workers:
            assert await one.index_equals_truth(worker.url) == shares[worker.url.removeprefix("http://")] * 6


async def test_a_burst_to_a_path_we_do_not_know_is_shared_evenly_too(tmp_path: Path) -> None:
    async with (
        sim_workers(5) as workers,
        service([entry(w) for w in workers], tmp_path, CALM) as one,
    ):
        body = {"model": MODEL, "input": "x" * 400}
        replies = await asyncio.gather(*(one.post("/v1/embeddings", body) for _ in range(300)))
        shares = Counter(reply.worker for reply in replies)
        assert {reply.status for reply in replies} == {200}
        assert all(30 <= shares[w.url.removeprefix("http://")] <= 120 for w in workers), shares
        await one.idle()


async def test_headers_of_a_routed_request_say_who_and_how(tmp_path: Path) -> None:
    prompt = [Random(2).randrange(97, 123) for _ in range(8 * BLOCK + 1)]
    async with sim_workers(2) as workers, service([entry(w) for w in workers], tmp_path, CALM) as one:
        cold = await one.complete(prompt)
        await one.index_equals_truth(f"http://{cold.worker}")
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        warm = await one.post("/v1/completions", body, {"x-request-id": "my-own.id_1"})
        assert cold.headers["x-pointsman-path"] == "recompute:9"
        assert warm.headers["x-pointsman-path"] == "hbm:8,recompute:1"
        assert warm.worker == cold.worker
        assert warm.headers["x-request-id"] == "my-own.id_1"
        assert "x-pointsman-fallback" not in warm.headers
        record = await one.decision(warm)
        assert record["id"] == "my-own.id_1"
        # A dry run sends nothing and says the same.
        dry = await one.post("/admin/api/explain", body)
        assert dry.json["worker"] == warm.worker
        assert dry.json["path_blocks"] == {"hbm": 8, "recompute": 1}
        assert len((await one.get("/admin/api/decisions"))["decisions"]) == 2
        images = {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
        blind = await one.post("/v1/chat/completions", images)
        assert blind.headers["x-pointsman-fallback"] == "multimodal"
        assert "x-pointsman-path" not in blind.headers


async def vanish(one: Service, random: Random) -> str:
    """Open a connection, ask, and leave at some point without a word; returns where."""
    port = int(one.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prompt = [random.randrange(97, 123) for _ in range(random.choice((20, 400)))]
    document = {"model": MODEL, "prompt": prompt, "max_tokens": 30, "stream": random.random() < 0.7}
    body = json.dumps(document).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    stage = random.choice(["in the head", "in the body", "at once", "first byte", "middle", "end"])
    try:
        if stage == "in the head":
            writer.write(head[: random.randrange(1, len(head) - 1)])
        elif stage == "in the body":
            writer.write(head + body[: random.randrange(1, len(body) - 1)])
        else:
            writer.write(head + body)
        await writer.drain()
        if stage == "first byte":
            await reader.readexactly(1)
        elif stage == "middle":
            await reader.readexactly(random.randrange(200, 500))
        elif stage == "end":
            received = b""
            while b"[DONE]" not in received and b'"usage"' not in received:
                piece = await reader.read(4096)
                assert piece
                received += piece
    finally:
        if random.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()
    return stage


async def test_clients_that_vanish_at_any_point_leave_no_load_behind(tmp_path: Path) -> None:
    random = Random(4)
    async with (
        sim_workers(3, time_scale=4.0) as workers,
        service([entry(w) for w in workers], tmp_path) as one,
    ):
        stages = Counter(await asyncio.gather(*(vanish(one, random) for _ in range(200))))
        assert len(stages) == 6
        await one.idle()
        assert await one.metric("pointsman_in_flight_requests") == 0
        for worker in workers:
            name = worker.url.removeprefix("http://")

            async def empty(name: str = name) -> bool:
                # The last sample of its metrics may still have counted requests that nobody waits for.
                return bool((await one.workers())[name]["queue_s"] == [0.0])

            await eventually(empty, "a queue of requests that are gone")
            row = (await one.workers())[name]
            assert row["pulls_served"] == 0
            assert row["health"] == "healthy"

        async def all_ended() -> bool:
            records = (await one.get("/admin/api/decisions?limit=1000"))["decisions"]
            return all(record["observed"]["outcome"] for record in records)

        assert await all_ended()
        assert await one.metric("pointsman_attempts_total", outcome="client_gone") > 0
        assert await one.metric("pointsman_attempts_total", outcome="worker_error") == 0
        # The engines stopped too: nobody listens.
        assert all(
            worker.engine.metrics().running + worker.engine.metrics().waiting == 0 for worker in workers
        )
        assert (await one.complete("x")).status == 200
