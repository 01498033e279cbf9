# SPDX-License-Identifier: Apache-2.0
"""One writer and many readers, each a process of its own: no reader is ever told what was true at no time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import index_stress as stress

LASTING_S = 3.0
PATIENCE_S = 120.0


def start(role: str, directory: Path, seed: int, lasting_s: float = LASTING_S) -> subprocess.Popen[str]:
    arguments = [sys.executable, stress.__file__, role, str(directory), str(seed), str(lasting_s)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=os.environ.copy())


def finish(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return output.split()


def test_readers_see_only_what_is_true_while_a_writer_changes_everything(tmp_path: Path) -> None:
    writer = start("write", tmp_path, 1)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    readers = [start("read", tmp_path, seed) for seed in range(8)]
    for reader in readers:
        asked, settled = map(int, finish(reader))
        assert asked > 0
        assert settled > 0
    assert int(finish(writer)[-1]) > 0


def test_a_writer_killed_in_the_middle_of_a_batch_leaves_readers_their_answers(tmp_path: Path) -> None:
    checker = None
    for round_ in range(4):
        writer = start("write", tmp_path, round_, PATIENCE_S)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        checker = checker or stress.Checker(tmp_path, 7)
        settled = checker.settled
        for _ in range(300):
            checker.check()
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=PATIENCE_S)
        for _ in range(300):
            checker.check()
        assert checker.reader.generation == round_ + 1
        assert checker.settled > settled
