# SPDX-License-Identifier: Apache-2.0
"""Random operations on the native index and on the reference, compared after each (``tests/support/index_differ.py``).

    python tests/fuzz/differential.py [--operations 10000000] [--seed 0] [--world 100000] [--processes 1]

Ends with exit code 1 and the seed of the world at the first difference.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from index_differ import Differ


def run_world(course: tuple[int, int]) -> int:
    """One seed for so many operations; returns how many there were."""
    seed, operations = course
    one = Differ(seed)
    one.run(operations)
    return one.operations


def main() -> None:
    parser = argparse.ArgumentParser(description="native index against the reference")
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first world; others count on")
    parser.add_argument("--world", type=int, default=100_000, help="operations before both indexes are new")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    each = min(args.world, args.operations)
    courses = [(args.seed + number, each) for number in range(-(-args.operations // each))]
    done, started_s = 0, time.monotonic()
    with multiprocessing.Pool(args.processes) as pool:
        try:
            for operations in pool.imap_unordered(run_world, courses):
                done += operations
                print(f"{done} operations, {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
        except AssertionError as error:
            sys.exit(f"after {done} operations: {error}")
    print(f"{done} operations in {len(courses)} worlds from seed {args.seed}: equal, check() clean")


if __name__ == "__main__":
    main()
