# SPDX-License-Identifier: Apache-2.0
"""Pulls over loopback beside NIXL's own shapes, and what an agent costs that nobody uses; each against its target.

    POINTSMAN_REAL=DIR python tests/bench/transfer.py [--clock cpu] [--seconds 2] [--depths 1,16]

Runs in the environment that tests/real/setup.sh made. `--clock cpu` on a machine that is busy with other work.
Exit code 1 if a target is missed: at least 0.9 of what NIXL's own benchmark's shape gives, at every size and depth; of
the same shape without its notifications from 4 MiB on (more than any caller can reach below, see the README
of engine_ext.transfer); less than 2 % of a core for an idle agent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
STRICT_FROM_BYTES = 4 * MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seconds", default="2")
    parser.add_argument("--depths", default="1,16")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    python = (
        Path(os.environ.get("POINTSMAN_REAL", "~/.cache/pointsman-real")).expanduser() / "venv/bin/python"
    )
    bench = [python, "-m", "engine_ext.transfer.bench", "--json", "--depths", options.depths]
    bench += ["--clock", options.clock, "--seconds", options.seconds]
    rows: list[dict[str, Any]] = json.loads(_last_line(bench))
    missed = False
    print(
        "  size MiB  block KiB  depth  nixlbench  posted    made    ours  GB/s   of nixlbench  of posted  of made"
    )
    for row in rows:
        size = row["size_bytes"]
        low = round(row["of_nixlbench"], 2) < 0.9
        low |= size >= STRICT_FROM_BYTES and round(row["of_posted"], 2) < 0.9
        missed |= low
        print(
            f"{size / MIB:>10.4g} {row['block_bytes'] >> 10:>10} {row['depth']:>6} {row['nixlbench_gbps']:>10.2f}"
            f" {row['posted_gbps']:>7.2f} {row['made_gbps']:>7.2f} {row['ours_gbps']:>7.2f}"
            f" {row['of_nixlbench']:>20.2f} {row['of_posted']:>10.2f} {row['of_made']:>8.2f}"
            f"{'  missed' if low else ''}",
            flush=True,
        )
    print("load before and after:", *(f"{load:.1f}" for load in (load_before, os.getloadavg()[0])))
    idle = json.loads(_last_line([python, ROOT / "tests/real/transfer_rounds.py"], "idle\n"))
    for side in ("source", "reader"):
        cores = idle[f"{side}_cores"]
        missed |= cores >= 0.02
        print(f"idle {side}: {cores:.2%} of a core{'  missed' if cores >= 0.02 else ''}")
    return int(missed)


def _last_line(command: list[str | Path], answer: str = "") -> str:
    done = subprocess.run(
        command,
        input=answer,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
