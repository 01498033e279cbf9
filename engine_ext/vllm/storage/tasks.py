# SPDX-License-Identifier: Apache-2.0
"""What the store's threads do. Whatever goes wrong, a job ends, and the error is counted and turned into a state."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from engine_ext.vllm.storage.block_file import HEADER_BYTES
from engine_ext.vllm.storage.counts import Counts
from engine_ext.vllm.storage.directory import DISK_FULL, BlockDirectory, Outgoing
from engine_ext.vllm.storage.errors import BlockDefective, BlockMissing, LedgerBusy, NoRoom
from engine_ext.vllm.storage.health import Degraded, Health
from engine_ext.vllm.storage.jobs import Job
from engine_ext.vllm.storage.known import KnownFiles
from engine_ext.vllm.storage.region import HostRegion
from engine_ext.vllm.storage.scan import Scanner
from engine_ext.vllm.storage.value import Weight


class Tasks:
    """Jobs that ended come from `finished`, answers to lookups from `answers`. Methods may run in any thread."""

    def __init__(
        self,
        directory: BlockDirectory,
        scanner: Scanner,
        region: HostRegion,
        known: KnownFiles,
        counts: Counts,
        health: Health,
    ) -> None:
        self.finished: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[bytes, bool]] = queue.SimpleQueue()
        self.scanning = threading.Event()
        self.scanned_once = threading.Event()
        self._directory = directory
        self._scanner = scanner
        self._region = region
        self._known = known
        self._counts = counts
        self._health = health
        self._own = threading.local()

    def load(self, job: Job, key: bytes, block: int, weight: Weight) -> None:
        good: list[bytes] = []
        try:
            if job.wanted:
                started_s = time.monotonic()
                payload = self._directory.read(key, self._buffer(1), weight)
                with job.touching() as allowed:
                    if allowed:
                        self._region.copy_in(block, payload)
                        good.append(key)
                self._counts.read(len(payload), time.monotonic() - started_s)
                self._health.good()
        except Exception as error:  # whatever it is, the job ends
            self._failed(error)
        finally:
            self._known.end_read(key)
            if job.part_done(good, len(good) * self._region.block_bytes):
                self.finished.put(job)

    def store(self, job: Job, blocks: Sequence[tuple[bytes, int, Weight]]) -> None:
        good: list[bytes] = []
        written = 0
        try:
            started_s = time.monotonic()
            outgoing = self._copy_out(job, blocks)
            if outgoing:
                written = self._directory.write(outgoing, lambda: job.wanted)
                good += [one.key for one in outgoing]
                size_bytes = written * self._directory.file_bytes
                self._counts.wrote(written, size_bytes, time.monotonic() - started_s)
                self._health.good()
        except Exception as error:  # whatever it is, the job ends
            self._failed(error)
        finally:
            if job.part_done(good, written * self._region.block_bytes):
                self.finished.put(job)

    def _copy_out(self, job: Job, blocks: Sequence[tuple[bytes, int, Weight]]) -> list[Outgoing]:
        size = self._directory.file_bytes
        buffer = self._buffer(len(blocks))
        outgoing = []
        for i, (key, block, weight) in enumerate(blocks):
            content = buffer[i * size : (i + 1) * size]
            with job.touching() as allowed:
                if not allowed:
                    return []
                self._region.copy_out(block, content[HEADER_BYTES:])
            outgoing.append(Outgoing(key, content, weight))
        return outgoing

    def probe(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            found = False
            try:
                found = self._directory.probe(key)
            except Exception as error:  # no answer is a miss
                self._failed(error)
            self.answers.put((key, found))

    def scan(self) -> None:
        try:
            self._directory.root.mkdir(parents=True, exist_ok=True)
            self._scanner.scan()
            self.scanned_once.set()
        except Exception as error:  # the next scan tries again
            self._failed(error)
            self._counts.error("scan")
        finally:
            self.scanning.clear()

    def _buffer(self, blocks: int) -> memoryview:
        """Of this thread, for so many files."""
        size = blocks * self._directory.file_bytes
        buffer: bytearray | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._own.buffer = bytearray(size)
        return memoryview(buffer)[:size]

    def _failed(self, error: Exception) -> None:
        now_s = time.monotonic()
        if isinstance(error, BlockMissing):
            self._counts.error("missing")
        elif isinstance(error, BlockDefective):
            self._counts.error("defective")
        elif isinstance(error, NoRoom):
            self._counts.error("no_room")
        elif isinstance(error, LedgerBusy):
            self._counts.error("ledger_busy")
            self._health.enter(Degraded.LEDGER_BUSY, now_s)
        elif isinstance(error, OSError) and error.errno in DISK_FULL:
            self._counts.error("disk_full")
            self._health.enter(Degraded.DISK_FULL, now_s)
        else:
            self._counts.error("io" if isinstance(error, OSError) else "internal")
            self._health.io_error(now_s)
