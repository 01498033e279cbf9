# SPDX-License-Identifier: Apache-2.0
"""``pointsman indexer`` as a process."""

from __future__ import annotations

import json
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from router.cli import run


def test_process_says_where_it_listens_and_ends_with_0_when_told_to(tmp_path: Path) -> None:
    key = tmp_path / "state" / "hash.key"
    command = [sys.executable, "-P", "-m", "router", "indexer", "--port", "0", "--hash-key-file", str(key)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["indexer"]
            with urllib.request.urlopen(url + "/health") as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_port_that_is_taken_is_bad_usage_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["indexer", "--port", port, "--hash-key-file", str(tmp_path / "key")]) == 2
    assert port in capfd.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--peers", "h:1"],
        ["--port", "70000"],
        ["--max-blocks", "7"],
        ["--max-blocks", "many"],
        ["--offload-grace-s", "-1"],
        ["--offload-grace-s", "nan"],
    ],
)
def test_wrong_option_is_bad_usage_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(["indexer", *arguments, "--hash-key-file", str(tmp_path / "key")]) == 2
    assert arguments[0] in capfd.readouterr().err


def test_key_file_that_is_none_is_bad_usage_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("no key")
    assert run(["indexer", "--port", "0", "--hash-key-file", str(tmp_path / "key")]) == 2
    assert str(tmp_path / "key") in capfd.readouterr().err
