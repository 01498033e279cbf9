# SPDX-License-Identifier: Apache-2.0
"""``pointsman costs``: what a profile says each path takes, and from where a pull beats recomputing."""

from __future__ import annotations

import argparse

import msgspec

from router.costs.kv_bytes import KV_DTYPES, with_model
from router.costs.model import CostModel
from router.costs.profile import CostProfile, load_profile, profile_names
from router.errors import ConfigError

_MOST_TOKENS = 1 << 24
_PATHS = ("hbm", "ram", "peer", "storage", "recompute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--profile", default="default", metavar="NAME", help=f"one of {', '.join(profile_names())}"
    )
    parser.add_argument(
        "--model", metavar="PATH", help="directory of a model or its config.json: KV bytes per token of that"
    )
    parser.add_argument(
        "--kv-dtype", choices=KV_DTYPES, metavar="TYPE", help="--kv-cache-dtype of the engines, with --model"
    )
    parser.add_argument("--tokens", required=True, metavar="N[,N...]", help="lengths of the prefix")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit code.

    Raises:
        ConfigError: an unknown profile, a model that cannot be read, or a length that is none.
    """
    profile = load_profile(args.profile)
    if args.model is not None:
        profile = with_model(profile, args.model, args.kv_dtype, "--model")
    elif args.kv_dtype is not None:
        raise ConfigError("--kv-dtype", args.kv_dtype, "only with --model")
    model = CostModel(profile)
    rows = [{"tokens": tokens, "seconds": model.path_seconds(tokens)} for tokens in parse_tokens(args.tokens)]
    crossover = model.crossover_tokens()
    if args.json:
        document = {
            "profile": args.profile,
            "kv_bytes_per_token": profile.kv_bytes_per_token,
            "rows": rows,
            "pull_wins_from_tokens": crossover,
        }
        print(msgspec.json.encode(document).decode())
    else:
        print(_table(args.profile, profile, rows, crossover))
    return 0


def parse_tokens(text: str) -> list[int]:
    """``8070,13648`` as numbers.

    Raises:
        ConfigError: something else.
    """
    accepted = f"whole numbers from 1 to {_MOST_TOKENS}, separated by commas"
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError("--tokens", text, accepted) from None
    if not all(1 <= value <= _MOST_TOKENS for value in values):
        raise ConfigError("--tokens", text, accepted)
    return values


def _table(name: str, profile: CostProfile, rows: list[dict[str, object]], crossover: int | None) -> str:
    lines = [
        f"{name}: {profile.source}",
        "",
        f"{profile.kv_bytes_per_token:,.0f} bytes of KV per token.",
        "",
        f"{'tokens':>10}" + "".join(f"{path:>12}" for path in _PATHS) + "   seconds to first token",
    ]
    for row in rows:
        seconds = row["seconds"]
        if isinstance(seconds, dict):
            lines.append(f"{row['tokens']:>10}" + "".join(f"{seconds[path]:>12.4f}" for path in _PATHS))
    where = "never" if crossover is None else f"from {crossover} tokens on"
    return "\n".join([*lines, "", f"A pull beats recomputing {where}."])
