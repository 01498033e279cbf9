# SPDX-License-Identifier: Apache-2.0
"""A gateway that starts again, or beside another, knows what workers hold although their replays do not reach back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service import Service, entry, service, sim_workers

from engine_ext.sim.running import RunningSimWorker

PROMPT = [7 + i % 500 for i in range(400)]


def keep_newest_batch(worker: RunningSimWorker) -> None:
    """As if the engine had published so much since that its replay no longer has the rest."""
    kept = worker.worker.publisher._buffer
    while len(kept) > 1:
        kept.popleft()


async def restored(one: Service) -> Any:
    return (await one.get("/admin/api/index"))["recovery"]


async def check_knows_the_prompt(one: Service) -> None:
    reply = await one.complete(PROMPT)
    assert (await one.decision(reply))["predicted_cached_tokens"] == reply.cached > 0
    (row,) = (await one.workers()).values()
    assert [stream["partial"] for stream in row["streams"]] == [None]


async def test_a_gateway_that_starts_again_recalls_what_its_workers_hold(tmp_path: Path) -> None:
    settings = {"index.snapshot": str(tmp_path / "index.snapshot")}
    async with sim_workers(1) as (worker,):
        async with service([entry(worker)], tmp_path, settings) as first:
            await first.complete(PROMPT)
            await first.index_equals_truth(worker.url)
        keep_newest_batch(worker)
        async with service([entry(worker)], tmp_path, settings) as second:
            assert (await restored(second))["restored_workers"] == {"snapshot": 1}
            assert await second.index_equals_truth(worker.url) > 0
            await check_knows_the_prompt(second)
            assert await second.index_equals_truth(worker.url) > 0


async def test_a_new_replica_takes_the_map_of_another_gateway(tmp_path: Path) -> None:
    async with sim_workers(1) as (worker,), service([entry(worker)], tmp_path) as peer:
        await peer.complete(PROMPT)
        await peer.index_equals_truth(worker.url)
        keep_newest_batch(worker)
        peers = ["http://127.0.0.1:1/admin/api", f"{peer.url}/admin/api"]
        async with service([entry(worker)], tmp_path, {"index.peers": peers}) as replica:
            view = await restored(replica)
            assert (view["peer"], view["restored_workers"]) == (peers[1], {"peer": 1})
            await check_knows_the_prompt(replica)
            for one in (peer, replica):
                assert await one.index_equals_truth(worker.url) > 0
