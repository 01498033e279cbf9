# SPDX-License-Identifier: Apache-2.0
"""``pointsman indexer``: the index alone, as an HTTP service."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import uvloop

from indexer.check import command as check_command
from indexer.errors import HashKeyError
from indexer.hashing import load_or_make_key
from indexer.index import IndexLimits
from indexer.room import blocks_that_fit
from indexer.service.app import IndexerApp
from indexer.service.server import serve_indexer
from indexer.writer_lock import WriterLockedError

EXIT_OK = 0
EXIT_USAGE = 2
_FEWEST_BLOCKS, _MOST_BLOCKS = 1024, 1 << 30
_LONGEST_GRACE_S = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command, and its own command ``check``."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "--port",
        type=int,
        default=8090,
        metavar="P",
        help="port to listen on (default: %(default)s); 0 takes a free one",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--peers",
        default="",
        metavar="URL,...",
        help="indexers of which one is asked at start for what it holds and what is registered there",
    )
    add(
        "--snapshot",
        metavar="FILE",
        help="file that what workers hold is kept in: read at start, written once a minute and at the end",
    )
    add(
        "--hash-key-file",
        metavar="FILE",
        help="key of the request hashes; made at first start (default: as for serve)",
    )
    add(
        "--max-blocks",
        metavar="N",
        help="most blocks kept, one counted for each rank that holds it; those matched longest ago go first "
        "(default: as many as fit in half of the memory that this process may use, 64 bytes each)",
    )
    add(
        "--offload-grace-s",
        default="0",
        metavar="S",
        help="time that a block may take from HBM to RAM, for engines that offload: it is remembered for so long "
        "(default: %(default)s)",
    )
    commands = parser.add_subparsers(title="commands", metavar="")
    one = commands.add_parser("check", help="look for faults in a recorded event stream")
    check_command.add_arguments(one)
    one.set_defaults(run=check_command.run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    peers = [url for url in args.peers.split(",") if url]
    for url in peers:
        if not url.startswith(("http://", "https://")):
            return _usage(f"--peers: {url!r}; accepted: addresses with http:// or https://")
    if not 0 <= args.port <= 65535:
        return _usage(f"--port: {args.port}; accepted: 0 to 65535")
    try:
        limits = IndexLimits(max_blocks=_max_blocks(args.max_blocks))
        grace_s = _grace_s(args.offload_grace_s)
    except ValueError as error:
        return _usage(str(error))
    path = Path(args.hash_key_file) if args.hash_key_file else default_key_file()
    try:
        key = load_or_make_key(path)
        snapshot = Path(args.snapshot) if args.snapshot else None
        app = IndexerApp(key, peers, limits, snapshot=snapshot, offload_grace_s=grace_s)
        uvloop.run(serve_indexer(app, args.host, args.port))
    except WriterLockedError as error:
        return _usage(f"--snapshot: {args.snapshot}; accepted: a file that no other process writes ({error})")
    except HashKeyError as error:
        return _usage(f"--hash-key-file: {error}")
    except OSError as error:
        return _usage(
            f"--host, --port: {args.host} {args.port}; accepted: an address that is free ({error.strerror})"
        )
    return EXIT_OK


def default_key_file() -> Path:
    """That of the gateway: ``hash.key`` in ``$XDG_STATE_HOME/pointsman``, or in ``~/.local/state/pointsman``."""
    base = os.environ.get("XDG_STATE_HOME", "")
    state = Path(base) if base.startswith("/") else Path.home() / ".local" / "state"
    return state / "pointsman" / "hash.key"


def _max_blocks(given: str | None) -> int:
    if given is None:
        return blocks_that_fit()
    if not given.isdecimal() or not _FEWEST_BLOCKS <= int(given) <= _MOST_BLOCKS:
        raise ValueError(f"--max-blocks: {given!r}; accepted: {_FEWEST_BLOCKS} to {_MOST_BLOCKS}")
    return int(given)


def _grace_s(given: str) -> float:
    accepted = f"--offload-grace-s: {given!r}; accepted: 0 to {_LONGEST_GRACE_S} seconds"
    try:
        seconds = float(given)
    except ValueError:
        raise ValueError(accepted) from None
    if not 0 <= seconds <= _LONGEST_GRACE_S:
        raise ValueError(accepted)
    return seconds


def _usage(message: str) -> int:
    print(f"pointsman indexer: {message}", file=sys.stderr)
    return EXIT_USAGE
