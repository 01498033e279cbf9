# SPDX-License-Identifier: Apache-2.0
"""A worker as a process of its own, for test_shared.py: stores and loads random blocks until it is killed or done.

python writer.py ROOT BLOCKS SEED ROUNDS      ends with "done WRONG_BLOCKS LOADED_BLOCKS"
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[4] / "support")]

from stores import content_of, key_of, open_worker  # noqa: E402 - found by the line above

KEYS = 200


def main(root: str, blocks: str, seed: str, rounds: str) -> None:
    rng = random.Random(int(seed))
    worker = open_worker(Path(root), blocks=int(blocks), rescan_interval_s=0.05)
    wrong = loaded = 0
    print("ready", flush=True)
    for _ in range(int(rounds)):
        keys = [key_of(number) for number in rng.sample(range(KEYS), 8)]
        if rng.random() < 0.5:
            worker.put(keys, weight_s=rng.choice([0.01, 0.1]))
        else:
            found = worker.get(keys)
            loaded += len(found)
            wrong += sum(content_of(key) != content for key, content in found.items())
        worker.store.step_end()
    worker.store.close()
    print("done", wrong, loaded, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
