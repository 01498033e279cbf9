# SPDX-License-Identifier: Apache-2.0
"""``pointsman sim-worker``: a simulated vLLM worker as a process."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

import msgspec
import uvloop

from engine_ext.sim.config import SimConfig
from engine_ext.sim.errors import SimConfigError
from engine_ext.sim.events import EventEncoding, HashKind
from engine_ext.sim.hashing import DEFAULT_SEED
from engine_ext.sim.profile import profile_names
from engine_ext.sim.running import SimWorkerOptions, running_sim_worker

EXIT_OK = 0
EXIT_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add("--port", type=int, required=True, metavar="P", help="HTTP port; 0 takes a free one")
    add("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    add(
        "--events",
        metavar="ENDPOINT",
        help="bind the event socket, e.g. tcp://*:5557; port 0 takes a free one",
    )
    add("--replay", metavar="ENDPOINT", help="bind the replay socket, e.g. tcp://*:5558")
    add("--topic", default="", help="topic of the event messages")
    add("--p2p-port", type=int, metavar="P", help="let other simulated workers pull from this one's RAM")
    add("--profile", default="default", choices=profile_names(), help="timing profile (default: %(default)s)")
    add("--time-scale", type=float, default=1.0, metavar="X", help="run X times faster than the profile")
    add("--model", default="sim-model", metavar="NAME", help="served model name (default: %(default)s)")
    add(
        "--lora", action="append", default=[], metavar="NAME", help="an adapter of the model; may be repeated"
    )
    add("--tokenizer", metavar="DIR", help="folder with tokenizer.json and a chat template")
    add("--block-size", type=int, default=16, metavar="N", help="tokens per block (default: %(default)s)")
    add("--hbm-blocks", type=int, default=8192, metavar="N", help="blocks in HBM (default: %(default)s)")
    add("--ram-blocks", type=int, default=0, metavar="N", help="blocks in RAM; 0 switches offloading off")
    add("--storage-blocks", type=int, default=0, metavar="N", help="blocks on storage; 0 for no such tier")
    add("--max-model-len", type=int, default=131072, metavar="N", help="longest sequence in tokens")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="most requests in a step")
    add("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="most tokens in a step")
    add("--offload-generated", action="store_true", help="offload generated blocks too")
    add("--event-encoding", choices=[e.value for e in EventEncoding], default="map", help="shape of an event")
    add("--hash-kind", choices=[k.value for k in HashKind], default="int", help="shape of a block hash")
    add("--hash-seed", default=DEFAULT_SEED, help="root of the block hashes; peers need the same")
    add("--self-describing", action="store_true", help="offload-tier stores carry tokens and parent")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    try:
        uvloop.run(_serve(options_from(args)))
    except SimConfigError as error:
        print(f"sim-worker: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def options_from(args: argparse.Namespace) -> SimWorkerOptions:
    """Parsed arguments as options.

    Raises:
        SimConfigError: a number is out of range.
    """
    engine = SimConfig(
        block_size_tokens=args.block_size,
        hbm_blocks=args.hbm_blocks,
        ram_blocks=args.ram_blocks,
        storage_blocks=args.storage_blocks,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        offload_prompt_only=not args.offload_generated,
        self_describing_events=args.self_describing,
        hash_seed=args.hash_seed,
    )
    return SimWorkerOptions(
        host=args.host,
        port=args.port,
        events=args.events,
        replay=args.replay,
        p2p_port=args.p2p_port,
        topic=args.topic,
        profile=args.profile,
        time_scale=args.time_scale,
        model=args.model,
        loras=tuple(args.lora),
        tokenizer=args.tokenizer,
        event_encoding=EventEncoding(args.event_encoding),
        hash_kind=HashKind(args.hash_kind),
        engine=engine,
    )


async def _serve(options: SimWorkerOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_sim_worker(options) as running:
        print(msgspec.json.encode(running.addresses()).decode(), flush=True)
        await stop.wait()
