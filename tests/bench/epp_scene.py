# SPDX-License-Identifier: Apache-2.0
"""What stands around the pickers of ``epp.py``: bodies, workers, Envoys, load, and what each process used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from constant_answer import constant_answer
from kv_batches import batch, stored
from kv_publisher import ScriptedEngine

SUPPORT = Path(__file__).parent.parent / "support"
TOKENIZER = Path(__file__).parent.parent / "golden/chat_templates/tokenizer"
MODEL = "bench"
BLOCK = 16
BODIES = 64
ANSWER = constant_answer(MODEL, 500, 480)


def bodies(size: int, *, text: bool) -> tuple[list[str], list[list[int]]]:
    """Request bodies of about ``size`` bytes with a text or with token ids, and the ids of their prompts."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    chance = random.Random(size)
    words = ["the", "man", "is", "on", "bus", "where", "switch", "points", "rail", "yard", "night", "light"]
    lines, prompts = [], []
    for _ in range(BODIES):
        prompt: Any = ""
        while len(prompt) < size - 60:
            prompt += chance.choice(words) + " "
        ids = tokenizer.encode(prompt).ids
        if not text:
            ids = [chance.randrange(1000, 100_000) for _ in range(size // 7)]
            prompt = ids
        prompts.append(ids)
        lines.append(json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 16}))
    return lines, prompts


def publish(engine: ScriptedEngine, prompts: Sequence[Sequence[int]]) -> None:
    """The blocks of these prompts are in the worker's HBM."""
    name = 1
    for ids in prompts:
        count = len(ids) // BLOCK
        if count:
            names = list(range(name, name + count))
            engine.batch(batch(stored(names, ids[: count * BLOCK], block_size=BLOCK)))
            name += count


def backend(name: str) -> dict[str, Any]:
    """A worker as the picker polls it, that answers every call alike."""
    metrics = f'vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:cache_config_info{{block_size="{BLOCK}"}} 1\n'
    models = json.dumps(
        {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131072}]}
    )

    def route(prefix: str, text: str, kind: str) -> dict[str, Any]:
        return {
            "match": {"prefix": prefix},
            "direct_response": {"status": 200, "body": {"inline_string": text}},
            "response_headers_to_add": [{"header": {"key": "content-type", "value": kind}}],
        }

    routes = [
        route("/metrics", metrics, "text/plain"),
        route("/v1/models", models, "application/json"),
        route("/v1/", ANSWER, "application/json"),
        route("/", "{}", "application/json"),
    ]
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}],
    }  # fmt: skip
    return {
        "name": name,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


class Envoy(NamedTuple):
    addresses: Mapping[str, str]
    """Of listeners by name."""
    pid: int


@contextlib.contextmanager
def started(command: Sequence[str], home: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "XDG_STATE_HOME": str(home), **more}
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def told(process: subprocess.Popen[bytes]) -> dict[str, str]:
    assert process.stdout is not None
    line: dict[str, str] = json.loads(process.stdout.readline())
    return line


@contextlib.asynccontextmanager
async def envoy(config: Mapping[str, Any], home: Path, name: str, threads: int = 1) -> AsyncIterator[Envoy]:
    """A running Envoy."""
    file, admin = home / f"{name}.json", home / f"{name}.admin"
    file.write_text(json.dumps(config))
    command = [str(Path(sys.executable).with_name("envoy")), "-c", str(file), "--disable-hot-restart"]
    command += ["--concurrency", str(threads), "--admin-address-path", str(admin), "-l", "error"]
    with started(command, home) as process:
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(OSError, aiohttp.ClientError):
                    async with session.get(f"http://{admin.read_text()}/listeners?format=json") as answer:
                        rows = json.loads(await answer.text()).get("listener_statuses", [])
                    if rows:
                        break
                await asyncio.sleep(0.05)
        addresses = {
            row["name"]: f"127.0.0.1:{row['local_address']['socket_address']['port_value']}" for row in rows
        }
        yield Envoy(addresses, process.pid)


def family(pid: int) -> set[int]:
    """A process and its children."""
    return {pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())}


def cpu_s(pids: set[int]) -> float:
    """User and system seconds of these processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Load(NamedTuple):
    """What ``wrk`` saw, connections always busy."""

    count: int
    rate: float
    p50_ms: float


def load(url: str, file: Path, connections: int, seconds: float) -> Load:
    """A run of ``wrk``; an error where an answer was none."""
    host = url.removeprefix("http://")
    script = (
        "local bodies, at = {}, 0\n"
        f'local headers = {{["content-type"] = "application/json", ["Host"] = "{host}"}}\n'
        f'for line in io.lines("{file}") do\n'
        '  bodies[#bodies + 1] = wrk.format("POST", "/v1/completions", headers, line)\nend\n'
        "function request() at = at % #bodies + 1; return bodies[at] end\n"
    )
    lua = file.with_suffix(".lua")
    lua.write_text(script)
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(lua), url]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in text or "Socket errors" in text:
        raise SystemExit(f"{url}\n{text}")
    total = re.search(r"(\d+) requests in", text)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    median = re.search(r"50%\s+([\d.]+)(us|ms|s)", text)
    assert total is not None
    assert rate is not None
    assert median is not None
    factor = {"us": 1e-3, "ms": 1.0, "s": 1e3}[median[2]]
    return Load(int(total[1]), float(rate[1]), float(median[1]) * factor)


class Paced(NamedTuple):
    """What a client that keeps to a schedule saw."""

    p50_ms: float
    p99_ms: float
    wall_s: float
    client_cpu_s: float


def paced(address: str, file: Path, rate: float, seconds: float) -> Paced:
    """Requests at the same random times whatever is at the address."""
    command = [
        sys.executable,
        str(SUPPORT / "paced_load.py"),
        address,
        str(file),
        f"{rate:.1f}",
        str(seconds),
    ]
    before, began_s = os.times().children_user + os.times().children_system, time.perf_counter()
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    spent_s = os.times().children_user + os.times().children_system - before
    seen = json.loads(text)
    return Paced(seen["p50_ms"], seen["p99_ms"], time.perf_counter() - began_s, spent_s)


def without_picker(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same Envoy, that asks nobody."""
    plain: dict[str, Any] = json.loads(json.dumps(config))
    for listener in plain["static_resources"]["listeners"]:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"] = [one for one in manager["http_filters"] if "ext_proc" not in one["name"]]
    return plain
