# SPDX-License-Identifier: Apache-2.0
"""Pull bandwidth between two processes of this machine, beside NIXL's own plain shape for the same bytes.

    python -m engine_ext.transfer.bench [--sizes 64K,1M,...] [--blocks 64K,2M] [--depths 1,4] [--pattern P] [--json]

Three shapes read the same blocks into the same memory, `depth` requests at a time that share `size` bytes:

    posted   what NIXL's own benchmark times: requests made once and posted again and again, then asked in a loop
             without a pause until all are done
    made     the same, with the descriptor lists and requests of each round made and released within its time, as
             every caller has to whose block lists change
    ours     everything a caller of the engine pays for: submit a block list, cut it, make and post transfers, poll
             with the engine's own pauses, take the event

They alternate. Bandwidths are the best of the rounds, since anything else on the machine only ever makes a round
slower; ratios are the median of the ratios within a round. `--clock cpu` counts the reader's CPU seconds instead: over shared memory that is the whole cost, and a machine that is
busy with other work does not blur it. Set UCX_TLS to choose a transport.
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
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Bandwidths in GB/s (10^9 bytes), best of `rounds`; ratios are medians over the rounds."""

    size_bytes: int
    block_bytes: int
    depth: int
    pattern: str
    rounds: int
    posted_gbps: float
    made_gbps: float
    ours_gbps: float
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
                    if size // block_bytes >= depth:
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
    while (hello := pipe.recv()) is not None:
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
    shapes = [shape(pair, lists, clock) for shape in (_posted, _made, _ours)]
    rounds: list[list[float]] = []
    stop_s = time.perf_counter() + seconds
    while len(rounds) < 5 or time.perf_counter() < stop_s:
        rounds.append([shape() for shape in shapes])
    moved = sum(len(source) for source, _ in lists) * pair.region.block_bytes
    posted, made, ours = (moved / min(took_s) / 1e9 for took_s in zip(*rounds, strict=True))
    of_posted, of_made = (round(median(took_s[i] / took_s[2] for took_s in rounds), 3) for i in (0, 1))
    return Row(
        moved, pair.region.block_bytes, depth, pattern, len(rounds), posted, made, ours, of_posted, of_made
    )


def _block_lists(
    region: Region, size: int, depth: int, pattern: str
) -> Iterator[tuple[list[int], list[int]]]:
    count = size // region.block_bytes // depth
    source, destination = list(range(region.blocks)), list(range(region.blocks))
    if pattern == "random":
        order = random.Random(0)
        order.shuffle(source)
        order.shuffle(destination)
    for number in range(depth):
        part = slice(number * count, (number + 1) * count)
        yield source[part], destination[part]


def _ours(pair: _Pair, lists: BlockLists, clock: Clock) -> Callable[[], float]:
    engine, boot_id = pair.node.engine, pair.offer.boot_id

    def once() -> float:
        began = clock()
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
        return clock() - began

    return once


def _posted(pair: _Pair, lists: BlockLists, clock: Clock) -> Callable[[], float]:
    native, library = pair.plain.native, pair.plain.library
    requests = [pair.plain.make(pair.offer.boot_id, source, destination) for source, destination in lists]
    # What this shape leaves in memory until the agent is closed costs the others nothing.

    def once() -> float:
        began = clock()
        _spin(native, library, requests)
        return clock() - began

    return once


def _made(pair: _Pair, lists: BlockLists, clock: Clock) -> Callable[[], float]:
    native, library = pair.plain.native, pair.plain.library
    here, there = pair.region, pair.offer.region

    def request(source: list[int], destination: list[int]) -> int:
        sides = [
            library.nixlXferDList(
                library.DRAM_SEG,
                [(side.base_address + i * side.block_bytes, side.block_bytes, 0) for i in blocks],
            )
            for side, blocks in ((here, destination), (there, source))
        ]
        made: int = native.createXferReq(library.NIXL_READ, *sides, pair.offer.agent_name, "", [])
        return made

    def once() -> float:
        began = clock()
        requests = [request(source, destination) for source, destination in lists]
        _spin(native, library, requests)
        for handle in requests:
            native.releaseXferReq(handle)
        return clock() - began

    return once


def _spin(native: Any, library: Any, requests: list[int]) -> None:
    running = library.NIXL_IN_PROG
    left = [handle for handle in requests if native.postXferReq(handle, "") == running]
    while left:
        left = [handle for handle in left if native.getXferStatus(handle) == running]


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine_ext.transfer.bench", description=__doc__)
    parser.add_argument("--sizes", type=_sizes, default=SIZES, help="total bytes per round")
    parser.add_argument("--blocks", type=_sizes, default="64K,2M", help="block lengths")
    parser.add_argument("--depths", type=_sizes, default="1,4", help="pulls that share the bytes of a round")
    parser.add_argument("--pattern", choices=("contiguous", "random"), default="random")
    parser.add_argument("--seconds", type=float, default=1.0, help="per line of the table")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="see above")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def _sizes(text: str) -> list[int]:
    return [int(word.rstrip("KMG")) * UNITS.get(word[-1], 1) for word in text.split(",")]


def _print(row: Row, *, first: bool) -> None:
    if first:
        print("      size    block depth  posted    made    ours  GB/s   of posted  of made")
    print(
        f"{_short(row.size_bytes):>10} {_short(row.block_bytes):>8} {row.depth:>5}"
        f" {row.posted_gbps:>7.2f} {row.made_gbps:>7.2f} {row.ours_gbps:>7.2f}"
        f" {row.of_posted:>17.2f} {row.of_made:>8.2f}",
        flush=True,
    )


def _short(size: int) -> str:
    for unit in "GMK":
        if size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}iB"
    return f"{size} B"


if __name__ == "__main__":
    sys.exit(main())
