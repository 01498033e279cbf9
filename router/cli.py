# SPDX-License-Identifier: Apache-2.0
"""The commands. Exit codes: 0 ok, 1 a check failed, 2 bad usage or configuration."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence

from engine_ext.sim import command as sim_command
from indexer.service import command as indexer_command
from router import demo
from router.config import Config, load
from router.config_fleet import WorkerEntry, parse_worker_argument
from router.costs import command as costs_command
from router.decisions.what_if import command as what_if_command
from router.doctor import examine, render_table
from router.errors import ConfigError
from router.extproc import command as epp_command
from router.fleet.static import static_workers
from router.processes.command import supervise
from router.processes.start import Service
from router.replay import command as replay_command
from router.serve import serve

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2


def run(arguments: Sequence[str]) -> int:
    """Run one command; never raises for what a user can get wrong."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        code: int = args.run(args)
    except ConfigError as error:
        print(f"pointsman: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_OK
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pointsman", description="KV-cache-aware router for fleets of vLLM workers."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    one = commands.add_parser("demo", help="a simulated fleet, a workload, and what routing saved")
    one.add_argument("--once", action="store_true", help="print the table and exit")
    one.add_argument("--workers", type=int, default=4, metavar="N", help="simulated workers (default: 4)")
    one.set_defaults(run=_demo)

    one = commands.add_parser("serve", help="the gateway and the admin API")
    _add_fleet_arguments(one)
    one.add_argument("--host", help="address to listen on")
    one.add_argument("--port", type=int, help="port to listen on (default: 8080); 0 takes a free one")
    _add_processes(one)
    one.set_defaults(run=_serve)

    one = commands.add_parser("epp", help="the endpoint picker (Envoy ext_proc) and the admin API")
    _add_fleet_arguments(one)
    epp_command.add_arguments(one)
    _add_processes(one)
    one.set_defaults(run=_epp)

    one = commands.add_parser("indexer", help="the index alone over HTTP; check of a recorded stream")
    indexer_command.add_arguments(one)

    one = commands.add_parser("sim-worker", help="a simulated vLLM worker")
    sim_command.add_arguments(one)
    one.set_defaults(run=sim_command.run)

    one = commands.add_parser("costs", help="seconds of each path, and where pull and recompute cross")
    costs_command.add_arguments(one)
    one.set_defaults(run=costs_command.run)

    one = commands.add_parser("replay", help="a recorded trace over a simulated fleet, policy by policy")
    replay_command.add_arguments(one)
    one.set_defaults(run=replay_command.run)

    one = commands.add_parser(
        "what-if", help="a decision log decided again under other constants or policies"
    )
    what_if_command.add_arguments(one)
    one.set_defaults(run=what_if_command.run)

    one = commands.add_parser("doctor", help="check what routing needs of each worker")
    _add_fleet_arguments(one)
    one.add_argument("--send-requests", action="store_true", help="also send one-token completions")
    one.set_defaults(run=_doctor)
    return parser


def _add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", help="configuration file (YAML)")
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="URL[,events=tcp://H:P][,replay=tcp://H:P][,p2p=H:P][,ranks=N][,role=both][,transfer=p2p]",
        help="a worker; may be repeated, replaces those of the file",
    )


def _add_processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, metavar="N", help="processes that serve (default: 1)")


def _config(args: argparse.Namespace, more: Mapping[str, object] | None = None) -> Config:
    workers: list[WorkerEntry] = [parse_worker_argument(text) for text in args.worker]
    overrides = {
        f"server.{key}": value
        for key in ("host", "port", "processes")
        if (value := getattr(args, key, None)) is not None
    }
    config = load(args.config, overrides={**overrides, **(more or {})}, workers=workers)
    if not config.fleet.workers and not config.fleet.discovers:
        accepted = "at least one worker (fleet.workers or --worker), fleet.file or fleet.kubernetes.pool"
        raise ConfigError("fleet.workers", [], accepted)
    return config


def _serve(args: argparse.Namespace) -> int:
    config = _config(args)
    if config.server.processes > 1:
        return supervise(Service.GATEWAY, config)
    serve(config)
    return EXIT_OK


def _epp(args: argparse.Namespace) -> int:
    config = _config(args, epp_command.overrides(args))
    if config.server.processes > 1:
        return supervise(Service.PICKER, config)
    epp_command.serve_picker(config)
    return EXIT_OK


def _doctor(args: argparse.Namespace) -> int:
    config = _config(args)
    if not config.fleet.workers:
        raise ConfigError("fleet.workers", [], "workers to examine (discovery is not followed here)")
    specs = static_workers(config.fleet.workers)
    checks = asyncio.run(examine(specs, config, send_requests=args.send_requests))
    print(render_table(checks))
    # A check that was not made (None) has not failed.
    return EXIT_CHECK_FAILED if any(check.ok is False for check in checks) else EXIT_OK


def _demo(args: argparse.Namespace) -> int:
    if not 2 <= args.workers <= 64:
        raise ConfigError("--workers", args.workers, "a number from 2 to 64")
    return demo.run(workers=args.workers, once=args.once)
