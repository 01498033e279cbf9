# SPDX-License-Identifier: Apache-2.0
"""Pull bandwidth between two processes of this machine, beside NIXL's own shapes for the same bytes.

    python -m engine_ext.transfer.bench [--sizes 64K,1M,...] [--blocks 64K,2M] [--depths 1,16] [--pattern P] [--json]

Four shapes read the same blocks into the same memory, again and again in a warm loop, `depth` requests of `size` bytes
at a time, each of blocks of its own:

    nixlbench   what NIXL's own benchmark times (nixlbench, `execTransferLoop`): requests made once, with its
                notification to the source for each transfer, posted, asked in a loop without a pause, and posted again
    posted      the same without notifications, which no pull of ours sends
    made        the same with each request made from prepared lists (as nixlbench with `--recreate_xfer
                --prepared_xfer`, but the lists stay) and released within the time, as every caller has to whose block
                lists change
    ours        everything a caller of the engine pays for: submit a block list, cut or join it, make and post
                transfers, poll with the engine's own pauses, take the event

They alternate. Bandwidths are the best of the rounds, since anything else on the machine only ever makes a round
slower; ratios are the median of the ratios within a round. `--clock cpu` counts the reader's CPU seconds instead: over
shared memory that is the whole cost, and a machine that is busy with other work does not blur it. Set UCX_TLS to choose
a transport.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Self

from .config import TransferConfig
from .events import Pulled, PullRequest
from .fingerprint import Fingerprint
from .nixl_agent import NixlPullAgent
from .node import TransferNode, new_boot_id, open_node
from .region import HostRegion, Region

SIZES = "64K,256K,1M,4M,16M,64M,256M,1G"
Clock = Callable[[], float]
BlockLists = list[tuple[list[int], list[int]]]
ROUND_BYTES = 4 << 20
"""A shape moves at least so much between two looks at the clock."""
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `size_bytes` is one request's. Bandwidths in GB/s (10^9 bytes), best of `rounds`; ratios are medians over the rounds."""

    size_bytes: int
    block_bytes: int
    depth: int
    pattern: str
    rounds: int
    nixlbench_gbps: float
    posted_gbps: float
    made_gbps: float
    ours_gbps: float
    of_nixlbench: float
    of_posted: float
    of_made: float


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    region_bytes = max(options.sizes)
    clock = time.thread_time if options.clock == "cpu" else time.perf_counter
    rows: list[Row] = []
    for block_bytes in options.blocks:
        sizes = [size for size in options.sizes if size >= block_bytes]
        with _Pair(region_bytes, block_bytes) as pair:
            for size in sizes:
                for depth in options.depths:
                    if size * depth <= region_bytes:
                        rows.append(_measure(pair, size, depth, options.pattern, options.seconds, clock))
                        if not options.json:
                            _print(rows[-1], first=len(rows) == 1)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


class _Pair:
    """A source in a process of its own, and a reader with one agent for each shape."""

    def __init__(self, region_bytes: int, block_bytes: int) -> None:
        self.config = TransferConfig()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._source = context.Process(target=_serve, args=(theirs, region_bytes, block_bytes), daemon=True)
        self._source.start()
        self._memory = mmap.mmap(-1, region_bytes)
        self._host = HostRegion(memoryview(self._memory), block_bytes)
        self.node = _node(self.config, self._host.region)
        self._pipe.send(self.node.handshake.hello())
        self.offer = self.node.handshake.conclude(self._pipe.recv())
        self.node.engine.connect("source", self.offer)
        self.plain = NixlPullAgent("pointsman-bench-plain", self.config, self._host.region)
        self.plain.add_peer(self.offer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.plain.close()
        self.node.engine.close()
        self.node.serving.close()
        self._host.release()
        self._memory.close()
        self._pipe.send(None)
        self._source.join()

    @property
    def region(self) -> Region:
        return self._host.region


def _serve(pipe: Connection, region_bytes: int, block_bytes: int) -> None:
    memory = mmap.mmap(-1, region_bytes)
    for offset in range(0, region_bytes, 1 << 20):
        memory[offset : offset + 4096] = os.urandom(4096)
    host = HostRegion(memoryview(memory), block_bytes)
    node = _node(TransferConfig(), host.region)
    while True:
        if not pipe.poll(0.01):
            node.serving.forget_notifications()
        elif (hello := pipe.recv()) is None:
            break
        else:
            pipe.send(node.handshake.answer(hello)[0])
    node.engine.close()
    node.serving.close()


def _node(config: TransferConfig, region: Region) -> TransferNode:
    fingerprint = Fingerprint(
        model="bench",
        weights_revision="",
        dtype="int8",
        block_length_bytes=region.block_bytes,
        layout="",
        tp_map="",
        hash_seed="",
        tenant="",
    )
    return open_node(config, fingerprint, region, new_boot_id())


def _measure(pair: _Pair, size: int, depth: int, pattern: str, seconds: float, clock: Clock) -> Row:
    lists = list(_block_lists(pair.region, size, depth, pattern))
    shapes = [shape(pair, lists) for shape in (_nixlbench, _posted, _made, _ours)]
    times = max(1, ROUND_BYTES // (size * depth))
    rounds: list[list[float]] = []
    stop_s = time.perf_counter() + seconds
    while len(rounds) < 9 or time.perf_counter() < stop_s:
        rounds.append([_timed(shape, times, clock) for shape in shapes])
    moved = size * depth * times
    best = [moved / min(took_s) / 1e9 for took_s in zip(*rounds, strict=True)]
    ratios = [round(median(took_s[i] / took_s[-1] for took_s in rounds), 3) for i in range(3)]
    return Row(size, pair.region.block_bytes, depth, pattern, len(rounds), *best, *ratios)


def _timed(shape: Callable[[], None], times: int, clock: Clock) -> float:
    if times > 1:
        shape()  # warms up: the one before had other code and other buffers
    began = clock()
    for _ in range(times):
        shape()
    return clock() - began


def _block_lists(
    region: Region, size: int, depth: int, pattern: str
) -> Iterator[tuple[list[int], list[int]]]:
    count = size // region.block_bytes
    source, destination = list(range(region.blocks)), list(range(region.blocks))
    if pattern == "random":
        order = random.Random(0)
        order.shuffle(source)
        order.shuffle(destination)
    for number in range(depth):
        part = slice(number * count, (number + 1) * count)
        yield source[part], destination[part]


def _ours(pair: _Pair, lists: BlockLists) -> Callable[[], None]:
    engine, boot_id = pair.node.engine, pair.offer.boot_id

    def once() -> None:
        deadline_s = engine.now_s() + 60
        for source, destination in lists:
            engine.submit(PullRequest("source", boot_id, source, destination, deadline_s))
        left = len(lists)
        while left:
            for event in engine.poll():
                if not isinstance(event, Pulled):
                    raise SystemExit(f"a pull failed: {event}")
                left -= 1
            pause_s = engine.next_poll_s()
            if pause_s:
                time.sleep(pause_s)

    return once


def _nixlbench(pair: _Pair, lists: BlockLists) -> Callable[[], None]:
    return _again(pair, lists, "0xBEEF")


def _posted(pair: _Pair, lists: BlockLists) -> Callable[[], None]:
    return _again(pair, lists, "")


def _again(pair: _Pair, lists: BlockLists, notification: str) -> Callable[[], None]:
    native, library = pair.plain.native, pair.plain.library
    make = pair.plain.make
    # What this shape leaves in memory until the agent is closed costs the others nothing.
    requests = [make(pair.offer.boot_id, *blocks, notification=notification) for blocks in lists]
    return lambda: _spin(native, library, requests)


def _made(pair: _Pair, lists: BlockLists) -> Callable[[], None]:
    plain, boot_id = pair.plain, pair.offer.boot_id

    def once() -> None:
        requests = [plain.make(boot_id, source, destination) for source, destination in lists]
        _spin(plain.native, plain.library, requests)
        for handle in requests:
            plain.release(handle)

    return once


def _spin(native: Any, library: Any, requests: list[int]) -> None:
    running = library.NIXL_IN_PROG
    left = [handle for handle in requests if native.postXferReq(handle) == running]
    while left:
        left = [handle for handle in left if native.getXferStatus(handle) == running]


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine_ext.transfer.bench", description=__doc__)
    parser.add_argument("--sizes", type=_sizes, default=SIZES, help="bytes of one request")
    parser.add_argument("--blocks", type=_sizes, default="64K,2M", help="block lengths")
    parser.add_argument("--depths", type=_sizes, default="1,16", help="requests at a time")
    parser.add_argument("--pattern", choices=("contiguous", "random"), default="random")
    parser.add_argument("--seconds", type=float, default=1.0, help="per line of the table")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="see above")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def _sizes(text: str) -> list[int]:
    return [int(word.rstrip("KMG")) * UNITS.get(word[-1], 1) for word in text.split(",")]


def _print(row: Row, *, first: bool) -> None:
    if first:
        print(
            "      size    block depth  nixlbench  posted    made    ours  GB/s   of nixlbench  of posted  of made"
        )
    print(
        f"{_short(row.size_bytes):>10} {_short(row.block_bytes):>8} {row.depth:>5} {row.nixlbench_gbps:>10.2f}"
        f" {row.posted_gbps:>7.2f} {row.made_gbps:>7.2f} {row.ours_gbps:>7.2f}"
        f" {row.of_nixlbench:>20.2f} {row.of_posted:>10.2f} {row.of_made:>8.2f}",
        flush=True,
    )


def _short(size: int) -> str:
    for unit in "GMK":
        if size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}iB"
    return f"{size} B"


if __name__ == "__main__":
    sys.exit(main())
