# SPDX-License-Identifier: Apache-2.0
"""How long deciding a log again takes.

    python tests/bench/what_if.py [--decisions 1000000] [--candidates 8] [--processes N] [--set KEY=VALUE]...

Writes a log of that many decisions (2,000 different ones, each under many ids, in files of 256 MiB) into a temporary
folder, decides it again as the command does, and prints what it took. Every worker holds a part of the prompt on three
tiers and has constants of its own; half of them can pull from half the others: the dearest case. Without --set nothing
may flip.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from decision_questions import PROFILE, Scribe, random_question

from router.costs.calibration import Calibration
from router.costs.observation import Observation
from router.decisions.lines import decision_line, log_files
from router.decisions.log_file import LogFile
from router.decisions.what_if.logged import pieces
from router.decisions.what_if.redecide import redecide_pieces
from router.decisions.what_if.settings import parse_changes

DIFFERENT = 2000
FILE_BYTES = 256 * 2**20
BATCH = 500
NAME = b'"id":"r"'


def learnt(workers: int) -> Calibration:
    calibration, random = Calibration(PROFILE), Random(3)
    for i in range(20 * workers):
        calibration.observe(
            Observation(
                worker=f"w{i % workers}",
                source=None,
                prompt_tokens=4000,
                ram_tokens=1600,
                peer_tokens=0,
                storage_tokens=0,
                planned_cached_tokens=1600,
                cached_tokens=1600,
                decodes=1,
                other_pulls=0,
                connected=True,
                queue_s=0.0,
                ttft_s=0.1 + 0.02 * (i % workers) + random.random() / 50,
            ),
            float(i),
        )
    return calibration


def write_log(path: Path, decisions: int, candidates: int) -> int:
    """Returns its bytes."""
    random, scribe = Random(0), Scribe(costs=learnt(candidates))
    lines = [
        decision_line(scribe.record(random_question(random, candidates)))
        for _ in range(min(DIFFERENT, decisions))
    ]
    parts = [line.split(NAME, 1) for line in lines]
    file = LogFile(path, FILE_BYTES, keep=1 << 20)
    for start in range(0, decisions, BATCH):
        batch = b"".join(
            b'%s"id":"r%d"%s\n' % (parts[i % len(parts)][0], i, parts[i % len(parts)][1])
            for i in range(start, min(start + BATCH, decisions))
        )
        file.append(batch)
    file.close()
    return sum(one.stat().st_size for one in log_files(path))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--decisions", type=int, default=1_000_000)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        path = Path(folder, "decisions.jsonl")
        size = write_log(path, args.decisions, args.candidates)
        print(
            f"{args.decisions} decisions of {args.candidates} candidates, {size / args.decisions:.0f} bytes each"
        )
        own = resource.getrusage(resource.RUSAGE_SELF)
        before_s = own.ru_utime + own.ru_stime
        start = time.perf_counter()
        tally = redecide_pieces(
            pieces(log_files(path)), parse_changes(args.set, None, None), 10, args.processes
        )
        took_s = time.perf_counter() - start
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(one.ru_utime + one.ru_stime for one in used) - before_s
    print(
        f"decided again in {took_s:.1f} s with {args.processes} processes: {took_s / args.decisions * 1e6:.1f} us each, "
        f"{cpu_s / args.decisions * 1e6:.1f} us of CPU; {tally.redecided} decided, {tally.flips} flips"
    )
    if tally.redecided != args.decisions or (not args.set and tally.flips):
        sys.exit("the result is wrong")


if __name__ == "__main__":
    main()
