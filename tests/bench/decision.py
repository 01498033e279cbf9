# SPDX-License-Identifier: Apache-2.0
"""How long one decision takes, in process: hash, match, plan.

    python tests/bench/decision.py [WORKERS ...]

Every worker has HBM and RAM that hold a random part of the prompt (8,192 tokens, blocks of 16) and may pull from
every other: the dearest case. Prints the 50th and 99th percentile of 300 decisions, and the parts of one.
"""

from __future__ import annotations

import sys
import time
from array import array
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import kv_batches as kv

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import Namespace, WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from router.costs.model import CostModel
from router.costs.profile import load_profile
from router.fleet.worker import Health, WorkerSpec, WorkerStatus
from router.plan.decider import Decider, Prompts
from router.plan.load import LoadBoard
from router.plan.planner import Planner
from router.plan.policies import make_policy

TOKENS, BLOCK, ROUNDS = 8192, 16, 300


def fleet(workers: int, ids: array[int], random: Random) -> tuple[HolderTable, list[WorkerStatus]]:
    holders = HolderTable(open_index(HashKey(bytes(16)), IndexLimits()), time.monotonic)
    statuses = []
    for number in range(workers):
        name = f"w{number}"
        holders.register(WorkerId(name), "m", 1)
        spec = WorkerSpec(name, f"http://{name}", p2p=f"{name}:5710")
        statuses.append(WorkerStatus(spec, health=Health.HEALTHY, answering=True, block_size_tokens=BLOCK))
        held = random.randrange(1, TOKENS // BLOCK)
        blocks = list(range(1, held + 1))
        events = kv.stored(blocks, ids[: held * BLOCK], block_size=BLOCK), kv.placeholder(blocks)
        holders.apply(WorkerRank(WorkerId(name)), 0, kv.batch(*events))
    return holders, statuses


def measure(workers: int) -> None:
    random = Random(0)
    ids = array("I", (random.randrange(100_000) for _ in range(TOKENS)))
    holders, statuses = fleet(workers, ids, random)
    planner = Planner(CostModel(load_profile("default")), 0.1, 5.0)
    decider = Decider(holders, LoadBoard(), make_policy("kv_aware", planner), use_peers=True)
    prompts = Prompts([ids], Namespace("m"))
    took_us = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        decider.decide(prompts, statuses, statuses, 0.0, random)
        took_us.append((time.perf_counter() - start) * 1e6)
    took_us.sort()
    start = time.perf_counter()
    hashes = holders.index.hash_blocks(ids, BLOCK, "m", "", [])
    hashed = time.perf_counter()
    holders.index.match(hashes)
    matched = time.perf_counter()
    print(
        f"{workers} workers: decision p50 {took_us[ROUNDS // 2]:.0f} us, p99 {took_us[ROUNDS * 99 // 100]:.0f} us "
        f"(hash {(hashed - start) * 1e6:.0f} us, match {(matched - hashed) * 1e6:.0f} us)"
    )


if __name__ == "__main__":
    for count in [int(text) for text in sys.argv[1:]] or [8, 64]:
        measure(count)
