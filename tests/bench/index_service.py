# SPDX-License-Identifier: Apache-2.0
"""``pointsman indexer`` beside ``dynamo.indexer``: ingest, memory per block, ``/query``, in one run on one machine.

    python tests/bench/index_service.py [--peer-python PYTHON] [--pairs 5] [--encodings array,map] [--prompts 2000]

Both speak Mooncake's indexer API (RFC 1403). For each encoding and pair: a fresh indexer of ours subscribes to a fleet
of publishers (``index_service_fleet.py``), gets everything as fast as it can be sent, and is asked until every queried prompt
is wholly visible; then the same with the peer (``pip install ai-dynamo-runtime``, whose Python ``--peer-python`` is;
without it ours is measured alone). Who goes first changes from pair to pair. Then both are asked alternately, a hundred
questions each in turn, over one connection each.

Ingest counts from the first send; memory is what the resident set grew by from before it. Prints a table: medians with
the lowest and highest of the pairs, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from index_service_fleet import Workload

QUESTIONS = 200
TURN = 100  # questions to one before the other is asked
ROUNDS = 10
DEADLINE_S = 300.0
POLL_S = 0.005

Question = tuple[int, bytes]
"""The worker that has all of the prompt, and the request."""


@dataclass
class Result:
    """What the pairs gave for one product and encoding."""

    blocks_per_s: list[float] = field(default_factory=list)
    bytes_per_block: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)


class Client:
    """One connection, one call at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def raw(self, request: bytes) -> bytes:
        """The answer to a whole request, head and all."""
        self._socket.sendall(request)
        received = self._socket.recv(1 << 18)
        while (head := received.find(b"\r\n\r\n")) < 0:
            received += self._more()
        lines = received[:head].lower().split(b"\r\n")
        length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
        while len(received) < head + 4 + length:
            received += self._more()
        return received

    def call(self, path: str, body: object) -> Any:
        status, _, answer = self.raw(post(path, body)).partition(b"\r\n\r\n")
        if status.split()[1][:1] != b"2":
            raise RuntimeError(f"{path}: {answer!r}")
        return json.loads(answer or b"{}")

    def close(self) -> None:
        self._socket.close()

    def _more(self) -> bytes:
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the indexer closed the connection")
        return data


def post(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Fleet:
    """The process of publishers."""

    def __init__(self, workload: Workload, lanes: int) -> None:
        script = Path(__file__).with_name("index_service_fleet.py")
        command = [sys.executable, str(script), json.dumps(asdict(workload)), str(lanes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        told = self._read()
        self.addresses: list[list[str]] = told["addresses"]
        self.payload_bytes: int = told["payload_bytes"]

    def order(self, command: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@dataclass
class Running:
    """An indexer that listens."""

    process: subprocess.Popen[bytes]
    client: Client

    def rss_bytes(self) -> int:
        """Resident set of the process and its children."""
        total, todo = 0, [self.process.pid]
        while todo:
            pid = todo.pop()
            with contextlib.suppress(FileNotFoundError):
                fields = Path(f"/proc/{pid}/statm").read_text().split()
                total += int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    todo += [int(child) for child in children.read_text().split()]
        return total

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(30)


def start(command: Sequence[str]) -> Running:
    """Start an indexer on a free port and wait until it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            client = Client(port)
            client.raw(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            return Running(process, client)
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{command[0]} does not come up") from None
            time.sleep(0.1)


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[Running]:
    one = start(command)
    try:
        yield one
    finally:
        one.close()


def ingest(
    one: Running, fleet: Fleet, lane: int, workload: Workload, asked: list[Question], to: Result
) -> None:
    """Send everything to one indexer and wait until all of it is visible."""
    for worker, address in enumerate(fleet.addresses[lane]):
        one.client.call(
            "/register",
            {
                "instance_id": worker + 1,
                "endpoint": address,
                "model_name": "m",
                "block_size": workload.block_size,
            },
        )
    fleet.order(f"wait {lane}")
    before = one.rss_bytes()
    last = workload.prompts - 1
    # The last prompt of each worker first: once those are there, so is nearly everything.
    ends = [(worker, question(workload.prompt(worker, last))) for worker in range(workload.workers)]
    wanted = workload.blocks * workload.block_size
    started_s = fleet.order(f"send {lane}")["started_s"]
    for worker, request in ends + asked:
        while matched(one.client, worker, request) != wanted:
            if time.time() > started_s + DEADLINE_S:
                raise RuntimeError("not everything that was sent became visible")
            time.sleep(POLL_S)
    took_s = time.time() - started_s
    to.blocks_per_s.append(workload.stored_blocks / took_s)
    to.bytes_per_block.append((one.rss_bytes() - before) / workload.stored_blocks)


def question(ids: list[int]) -> bytes:
    return post("/query", {"token_ids": ids, "model_name": "m"})


def matched(client: Client, worker: int, request: bytes) -> int:
    scores = json.loads(client.raw(request).partition(b"\r\n\r\n")[2]).get("scores", {})
    return max(scores.get(str(worker + 1), {}).values(), default=0)


def latency(products: Sequence[tuple[Running, Result]], asked: list[Question]) -> None:
    """Ask all products in turn."""
    seconds: list[list[float]] = [[] for _ in products]
    for turn in range(ROUNDS * len(asked) // TURN):
        requests = [asked[at % len(asked)][1] for at in range(turn * TURN, (turn + 1) * TURN)]
        for (one, _), found in zip(products, seconds, strict=True):
            for request in requests:
                before = time.perf_counter()
                one.client.raw(request)
                found.append(time.perf_counter() - before)
    for (_, result), found in zip(products, seconds, strict=True):
        found.sort()
        result.p50_ms.append(found[len(found) // 2] * 1e3)
        result.p99_ms.append(found[len(found) * 99 // 100] * 1e3)


def measure(commands: dict[str, list[str]], workload: Workload, pairs: int) -> dict[str, Result]:
    """All pairs with one encoding."""
    results = {name: Result() for name in commands}
    random = Random(1)
    places = [
        (random.randrange(workload.workers), random.randrange(workload.prompts)) for _ in range(QUESTIONS)
    ]
    asked = [(worker, question(workload.prompt(worker, number))) for worker, number in places]
    fleet = Fleet(workload, len(commands))
    try:
        for pair in range(pairs):
            order = list(commands.items())[:: 1 if pair % 2 == 0 else -1]
            with contextlib.ExitStack() as stack:
                products = []
                for lane, (name, command) in enumerate(order):
                    fleet.order(f"leave {lane}")
                    one = stack.enter_context(running(command))
                    ingest(one, fleet, lane, workload, asked, results[name])
                    products.append((one, results[name]))
                latency(products, asked)
            print(f"{workload.encoding} {pair + 1}/{pairs}", file=sys.stderr, flush=True)
    finally:
        fleet.close()
    return results


def table(encoding: str, results: dict[str, Result]) -> Iterator[str]:
    """Rows of one encoding: median, lowest to highest, ratio of ours to the peer's median."""
    rows = [
        ("ingest, blocks/s", [result.blocks_per_s for result in results.values()], ",.0f"),
        ("memory, bytes per block", [result.bytes_per_block for result in results.values()], ".0f"),
        ("`/query` p50, ms", [result.p50_ms for result in results.values()], ".3f"),
        ("`/query` p99, ms", [result.p99_ms for result in results.values()], ".3f"),
    ]
    for what, values, shape in rows:
        cells = [
            f"{statistics.median(one):{shape}} ({min(one):{shape}} to {max(one):{shape}})" for one in values
        ]
        medians = [statistics.median(one) for one in values]
        ratio = f"{medians[0] / medians[1]:.2f}" if len(medians) > 1 else ""
        yield f"| {encoding} | {what} | " + " | ".join([*cells, ratio]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description="our indexer beside dynamo.indexer")
    add = parser.add_argument
    add("--peer-python", metavar="PYTHON", help="interpreter that has ai-dynamo-runtime")
    add("--peer-threads", type=int, default=4)
    add("--pairs", type=int, default=5)
    add("--encodings", default="array,map")
    add("--workers", type=int, default=8)
    add("--prompts", type=int, default=2000, help="per worker")
    add("--blocks", type=int, default=128, help="per prompt")
    add("--shared-blocks", type=int, default=32, help="with which all prompts begin")
    add("--block-size", type=int, default=16)
    add("--byte-hashes", action="store_true", help="32-byte block hashes, which dynamo.indexer 1.6 refuses")
    args = parser.parse_args()
    commands = {"pointsman": [sys.executable, "-P", "-m", "router", "indexer"]}
    if args.peer_python:
        peer = [args.peer_python, "-m", "dynamo.indexer", "--threads", str(args.peer_threads)]
        commands["dynamo.indexer"] = peer
    print("| events | | " + " | ".join(commands) + " | ratio |")
    print("|---|---|" + "---|" * (len(commands) + 1))
    for encoding in args.encodings.split(","):
        workload = Workload(
            args.workers,
            args.prompts,
            args.blocks,
            args.shared_blocks,
            args.block_size,
            encoding,
            args.byte_hashes,
        )
        for row in table(encoding, measure(commands, workload, args.pairs)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
