# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine_ext.vllm.storage.errors import LedgerBusy
from engine_ext.vllm.storage.ledger import LEDGER_NAME, Ledger

HOLDER = """
import sys, time
from pathlib import Path
from engine_ext.vllm.storage.ledger import Ledger
with Ledger(Path(sys.argv[1]), 10).held() as ledger:
    ledger.write(77)
    print("held", flush=True)
    time.sleep(1000)
"""


def test_what_one_worker_writes_another_reads(tmp_path: Path) -> None:
    one, other = Ledger(tmp_path, 1.0), Ledger(tmp_path, 1.0)
    with one.held():
        assert one.read() is None
        one.write(1234)
    with other.held():
        assert other.read() == 1234
    one.close()
    other.close()


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 20])
def test_a_damaged_ledger_reads_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LEDGER_NAME).write_bytes(content)
    ledger = Ledger(tmp_path, 1.0)
    with ledger.held():
        assert ledger.read() is None
        ledger.write(5)
        assert ledger.read() == 5
    ledger.close()


def test_a_frozen_holder_makes_others_give_up_and_a_killed_one_does_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0.05)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        with pytest.raises(LedgerBusy, match="no other worker gave up"), ledger.held():
            pass
        holder.kill()
        holder.wait()
    with ledger.held():
        assert ledger.read() == 77
    ledger.close()


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 30.0)
    with ledger.held():
        ledger.write(0)

    def add() -> None:
        for _ in range(50):
            with ledger.held():
                total = ledger.read()
                assert total is not None
                ledger.write(total + 1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with ledger.held():
        assert ledger.read() == 200
    ledger.close()


def test_a_root_that_was_emptied_gets_a_new_ledger(tmp_path: Path) -> None:
    root = tmp_path / "root"
    ledger = Ledger(root, 1.0)
    with ledger.held():
        ledger.write(9)
    shutil.rmtree(root)
    with ledger.held():
        assert ledger.read() is None
    ledger.close()
