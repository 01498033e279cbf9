# SPDX-License-Identifier: Apache-2.0
"""``pointsman epp``: the endpoint picker as a command."""

from __future__ import annotations

import argparse

import uvloop

from router.config import Config
from router.extproc.app import PickerApp
from router.serve import serve_app

_PORTS = {
    "grpc_port": "port of ext_proc (default: 9002)",
    "health_port": "port of the gRPC health services (default: 9003)",
    "http_port": "port of /metrics and /admin/ (default: 9090)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The ports; 0 takes a free one."""
    for name, text in _PORTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="PORT", help=text)


def overrides(args: argparse.Namespace) -> dict[str, object]:
    """What the arguments say, as keys of the configuration."""
    given = {f"epp.{name}": getattr(args, name) for name in _PORTS}
    return {key: value for key, value in given.items() if value is not None}


def serve_picker(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Prints one JSON line with the addresses when it listens.

    Raises:
        ConfigError: an address cannot be bound, or a value that only its user can judge.
    """
    uvloop.run(_serve(PickerApp(config)))


async def _serve(app: PickerApp) -> None:
    try:
        await serve_app(app)
    except SystemExit:  # how uvicorn ends when an app does not start
        if app.failed is None:
            raise
    if app.failed is not None:
        raise app.failed
