# SPDX-License-Identifier: Apache-2.0
"""Requests per second through ``pointsman serve`` with one process and with several.

    python tests/bench/processes.py [--processes 1 2] [--seconds 5] [--rounds 3] [--connections 32] [--tokens 512]

The worker (a process that answers a constant), ``wrk`` and the gateway share the machine, so on two cores two
processes cannot be twice as fast: beside the rates stands the CPU time that all of the gateway's processes took for a
request, and how many requests it allows on cores of their own. Rounds alternate. Needs ``wrk`` and the ``test`` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from constant_answer import constant_answer

MODEL = "bench"
BODIES = 64
ANSWER = constant_answer(MODEL, 512, 0).encode()
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL}]}).encode()
METRICS = (
    b'vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:cache_config_info{block_size="16"} 1\n'
)


class Constant(asyncio.Protocol):
    """The least of a worker: one answer for every path."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            found = re.search(rb"content-length: *(\d+)", head)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self.buffer) < size:
                return
            self.buffer = self.buffer[size:]
            path = head.split(b" ", 2)[1]
            body = {b"/v1/models": MODELS, b"/metrics": METRICS}.get(path, ANSWER)
            kind = b"text/plain" if path == b"/metrics" else b"application/json"
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
                % (kind, len(body), body)
            )


async def serve_constant() -> None:
    server = await asyncio.get_running_loop().create_server(Constant, "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


def script(home: Path, tokens: int) -> Path:
    """For ``wrk``: bodies with token ids, half of each prompt shared by all."""
    chance = random.Random(1)
    shared = [chance.randrange(1000, 100_000) for _ in range(tokens // 2)]
    lines = []
    for _ in range(BODIES):
        prompt = shared + [chance.randrange(1000, 100_000) for _ in range(tokens - tokens // 2)]
        lines.append(json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 16}))
    (home / "bodies.jsonl").write_text("\n".join(lines))
    path = home / "post.lua"
    path.write_text(
        f"""
local bodies = {{}}
for line in io.lines("{home}/bodies.jsonl") do bodies[#bodies + 1] = line end
local next = 0
request = function()
  next = next % #bodies + 1
  return wrk.format("POST", "/v1/completions", {{["content-type"] = "application/json"}}, bodies[next])
end
"""
    )
    return path


def cpu_s(pids: set[int]) -> float:
    """User and system seconds of these processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {pid, *map(int, children)}


def measure(url: str, lua: Path, seconds: float, connections: int) -> float:
    """Requests per second; raises where any request failed."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(lua), url]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in text or "Socket errors" in text:
        raise RuntimeError(text)
    return float(re.search(r"Requests/sec: *([\d.]+)", text)[1])  # type: ignore[index]


def start(arguments: list[str], home: Path) -> tuple[subprocess.Popen[bytes], Any]:
    environment = {**os.environ, "XDG_STATE_HOME": str(home), "POINTSMAN_TOKENS__PROBE": "false"}
    process = subprocess.Popen(
        [sys.executable, "-P", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--constant", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.constant:
        asyncio.run(serve_constant())
        return
    if shutil.which("wrk") is None:
        sys.exit("wrk is needed")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        lua = script(home, args.tokens)
        running = []
        try:
            worker, told = start([__file__, "--constant"], home)
            running.append(worker)
            gateways = {}
            for count in args.processes:
                command = ["-m", "router", "serve", "--port", "0", "--processes", str(count)]
                command += ["--worker", f"http://127.0.0.1:{told['port']}"]
                gateway, addresses = start(command, home)
                running.append(gateway)
                gateways[count] = (gateway, addresses["url"])
            compare(gateways, lua, args)
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait()


def compare(gateways: dict[int, tuple[subprocess.Popen[bytes], str]], lua: Path, args: Any) -> None:
    """Measure in turn and print the table."""
    rates: dict[int, list[float]] = {count: [] for count in gateways}
    costs: dict[int, list[float]] = {count: [] for count in gateways}
    for _, url in gateways.values():
        measure(url, lua, 1.0, args.connections)
    for _ in range(args.rounds):
        for count, (gateway, url) in gateways.items():
            pids = family(gateway.pid)
            before, started_s = cpu_s(pids), time.monotonic()
            rate = measure(url, lua, args.seconds, args.connections)
            used_s = cpu_s(pids) - before
            rates[count].append(rate)
            costs[count].append(used_s / (rate * (time.monotonic() - started_s)))
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.connections} connections, {args.tokens} tokens"
    )
    print(
        "processes   requests/s (min, median, max)     ratio   CPU ms/request   requests/s that CPU allows on N cores"
    )
    first = statistics.median(next(iter(rates.values())))
    for count, found in rates.items():
        median, cost_s = statistics.median(found), statistics.median(costs[count])
        print(
            f"{count:9}   {min(found):8.0f} {median:8.0f} {max(found):8.0f}   {median / first:12.2f}   "
            f"{cost_s * 1000:14.2f}   {count / cost_s:12.0f}"
        )


if __name__ == "__main__":
    main()
