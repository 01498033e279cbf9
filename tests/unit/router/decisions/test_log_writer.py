# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from router.decisions.log_file import LogFile, check_writable
from router.decisions.log_writer import FsyncPolicy, LogWriter

PATIENCE_S = 30.0


@dataclass
class Disk:
    """A file that can be made to refuse or to hang."""

    lines: list[bytes] = field(default_factory=list)
    syncs: int = 0
    closed: bool = False
    full: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    hangs: threading.Event | None = None
    """Until it is set."""

    def append(self, lines: bytes) -> int:
        self.asked.set()
        if self.hangs is not None:
            self.hangs.wait()
        if self.full.is_set():
            raise OSError(28, "No space left on device")
        self.lines += lines.splitlines()
        return len(lines)

    def sync(self) -> None:
        self.syncs += 1

    def close(self) -> None:
        self.closed = True


def writer_of(disk: Disk, fsync: FsyncPolicy = "never", most_bytes: int = 1000) -> LogWriter:
    return LogWriter(disk, fsync, time.monotonic, most_bytes)


def test_everything_queued_is_written_in_order_when_it_stops() -> None:
    disk = Disk()
    writer = writer_of(disk, most_bytes=10**6)
    writer.start()
    lines = [b'{"n":%d}' % i for i in range(5000)]
    for line in lines:
        writer.write(line)
    writer.stop()
    assert disk.lines == lines
    assert disk.closed
    assert (writer.dropped, writer.written_lines, writer.degraded) == (0, 5000, None)


def test_a_full_disk_is_a_named_state_and_what_still_fits_the_queue_is_written_later() -> None:
    disk = Disk()
    disk.full.set()
    writer = writer_of(disk)
    writer.start()
    writer.write(b"a" * 400)
    _until(lambda: writer.degraded == "No space left on device")
    writer.write(b"b" * 400)
    for _ in range(3):
        writer.write(b"c" * 400)
    assert writer.dropped == 3
    assert writer.errors >= 1
    disk.full.clear()
    _until(lambda: len(disk.lines) == 2)
    _until(lambda: writer.degraded is None)
    writer.write(b"d")
    writer.stop()
    # The log itself says what is missing, and where.
    assert disk.lines == [b"a" * 400, b"b" * 400, b'{"type":"dropped","lines":3}', b"d"]


def test_nobody_waits_for_a_disk_that_hangs_and_nothing_is_lost_that_the_queue_holds() -> None:
    disk = Disk(hangs=threading.Event())
    writer = writer_of(disk, most_bytes=100)
    writer.start()
    writer.write(b"first")
    assert disk.asked.wait(PATIENCE_S)
    for i in range(100):
        writer.write(b"%09d" % i)
    assert disk.hangs is not None
    disk.hangs.set()
    writer.stop()
    kept = [b"%09d" % i for i in range(len(disk.lines) - 2)]
    assert disk.lines == [b"first", *kept, b'{"type":"dropped","lines":%d}' % writer.dropped]
    assert len(kept) + writer.dropped == 100


def test_lines_that_the_disk_never_took_are_counted_when_it_stops() -> None:
    disk = Disk()
    disk.full.set()
    writer = writer_of(disk)
    writer.start()
    for _ in range(3):
        writer.write(b"x")
    writer.stop()
    assert disk.lines == []
    assert writer.dropped == 3
    assert disk.closed


@pytest.mark.parametrize(("fsync", "least"), [("never", 0), ("always", 1)])
def test_lines_are_forced_to_the_disk_as_told(fsync: FsyncPolicy, least: int) -> None:
    disk = Disk()
    writer = writer_of(disk, fsync)
    writer.start()
    writer.write(b"x")
    _until(lambda: disk.lines == [b"x"])
    _until(lambda: disk.syncs >= least)
    if fsync == "never":
        writer.stop()
        assert disk.syncs == 0
    else:
        writer.stop()


def test_lines_are_forced_to_the_disk_a_second_later_though_none_follows() -> None:
    disk = Disk()
    writer = writer_of(disk, "interval")
    writer.start()
    writer.write(b"x")
    _until(lambda: disk.syncs == 1)
    writer.stop()


# The file


def numbers(path: Path) -> list[int]:
    return [int(line) for line in path.read_bytes().split()]


def test_it_is_renamed_at_its_size_and_the_oldest_go(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LogFile(path, max_bytes=10, keep=2)
    for i in range(10):
        assert file.append(b"%03d\n" % i) == 4
    file.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log", "log.3", "log.4"]
    assert numbers(tmp_path / "log.3") + numbers(tmp_path / "log.4") + numbers(path) == [4, 5, 6, 7, 8, 9]


def test_it_goes_on_where_it_was_after_a_restart_and_ends_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"a":1}\n{"tor')
    file = LogFile(path, max_bytes=1000, keep=2)
    file.append(b'{"b":2}\n')
    file.close()
    assert path.read_bytes() == b'{"a":1}\n{"tor\n{"b":2}\n'


def test_it_is_made_again_when_somebody_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LogFile(path, max_bytes=1000, keep=2)
    file.append(b"1\n")
    path.unlink()
    file.append(b"2\n")
    file.close()
    assert path.read_bytes() == b"2\n"


def test_two_writers_of_one_log_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LogFile(path, max_bytes=1000, keep=2)
    file.open()
    with pytest.raises(BlockingIOError):
        check_writable(path)
    file.close()
    check_writable(path)
    with pytest.raises(FileNotFoundError):
        check_writable(tmp_path / "no" / "log")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel refuses to let a file of this process grow beyond, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_line_that_does_not_fit_is_not_torn(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LogFile(path, max_bytes=1000, keep=2)
    with file_size_limit(10):
        assert file.append(b"1234\n5678\n90\n") == 10
        with pytest.raises(OSError, match="File too large"):
            file.append(b"90\n")
    assert path.read_bytes() == b"1234\n5678\n"
    file.append(b"90\n")
    file.close()
    assert path.read_bytes() == b"1234\n5678\n90\n"


def test_part_of_a_line_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LogFile(path, max_bytes=1000, keep=2)
    with file_size_limit(8):
        assert file.append(b"1234\n5678\n") == 5
    file.close()
    assert path.read_bytes() == b"1234\n"


KILLED = """
import sys, time
from pathlib import Path
from router.decisions.log_file import LogFile
from router.decisions.log_writer import LogWriter
writer = LogWriter(LogFile(Path(sys.argv[1]), 1 << 20, 8), "never", time.monotonic)
writer.start()
n = 0
while True:
    writer.write(b'{"type":"outcome","id":"r%d","attempt":1,"time_unix_s":0,"observed":{}}' % n)
    n += 1
    if n % 1000 == 0:
        print(n, flush=True)
        time.sleep(0.02)
"""


def test_a_killed_writer_loses_at_most_what_it_had_not_written_yet(tmp_path: Path) -> None:
    path = tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-P", "-c", KILLED, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as said:
        queued = [int(said.readline()) for _ in range(12)][-1]
        _until(lambda: b'"r5000"' in b"".join(one.read_bytes() for one in tmp_path.iterdir()))
        process.send_signal(signal.SIGKILL)
        process.wait()
    files = sorted((one for one in tmp_path.iterdir() if one != path), key=lambda one: int(one.suffix[1:]))
    data = b"".join(one.read_bytes() for one in [*files, path])
    whole, _, torn = data.rpartition(b"\n")
    lines = whole.split(b"\n")
    assert lines == [
        b'{"type":"outcome","id":"r%d","attempt":1,"time_unix_s":0,"observed":{}}' % i
        for i in range(len(lines))
    ]
    assert len(lines) > 5000
    assert queued >= 12_000
    assert len(torn) < 100
    assert os.path.getsize(path) <= 1 << 20


def _until(holds: object) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
