# SPDX-License-Identifier: Apache-2.0
"""The index alone, in process: memory and speed of ingest, matches by prompt, index and holders, readers, killed writers.

    python tests/bench/index.py [size ...] [--stress SECONDS] [--kills ROUNDS]

``size``: millions of (holder, block) pairs to grow to (default 1 4). Each line is one figure; ratios compare with the
smallest size.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from random import Random

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import index_stress as stress

from indexer.hashing import HashKey
from indexer.index import IndexLimits, PrefixIndex, open_index

BLOCK, EVENT_BLOCKS, HOLDERS = 16, 96, 64
VOCABULARY = 128_000
REPEATS = 400


def resident_bytes() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def batch(tokens: array[int], first_name: int, *, as_map: bool = False) -> bytes:
    """One batch of one chain from the root, named by 32-byte strings."""
    count = len(tokens) // BLOCK
    names = [(first_name + i).to_bytes(8, "big") * 4 for i in range(count)]
    fields = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": tokens.tolist(),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return msgspec.msgpack.encode([0.0, [fields if as_map else list(fields.values())], 0])


def prompt(random: Random, tokens: int) -> array[int]:
    return array("I", [random.randrange(VOCABULARY) for _ in range(tokens)])


def fill(index: PrefixIndex, slots: list[int], blocks: int, random: Random) -> float:
    """Blocks per second of ``apply`` alone."""
    done, spent_s = 0, 0.0
    while done < blocks:
        payloads = [
            batch(prompt(random, EVENT_BLOCKS * BLOCK), random.getrandbits(62), as_map=number % 2 == 1)
            for number in range(64)
        ]
        started_s = time.perf_counter()
        for number, payload in enumerate(payloads):
            index.apply([slots[number % len(slots)]], 0, slots[0], payload)
        spent_s += time.perf_counter() - started_s
        done += len(payloads) * EVENT_BLOCKS
    return done / spent_s


def median_us(index: PrefixIndex, tokens: array[int]) -> tuple[float, float]:
    """Median and 99th percentile of hashing a prompt and matching it."""
    took = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        index.match(index.hash_blocks(tokens, BLOCK, "m", "", []))
        took.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(took), statistics.quantiles(took, n=100)[98]


def sizes(millions: list[float]) -> None:
    random = Random(1)
    index = open_index(HashKey(bytes(16)), IndexLimits())
    fillers = [index.open("m", False) for _ in range(8)]
    holders = [index.open("m", False) for _ in range(HOLDERS)]
    prompts = {
        name: prompt(random, tokens) for name, tokens in (("2k", 2048), ("8k", 8192), ("128k", 131_072))
    }
    for number, (name, tokens) in enumerate(prompts.items()):
        for holder in holders:
            index.apply([holder], 0, fillers[0], batch(tokens, number * 100_000 + 1))
        print(f"match {name} tokens, {HOLDERS} holders: p50 %.1f us, p99 %.1f us" % median_us(index, tokens))
    before_bytes, before_blocks, first_us = resident_bytes(), 0.0, 0.0
    for million in millions:
        rate = fill(index, fillers, int((million - before_blocks) * 1e6), random)
        before_blocks = million
        middle_us, _ = median_us(index, prompts["8k"])
        first_us = first_us or middle_us
        each = (resident_bytes() - before_bytes) / (million * 1e6)
        print(
            f"{million:g} M blocks: ingest {rate / 1e6:.2f} M blocks/s, {each:.1f} resident bytes a block, "
            f"match 8k p50 {middle_us:.1f} us (ratio {middle_us / first_us:.2f})"
        )
    idle = [index.open("m", False) for _ in range(1000)]
    for number, slot in enumerate(idle):
        index.apply([slot], 0, fillers[0], batch(prompt(random, 1024), 10_000_000 + number * 1000))
    middle_us, _ = median_us(index, prompts["8k"])
    print(f"with 1,000 more holders that do not match: 8k p50 {middle_us:.1f} us")


def start(role: str, directory: Path, seed: int, lasting_s: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, stress.__file__, role, str(directory), str(seed), str(lasting_s)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    if role == "write":
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    return process


def readers_and_writer(lasting_s: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        writer = start("write", Path(name), 1, lasting_s)
        readers = [start("read", Path(name), seed, lasting_s) for seed in range(8)]
        results = [reader.communicate()[0].split() for reader in readers]
        failed = sum(reader.returncode != 0 for reader in readers)
        steps = writer.communicate()[0].split()[-1]
        asked = sum(int(result[0]) for result in results if len(result) == 2)
        print(
            f"8 readers, 1 writer, {lasting_s:g} s: {asked} answers, {steps} batches, {failed} readers were told wrong"
        )


def killed_writers(rounds: int) -> None:
    checker = None
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            writer = start("write", Path(name), number, 600)
            checker = checker or stress.Checker(Path(name), 1)
            for _ in range(200):
                checker.check()
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
            for _ in range(200):
                checker.check()
            assert checker.reader.generation == number + 1
    print(f"{rounds} writers killed in the middle of their work: every answer was right")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", nargs="*", type=float, default=[1, 4])
    parser.add_argument("--stress", type=float, default=0)
    parser.add_argument("--kills", type=int, default=0)
    arguments = parser.parse_args()
    sizes(arguments.size)
    if arguments.stress:
        readers_and_writer(arguments.stress)
    if arguments.kills:
        killed_writers(arguments.kills)


if __name__ == "__main__":
    main()
