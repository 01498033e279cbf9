# SPDX-License-Identifier: Apache-2.0
"""Two processes that serve as one, seen from outside: what one does the other knows, and either may be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import aiohttp
from eventually import eventually
from picker_client import picker_client
from process_set import PATIENCE_S, Door, process_set
from service import BLOCK, MODEL, sim_workers

from router.decisions.lines import file_of_process, log_files, read_joined

GATEWAY = ("serve", "--port", "0")


def prompt_of(seed: int, blocks: int = 8) -> list[int]:
    chance = Random(seed)
    return [chance.randrange(97, 123) for _ in range(blocks * BLOCK + 1)]


async def hits(door: Door, prompt: list[int], path: str) -> bool:
    headers, _ = await door.complete(prompt)
    return headers["x-pointsman-path"] == path


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def in_flight(door: Door) -> int:
    rows = (await door.get("/admin/api/workers"))["workers"]
    return sum(row["in_flight"] for row in rows)


async def test_what_goes_through_one_process_is_known_to_the_other(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    async with (
        sim_workers(2, time_scale=5.0) as workers,
        process_set(GATEWAY, workers, tmp_path, decisions__log__path=str(log)) as one,
    ):
        first, second = await one.door(0), await one.door(1)
        prompt = prompt_of(1, blocks=64)
        headers, answer = await first.complete(prompt, max_tokens=5)
        chosen = next(worker for worker in workers if worker.url.endswith(headers["x-pointsman-worker"]))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 5}
        async with first.session.post(f"{chosen.url}/v1/completions", json=body) as direct:
            assert answer["choices"] == (await direct.json())["choices"]

        # The prefix that went through the first is found by the second, at the first time of asking.
        holder = headers["x-pointsman-worker"]

        async def indexed() -> bool:
            held = (await second.get("/admin/api/index"))["workers"].get(holder, {})
            return held.get("hbm_blocks", 0) >= 64 and await in_flight(second) == 0

        await eventually(indexed, "blocks that are not indexed", PATIENCE_S)
        found, _ = await second.complete(prompt)
        assert found["x-pointsman-path"] == "hbm:64,recompute:1"
        assert found["x-pointsman-worker"] == holder
        sent = 2

        # Whoever is asked answers for both.
        for door in (first, second):
            assert await door.metric("pointsman_attempts_total", outcome="ok") == sent
            assert len((await door.get("/admin/api/decisions?limit=1000"))["decisions"]) == sent
            record = await door.get(f"/admin/api/decisions/{headers['x-request-id']}")
            assert record["worker"] == headers["x-pointsman-worker"]
            assert await door.metric("pointsman_serving_processes") == 2
            assert (await door.get("/ready"))["ready"]

        # An order to one is obeyed by both.
        url = f"{one.url}/admin/api/workers/{holder}/drain"
        async with first.session.put(url, json={"draining": True}) as done:
            assert done.status == 200

        async def avoided() -> bool:
            headers, _ = await second.complete(prompt)
            return headers["x-pointsman-worker"] != holder

        await eventually(avoided, "requests at a worker that is drained", PATIENCE_S)
        # Told to stop, all end in order: a stream under way goes on to its end.
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 400, "stream": True}
        async with first.session.post(f"{one.url}/v1/completions", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            stopping = asyncio.create_task(one.stop())
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert await stopping == 0
        joined = read_joined(log_files(log))
        assert joined.unreadable == 0
        assert len(joined.finished) == len(joined.records) > sent


async def test_a_serving_process_that_is_killed_leaves_no_load_behind_and_comes_back(tmp_path: Path) -> None:
    async with sim_workers(2, time_scale=1.0) as workers, process_set(GATEWAY, workers, tmp_path) as one:
        first, second = await one.door(0), await one.door(1)
        await first.complete(prompt_of(2))
        await second.complete(prompt_of(3))
        counted = await second.metric("pointsman_attempts_total", outcome="ok")
        assert counted == 2

        async def stream(seed: int) -> None:
            body = {"model": MODEL, "prompt": prompt_of(seed), "max_tokens": 5000, "stream": True}
            async with first.session.post(f"{one.url}/v1/completions", json=body) as answer:
                async for _ in answer.content:
                    pass

        streaming = asyncio.create_task(stream(4))

        async def counts() -> bool:
            return await in_flight(second) == 1

        await eventually(counts, "a stream that does not count as load", PATIENCE_S)
        os.kill(first.pid, signal.SIGKILL)
        assert isinstance((await asyncio.gather(streaming, return_exceptions=True))[0], aiohttp.ClientError)
        for seed in range(5, 10):
            await second.complete(prompt_of(seed))

        async def reaped() -> bool:
            return await in_flight(second) == 0

        await eventually(reaped, "load of a process that is dead", PATIENCE_S)
        again = await one.door(0)
        assert again.pid != first.pid
        await again.complete(prompt_of(10))
        assert await second.metric("pointsman_process_restarts_total", process="serving-0") == 1
        # What the dead process had told is still counted.
        assert await again.metric("pointsman_attempts_total", outcome="ok") == counted + 6


async def test_a_process_that_lives_and_does_not_answer_is_killed_and_replaced(tmp_path: Path) -> None:
    async with (
        sim_workers(1) as workers,
        process_set(GATEWAY, workers, tmp_path, server__hung_after_s="10") as one,
    ):
        hung, other = await one.door(0), await one.door(1)
        os.kill(hung.pid, signal.SIGSTOP)

        async def ended() -> bool:
            return not lives(hung.pid)

        await eventually(ended, "a process that hangs", PATIENCE_S)
        again = await one.door(0)
        assert again.pid != hung.pid
        await again.complete(prompt_of(5))
        await other.complete(prompt_of(6))

        async def counted() -> bool:
            return (
                await other.metric("pointsman_process_hangs_total", process="serving-0") >= 1
                and await other.metric("pointsman_process_restarts_total", process="serving-0") >= 1
            )

        await eventually(counted, "a hang that is not counted", PATIENCE_S)


async def test_requests_are_served_while_the_keeper_is_replaced_and_nobody_outlives_the_supervisor(
    tmp_path: Path,
) -> None:
    async with sim_workers(2) as workers, process_set(GATEWAY, workers, tmp_path) as one:
        first, second = await one.door(0), await one.door(1)
        prompt = prompt_of(11)
        await first.complete(prompt)
        await eventually(lambda: hits(second, prompt, "hbm:8,recompute:1"), "a prefix not found", PATIENCE_S)
        keeper = await one.keeper()
        os.kill(keeper, signal.SIGKILL)
        # Both go on with what they know.
        for door in (first, second):
            assert await hits(door, prompt, "hbm:8,recompute:1")
            assert (await door.get("/ready"))["ready"]

        async def replaced() -> bool:
            async with first.session.get(f"{one.url}/metrics") as answer:
                return answer.status == 200 and 'restarts_total{process="keeper"} 1.0' in await answer.text()

        await eventually(replaced, "a keeper that is not replaced", PATIENCE_S)
        # The new index is another one: what workers replayed is found in it, and what comes from now on.
        assert await hits(second, prompt, "hbm:8,recompute:1")
        fresh = prompt_of(12)
        await second.complete(fresh)
        await eventually(lambda: hits(first, fresh, "hbm:8,recompute:1"), "events not followed", PATIENCE_S)

        pids = one.children()
        assert len(pids) == 3
        one.process.kill()

        async def gone() -> bool:
            return not any(map(lives, pids))

        await eventually(gone, "processes without a supervisor", PATIENCE_S)


async def test_streams_of_a_picker_go_to_all_processes_which_know_the_same(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    command = ("epp", "--grpc-port", "0", "--health-port", "0", "--http-port", "0")
    prompt = prompt_of(14)
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()
    own = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own for each client
    async with (
        sim_workers(2) as workers,
        process_set(command, workers, tmp_path, decisions__log__path=str(log), epp__host="127.0.0.1") as one,
        aiohttp.ClientSession() as session,
    ):
        holder = workers[1].url.removeprefix("http://")
        async with session.post(f"http://{holder}/v1/completions", data=body) as answer:
            assert answer.status == 200

        async def knows() -> bool:
            async with picker_client(one.told["grpc"], options=own) as client:
                return (await client.pick(body))[0] == holder

        await eventually(knows, "a prefix that is not found", PATIENCE_S)

        async def both() -> bool:
            assert await knows()
            return all(
                file_of_process(log, n).exists() and file_of_process(log, n).stat().st_size for n in (0, 1)
            )

        await eventually(both, "streams of one process only", PATIENCE_S)
        door = await one.door(0)
        counted = await door.metric("pointsman_decisions_total")
        assert counted == await door.metric("inference_extension_scheduler_attempts_total") > 1
        assert await door.metric("inference_pool_ready_pods") == 2
        assert await door.metric("inference_extension_info") == 1


def test_what_cannot_be_shared_is_refused_by_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "router",
            *GATEWAY,
            "--processes",
            "2",
            "--worker",
            "http://127.0.0.1:9",
        ],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "POINTSMAN_INDEX__BACKEND": "reference"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "index.backend" in done.stderr
    assert "native" in done.stderr


async def test_a_configuration_that_only_a_process_can_judge_ends_the_command_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "router", *GATEWAY, "--processes", "2"]
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, "--worker", "http://127.0.0.1:9"],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "POINTSMAN_COSTS__PROFILE": "abacus"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "costs.profile" in done.stderr
