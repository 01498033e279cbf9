# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from engine_ext.sim.command import add_arguments, options_from, run

RUN = (
    "import argparse, sys; from engine_ext.sim.command import add_arguments, run; "
    "p = argparse.ArgumentParser(); add_arguments(p); sys.exit(run(p.parse_args()))"
)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_options_reach_the_engine() -> None:
    arguments = [
        "--port",
        "0",
        "--block-size",
        "32",
        "--hbm-blocks",
        "64",
        "--ram-blocks",
        "9",
        "--lora",
        "a",
        "--lora",
        "b",
    ]
    options = options_from(parsed(*arguments, "--hash-kind", "bytes", "--self-describing"))
    assert (options.engine.block_size_tokens, options.engine.hbm_blocks, options.engine.ram_blocks) == (
        32,
        64,
        9,
    )
    assert options.engine.self_describing_events
    assert options.loras == ("a", "b")
    assert (options.events, options.p2p_port) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--hbm-blocks", "1"], "hbm_blocks: 1"),
        (["--time-scale", "-1"], "time_scale"),
        (["--tokenizer", "/none"], "tokenizer"),
    ],
)
def test_a_bad_option_ends_with_2_and_names_the_field(arguments: list[str], named: str, capsys) -> None:
    assert run(parsed("--port", "0", *arguments)) == 2
    assert named in capsys.readouterr().err


def test_a_port_in_use_ends_with_2(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(parsed("--port", port)) == 2
        assert run(parsed("--port", "0", "--p2p-port", port)) == 2
    assert "port" in capsys.readouterr().err


def test_the_command_prints_its_addresses_serves_and_stops_on_sigterm() -> None:
    command = [
        sys.executable,
        "-c",
        RUN,
        "--port",
        "0",
        "--events",
        "tcp://*:0",
        "--replay",
        "tcp://*:0",
        "--p2p-port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            addresses = json.loads(process.stdout.readline())
            assert set(addresses) == {"http", "events", "replay", "p2p"}
            assert all(addresses.values())
            with urllib.request.urlopen(addresses["http"] + "/health", timeout=20) as response:
                assert response.status == 200
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
