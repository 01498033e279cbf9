# SPDX-License-Identifier: Apache-2.0
"""The commands as their users run them: exit codes, what they print, how they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from service import MODEL, worker_processes

WORKER = "http://127.0.0.1:9"


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POINTSMAN_")}
    return {**kept, "XDG_STATE_HOME": str(home), **more}


def run(arguments: Sequence[str], home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "router", *arguments],
        env=environment(home, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


BAD = {
    "an unknown key": ("fleet: {workerz: []}", (), {}, ["fleet.workerz", "workers"]),
    "a wrong type": ("gateway: {retries: many}", (), {}, ["gateway.retries", "many", "int"]),
    "out of range": ("gateway: {retries: -1}", (), {}, ["gateway.retries", "-1", ">= 0"]),
    "not one of the words": ("plan: {policy: magic}", (), {}, ["plan.policy", "magic"]),
    "not YAML": ("server: [", (), {}, ["YAML"]),
    "a bad worker": (
        None,
        ("--worker", "http://127.0.0.1:1,events=udp://x:1"),
        {},
        ["--worker.events", "udp://x:1", "tcp://host:port"],
    ),
    "an unknown option of a worker": (
        None,
        ("--worker", "http://127.0.0.1:1,speed=9"),
        {},
        ["--worker", "speed=9", "ranks"],
    ),
    "no worker": (None, (), {}, ["fleet.workers", "at least one worker"]),
    "a bad setting of the environment": (
        None,
        ("--worker", WORKER),
        {"POINTSMAN_FLEET__POLL_INTERVAL_S": "soon"},
        ["fleet.poll_interval_s", "soon"],
    ),
    "an unknown profile": (
        "costs: {profile: abacus}",
        ("--worker", WORKER),
        {},
        ["costs.profile", "abacus", "default"],
    ),
    "two workers of one name": (
        None,
        ("--worker", f"{WORKER},id=a", "--worker", "http://127.0.0.1:10,id=a"),
        {},
        ["fleet.workers[1].id", "'a'"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configuration_ends_with_2_and_names_field_value_and_what_is_accepted(
    tmp_path: Path, name: str
) -> None:
    text, arguments, variables, named = BAD[name]
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
        arguments = ("-c", str(tmp_path / "c.yaml"), *arguments)
    done = run(["serve", "--port", "0", *arguments], tmp_path, **variables)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in [*named, "accepted"]), last
    assert "Traceback" not in done.stderr


def test_a_port_in_use_and_a_key_that_is_none_end_with_2(tmp_path: Path, unused_tcp_port: int) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", unused_tcp_port))
        taken.listen()
        done = run(["serve", "--worker", WORKER, "--port", str(unused_tcp_port)], tmp_path)
    assert (done.returncode, "server.port" in done.stderr) == (2, True), done.stderr
    key = tmp_path / "bad.key"
    key.write_text("not a key")
    done = run(["serve", "--worker", WORKER], tmp_path, POINTSMAN_INDEX__HASH_KEY_FILE=str(key))
    assert (done.returncode, "index.hash_key_file" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("arguments", [[], ["fly"], ["serve", "--port", "many"], ["demo", "--workers", "1"]])
def test_bad_usage_ends_with_2(tmp_path: Path, arguments: list[str]) -> None:
    done = run(arguments, tmp_path)
    assert done.returncode == 2
    assert done.stderr


class Serving:
    """``pointsman serve`` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, told: Any) -> None:
        self.process = process
        self.url: str = told["url"]
        self.admin: str = told["admin"]

    @classmethod
    async def start(cls, arguments: Sequence[str], home: Path) -> Serving:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *["-P", "-m", "router", "serve", "--port", "0", *arguments],
            env=environment(home),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        return cls(process, json.loads(line))

    async def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(5):
            return await self.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_serve_says_where_it_listens_serves_and_stops_when_told(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with worker_processes(2, "--replay", "tcp://127.0.0.1:0") as workers:
        arguments = []
        for worker in workers:
            arguments += ["--worker", f"{worker.url},events={worker.events},replay={worker.replay}"]
        served = await Serving.start(arguments, tmp_path)
        try:
            # The line is printed once connections are accepted: no retry here.
            async with aiohttp.ClientSession() as session:
                body = {"model": MODEL, "prompt": "x" * 200, "max_tokens": 4}
                async with session.post(served.url + "/v1/completions", json=body) as answer:
                    assert answer.status == 200
                    assert answer.headers["x-pointsman-worker"] in {worker.id for worker in workers}
                async with session.get(served.admin + "workers") as answer:
                    assert {row["id"] for row in (await answer.json())["workers"]} == {w.id for w in workers}
            assert (tmp_path / "pointsman" / "hash.key").stat().st_mode & 0o777 == 0o600
            assert await served.stop(number) == 0
        finally:
            if served.process.returncode is None:
                served.process.kill()
                await served.process.wait()


async def test_doctor_prints_a_row_per_check_and_its_exit_code_says_whether_all_is_well(
    tmp_path: Path,
) -> None:
    async with worker_processes(1, "--replay", "tcp://127.0.0.1:0", "--p2p-port", "0") as (worker,):
        good = f"{worker.url},events={worker.events},replay={worker.replay},p2p={worker.p2p},ranks=1"
        done = await asyncio.to_thread(run, ["doctor", "--worker", good], tmp_path)
        assert done.returncode == 0, done.stdout
        assert worker.id in done.stdout
        bad = await asyncio.to_thread(run, ["doctor", "--worker", good, "--worker", WORKER], tmp_path)
        assert bad.returncode == 1, bad.stdout
        rows = [line for line in bad.stdout.splitlines() if "127.0.0.1:9" in line.split()[:3]]
        assert rows
        assert len(bad.stdout.splitlines()) > len(done.stdout.splitlines())
