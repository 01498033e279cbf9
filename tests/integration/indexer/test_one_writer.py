# SPDX-License-Identifier: Apache-2.0
"""Two processes that would write one file: the second is refused, and told who the first is, however that one ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

WRITES_INDEX = """
import sys
from pathlib import Path
from indexer.hashing import HashKey
from indexer.index import IndexLimits, open_index
index = open_index(HashKey(bytes(16)), IndexLimits(max_blocks=1024), path=Path(sys.argv[1]))
index.publish()
print("writes", flush=True)
sys.stdin.read()
"""
PATIENCE_S = 120
NOBODY = "http://127.0.0.1:9"


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=PATIENCE_S)


def writes_index(path: Path) -> list[str]:
    return [sys.executable, "-P", "-c", WRITES_INDEX, str(path)]


def keeps_snapshot(path: Path) -> list[str]:
    key = path.with_name("hash.key")
    arguments = ["--port", "0", "--snapshot", str(path), "--hash-key-file", str(key)]
    return [sys.executable, "-P", "-m", "router", "indexer", *arguments]


def serves_with_snapshot(path: Path) -> list[str]:
    file = path.with_name("pointsman.yaml")
    file.write_text(f"index: {{snapshot: {path}, hash_key_file: {path.with_name('hash.key')}}}\n")
    return [sys.executable, "-P", "-m", "router", "serve", "-c", str(file), "--port", "0", "--worker", NOBODY]


@pytest.mark.parametrize("commands", [writes_index, keeps_snapshot, serves_with_snapshot])
def test_the_second_writer_of_a_file_is_refused_and_a_killed_one_stands_in_nobody_s_way(
    tmp_path: Path, commands: Callable[[Path], list[str]]
) -> None:
    path = tmp_path / "file"
    first = start(*commands(path))
    try:
        assert first.stdout is not None
        assert first.stdout.readline(), first.communicate(timeout=5)
        refused = subprocess.run(
            commands(path),
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert refused.returncode != 0
        assert f"{path} is written by process {first.pid}" in refused.stderr
    finally:
        end(first)
    second = start(*commands(path))
    try:
        assert second.stdout is not None
        assert second.stdout.readline(), "the second does not start although the first is dead"
    finally:
        end(second)
