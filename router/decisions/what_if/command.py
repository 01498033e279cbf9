# SPDX-License-Identifier: Apache-2.0
"""``pointsman what-if``: a decision log decided again, and what that would have won or lost."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from router.decisions.lines import log_files
from router.decisions.what_if.logged import pieces
from router.decisions.what_if.redecide import Redecider, redecide_pieces
from router.decisions.what_if.report import render_json, render_table
from router.decisions.what_if.settings import Changes, parse_changes
from router.decisions.what_if.tally import Tally
from router.errors import ConfigError
from router.replay.policies import REPLAY_POLICIES

STANDARD_INPUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "log", metavar="LOG", help="a decision log, with its rotated files; - for standard input"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="costs.CONSTANT (of every worker and link), costs.profile, plan.gpu_seconds_weight, "
        "plan.pull_deadline_s, plan.min_pull_tokens or plan.use_peers; may be repeated",
    )
    parser.add_argument("--policy", metavar="NAME", help=f"one of {', '.join(REPLAY_POLICIES)}")
    parser.add_argument(
        "--kv-capacity-tokens", type=int, metavar="N", help="HBM of one rank, for policies that look at it"
    )
    parser.add_argument(
        "--flips", type=int, default=10, metavar="N", help="largest flips shown (default: 10)"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="default: one for each core")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(args: argparse.Namespace) -> int:
    """Decide again and print; returns the exit code.

    Raises:
        ConfigError: an option is wrong, or there is no such log.
    """
    changes = parse_changes(args.set, args.policy, args.kv_capacity_tokens)
    if args.flips < 0:
        raise ConfigError("--flips", args.flips, "a whole number, at least 0")
    processes = len(os.sched_getaffinity(0)) if args.processes is None else args.processes
    if processes < 1:
        raise ConfigError("--processes", args.processes, "a whole number from 1")
    tally = _redecide(args.log, changes, args.flips, processes)
    print(render_json(tally) if args.json else render_table(tally))
    return 0


def _redecide(log: str, changes: Changes, flips: int, processes: int) -> Tally:
    if log == STANDARD_INPUT:
        return Redecider(changes, flips).run(sys.stdin.buffer)
    files = log_files(Path(log))
    try:
        return redecide_pieces(pieces(files), changes, flips, processes)
    except OSError as error:
        raise ConfigError("LOG", log, f"a log that can be read ({error.strerror})") from error
