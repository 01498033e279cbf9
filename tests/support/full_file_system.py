# SPDX-License-Identifier: Apache-2.0
"""A program: an index in a folder that takes fewer bytes than its workers store. Prints what became of it as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import kv_batches as kv

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index

WORKERS, BATCHES, BATCH = 4, 2000, 100


def batches() -> Iterator[bytes]:
    for number in range(BATCHES):
        names = list(range(number * BATCH + 1, (number + 1) * BATCH + 1))
        tokens = [(name >> 16 * part) & 0xFFFF for name in names for part in range(kv.BLOCK)]
        yield kv.batch(kv.stored(names, tokens))


def main(folder: Path) -> None:
    table = HolderTable(open_index(HashKey(kv.KEY_BYTES), IndexLimits(), path=folder / "index"), lambda: 0.0)
    workers = [WorkerId(f"w{number}") for number in range(WORKERS)]
    for worker in workers:
        table.register(worker, "m", 1)
    for seq, payload in enumerate(batches()):
        table.apply(WorkerRank(workers[seq % WORKERS]), seq, payload)
    states = [table.workers()[worker].ranks[0] for worker in workers]
    print(
        json.dumps(
            {
                "problem": table.index.check(),
                "blocks": [table.index.counts(state.slot).hbm for state in states],
                "refused": [state.totals["refused_batches"] for state in states],
                "partial": [state.partial for state in states],
                "seq": [state.seq for state in states],
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
