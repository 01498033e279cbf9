# SPDX-License-Identifier: Apache-2.0
"""How long one decision takes, in process: hash, match, load board, all actions, ranking, the best plans as objects.

    python tests/bench/decision.py [--backend native|reference] [--extension] [WORKERS[:HOLDERS] ...]

``HOLDERS`` of the workers (default: all, the dearest case) have HBM and RAM that hold a random part of the prompt
(8,192 tokens, blocks of 16) and may pull from each other; most have requests under way that share a part of it. With ``--extension`` all run
our engine extension, so that pulls may be split over several sources. Prints the 50th and 99th
percentile of 2,000 decisions, of the best and of the median of five runs, and the parts of one decision. On a machine
that does other work too, the 99th percentile by the clock is that of its scheduler; the one by the thread's own
CPU time leaves out when it did not run.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections.abc import Callable
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
from router.fleet.snapshot import Snapshot
from router.fleet.worker import Health, WorkerSpec, WorkerStatus
from router.plan.decider import Decider, Prompts
from router.plan.load import Board, LoadBoard, Resident
from router.plan.native import NativePlanner
from router.plan.native_board import NativeLoadBoard
from router.plan.native_fleet import NativeFleet
from router.plan.planner import Planner
from router.plan.policies import make_policy

TOKENS, BLOCK, RUNS = 8192, 16, 5
ROUNDS = {"native": 2000, "reference": 100}
COSTS = CostModel(load_profile("default"))


def fleet(
    workers: int, holding: int, ids: array[int], random: Random, extension: bool
) -> tuple[HolderTable, Snapshot]:
    """Workers of which the first ``holding`` hold random prefixes of ``ids``."""
    holders = HolderTable(open_index(HashKey(bytes(16)), IndexLimits()), time.monotonic)
    statuses = []
    for number in range(workers):
        name = f"w{number}"
        holders.register(WorkerId(name), "m", 1)
        ours = f"{name}:5720" if extension else None
        spec = WorkerSpec(name, f"http://{name}", p2p=f"{name}:5710", extension=ours)
        statuses.append(
            WorkerStatus(
                spec, health=Health.HEALTHY, answering=True, block_size_tokens=BLOCK, hbm_blocks=2000
            )
        )
        held = random.randrange(1, TOKENS // BLOCK) if number < holding else 0
        blocks = list(range(1, held + 1))
        events = kv.stored(blocks, ids[: held * BLOCK], block_size=BLOCK), kv.placeholder(blocks)
        holders.apply(WorkerRank(WorkerId(name)), 0, kv.batch(*events))
    return holders, Snapshot(statuses)


def promise_work(board: Board, workers: int, random: Random, prompt: bytes) -> None:
    """Some requests at every worker, computing or decoding; each shares a part of the prompt of these block hashes."""
    for number in range(workers):
        for _ in range(random.randrange(4)):
            prefill_s = random.random() * 0.2
            sources = [f"w{random.randrange(workers)}"] if random.random() < 0.3 else []
            shared = random.randrange(len(prompt) // 8) * 8
            own = bytes(random.randrange(256) for _ in range(len(prompt) - shared))
            there = Resident(BLOCK, [prompt[:shared] + own])
            ticket = board.promise(f"w{number}", 0, prefill_s, prefill_s, 0.0, sources, resident=there)
            if random.random() < 0.7:
                board.first_token(ticket, 0.0)


def decider(holders: HolderTable, workers: int, backend: str, ids: array[int]) -> Decider:
    prompt = holders.index.hash_blocks(ids, BLOCK, "m", "", [])
    if backend == "reference":
        plain = LoadBoard()
        promise_work(plain, workers, Random(1), prompt)
        return Decider(holders, plain, make_policy("kv_aware", Planner(COSTS, 0.1, 5.0)), use_peers=True)
    board = NativeLoadBoard()
    promise_work(board, workers, Random(1), prompt)
    planner = NativePlanner(COSTS, 0.1, 5.0)
    table = NativeFleet(holders, board, COSTS, planner.settings, use_peers=True)
    return Decider(holders, board, make_policy("kv_aware", planner), use_peers=True, fleet=table)


def microseconds(
    do: Callable[[], object], rounds: int, clock: Callable[[], int] = time.perf_counter_ns
) -> list[float]:
    took = []
    for _ in range(rounds):
        start = clock()
        do()
        took.append((clock() - start) / 1e3)
    return sorted(took)


def measure(workers: int, holding: int, backend: str, extension: bool) -> None:
    random, rounds = Random(0), ROUNDS[backend]
    ids = array("I", (random.randrange(100_000) for _ in range(TOKENS)))
    holders, statuses = fleet(workers, holding, ids, random, extension)
    one = decider(holders, workers, backend, ids)
    pulling = Prompts([ids], Namespace("m"))
    alone = Prompts([ids], Namespace("m"), single_sequence=False)

    def decide(prompts: Prompts | None) -> Callable[[], object]:
        return lambda: one.decide(prompts, statuses, statuses, 0.0, random, estimated_tokens=TOKENS)

    runs = [microseconds(decide(pulling), rounds) for _ in range(RUNS)]
    p50s = sorted(run[rounds // 2] for run in runs)
    p99s = sorted(run[rounds * 99 // 100] for run in runs)
    busy = sorted(
        microseconds(decide(pulling), rounds, time.thread_time_ns)[rounds * 99 // 100] for _ in runs
    )
    parts = [min(microseconds(decide(prompts), rounds // 10)) for prompts in (pulling, alone, None)]
    hashing = min(microseconds(lambda: holders.index.hash_blocks(ids, BLOCK, "m", "", []), rounds // 10))
    print(
        f"{workers} workers, {holding} holding, {backend}: "
        f"p50 {p50s[0]:.0f} us (median of runs {p50s[RUNS // 2]:.0f}), "
        f"p99 {p99s[0]:.0f} us (median of runs {p99s[RUNS // 2]:.0f}), p99 of CPU time {busy[0]:.0f} us "
        f"(median of runs {busy[RUNS // 2]:.0f}); at best {parts[0]:.0f} us, of which "
        f"hash {hashing:.0f}, match {parts[1] - parts[2] - hashing:.0f}, pulls {parts[0] - parts[1]:.0f}, "
        f"the rest {parts[2]:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=list(ROUNDS), default="native")
    parser.add_argument("--extension", action="store_true", help="all workers run our engine extension")
    parser.add_argument("cases", nargs="*", default=["8", "64", "1000:64", "1000"])
    arguments = parser.parse_args()
    for case in arguments.cases:
        workers, _, holding = case.partition(":")
        measure(int(workers), int(holding or workers), arguments.backend, arguments.extension)


if __name__ == "__main__":
    main()
