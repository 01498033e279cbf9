# SPDX-License-Identifier: Apache-2.0
"""The decision log of a live service: complete, decided again without a flip, and no service's business to fail by."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
from eventually import eventually
from service import BLOCK, MODEL, Service, entry, order_faults, service, sim_workers

from router.decisions.lines import log_files, read_joined
from router.decisions.log_file import LogFile
from router.decisions.what_if.logged import pieces
from router.decisions.what_if.redecide import redecide_pieces
from router.decisions.what_if.settings import Changes

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


async def ask(one: Service, prompt: list[int]) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, **STREAMED}
    assert (await one.post("/v1/completions", body)).status == 200


async def converse(one: Service, random: Random, conversations: int, turns: int) -> None:
    """Conversations that grow by a turn at a time, all at once: prefixes are shared, workers busy."""
    system = [random.randrange(97, 123) for _ in range(30 * BLOCK)]
    histories = [list(system) for _ in range(conversations)]
    for _ in range(turns):
        for history in histories:
            history += [random.randrange(97, 123) for _ in range(random.randrange(5 * BLOCK, 40 * BLOCK))]
        await asyncio.gather(*(ask(one, history) for history in histories))


@pytest.mark.parametrize("backend", ["native", "reference"])
async def test_every_decision_and_outcome_of_a_live_fleet_is_logged_and_decided_again_without_a_flip(
    backend: str, tmp_path: Path
) -> None:
    path = tmp_path / "decisions.jsonl"
    async with sim_workers(3) as workers:
        settings = {"decisions.log.path": str(path), "plan.explore": 0.0, "plan.backend": backend}
        async with service([entry(worker) for worker in workers], tmp_path, settings) as one:
            await converse(one, Random(1), conversations=8, turns=6)
            await one.idle()
            shown = (await one.get("/admin/api/decisions?limit=1000"))["decisions"]
            last = await one.get(f"/admin/api/decisions/{shown[0]['id']}")
            assert await one.metric("pointsman_decision_log_dropped_total") == 0
            lost = {
                kind: await one.metric("pointsman_lost_tokens_total", kind=kind)
                for kind in ("workload", "routing", "stale")
            }
        # The service has stopped: everything is on the disk.
        joined = read_joined(log_files(path))
    assert len(shown) == len(joined.records) == len(joined.finished) == 48
    assert (joined.unreadable, joined.dropped) == (0, 0)
    for record in joined.records.values():
        seen = record.observed
        assert seen.outcome == "ok"
        parts = (seen.lost_workload, seen.lost_routing, seen.lost_stale, seen.cached_tokens)
        assert sum(part or 0 for part in parts) == record.prompt_tokens
        assert None not in parts
        assert seen.regret_s is not None
    assert sum(lost.values()) == sum(
        one.prompt_tokens - (one.observed.cached_tokens or 0) for one in joined.records.values()
    )
    assert {one["worker"] for one in last["inputs"]["candidates"]} == {
        worker.url.removeprefix("http://") for worker in workers
    }
    assert last["observed"]["lost_workload"] is not None
    assert "inputs" not in shown[0]

    tally = redecide_pieces(pieces(log_files(path)), Changes(), 10, processes=1)
    assert (tally.decisions, tally.redecided, tally.flips) == (48, 48, 0), tally.largest
    assert tally.before().tokens["recompute"] < sum(one.prompt_tokens for one in joined.records.values())
    in_turn = redecide_pieces(pieces(log_files(path)), Changes(policy="round_robin"), 10, processes=1)
    assert in_turn.flips > 0


@pytest.mark.parametrize("path", ["/dev/full"])
async def test_a_disk_that_takes_nothing_is_said_so_and_requests_go_on(path: str, tmp_path: Path) -> None:
    async with (
        sim_workers(1) as workers,
        service([entry(workers[0])], tmp_path, {"decisions.log.path": path}) as one,
    ):
        assert "decision_log" not in (await one.get("/ready"))["degraded"]
        assert (await one.complete(list(range(97, 120)))).status == 200

        async def said() -> bool:
            return bool(await one.metric("pointsman_decision_log_degraded"))

        await eventually(said, "a full disk that nobody speaks of")
        assert (await one.get("/ready"))["degraded"]["decision_log"] == ["No space left on device"]
        assert (await one.complete(list(range(97, 120)))).status == 200
        assert await one.metric("pointsman_decision_log_errors_total") >= 1
    file = LogFile(Path(path), max_bytes=2**20, keep=0)
    file.open()  # nobody holds its lock any more
    file.close()


async def test_a_worker_that_evicts_in_silence_loses_trust(tmp_path: Path) -> None:
    prompt = [Random(5).randrange(97, 123) for _ in range(100 * BLOCK + 3)]
    async with sim_workers(1) as workers, service([entry(workers[0])], tmp_path) as one:
        worker = workers[0].url.removeprefix("http://")
        assert (await one.workers())[worker]["trust"] == 1.0
        await one.complete(prompt)
        await one.index_equals_truth(workers[0].url)
        await order_faults(workers[0].url, silence=True)
        async with one.session.post(
            workers[0].url + "/reset_prefix_cache", params={"reset_external": "true"}
        ) as answer:
            assert answer.status == 200
        reply = await one.complete(prompt)
        record = await one.decision(reply)
        assert record["observed"]["stale"]
        assert record["observed"]["lost_stale"] == record["predicted_cached_tokens"] - reply.cached > 0
        assert (await one.workers())[worker]["trust"] < 1.0
        assert await one.metric("pointsman_worker_trust", worker=worker) < 1.0
