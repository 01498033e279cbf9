# SPDX-License-Identifier: Apache-2.0
"""The storage tier without an engine: jobs in, outcomes and changes out. Nothing here waits for the file system.

    scheduler's thread                              threads
    ------------------                              --------------------------------------------
    lookup ------ known? --- else a question -----> lookup   probe
    submit_load ---------------- a part per block -> read x N read into own buffer, verify, copy in
    submit_store --------------- a part per slice -> write x N copy out, write aside, rename
    step_end ---- every rescan_interval_s --------> upkeep   scan
    collect, take_news <----------- finished jobs, changes

`drain` and `close` wait, the former at most until the last deadline.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine_ext.vllm.storage.announcements import Change
from engine_ext.vllm.storage.block_file import folder_name
from engine_ext.vllm.storage.config import StorageConfig
from engine_ext.vllm.storage.counts import Counts
from engine_ext.vllm.storage.directory import BlockDirectory
from engine_ext.vllm.storage.health import Degraded, Health
from engine_ext.vllm.storage.jobs import Job, JobKind, Outcome
from engine_ext.vllm.storage.known import KnownFiles
from engine_ext.vllm.storage.ledger import Ledger
from engine_ext.vllm.storage.lookups import Lookups, Verdict
from engine_ext.vllm.storage.region import HostRegion
from engine_ext.vllm.storage.room import Room
from engine_ext.vllm.storage.scan import Scanner
from engine_ext.vllm.storage.tasks import Tasks
from engine_ext.vllm.storage.value import Pace, Weight
from engine_ext.vllm.storage.workers import Workers

_SLICE_BLOCKS = 16
_SLICE_BYTES = 32 << 20
_LEDGER_WAIT_S = 2.0
_CLOSE_WAIT_S = 5.0
_STARTUP_SCAN_S = 30.0


class BlockStore:
    """One per worker process (scheduler side). Methods are for one thread at a time."""

    def __init__(self, config: StorageConfig, fingerprint_digest: bytes, region: HostRegion) -> None:
        self.config = config
        self.counts = Counts()
        root = Path(config.root_dir)
        self.known = KnownFiles(
            folder_name(fingerprint_digest), config.half_life_s, config.report_keys_per_step, time.monotonic
        )
        self.ledger = Ledger(root, _LEDGER_WAIT_S)
        pace = Pace(config.capacity_bytes, config.half_life_turnovers, config.half_life_s)
        self.room = Room(root, config.capacity_bytes, self.ledger, self.known, self.counts, pace)
        self.directory = BlockDirectory(
            root,
            fingerprint_digest,
            region.block_bytes,
            self.known,
            self.room,
            fsync=config.fsync,
        )
        self.scanner = Scanner(root, self.known, self.room, config.orphan_s)
        self.room.learn_all = self.scanner.learn_all
        self._region = region
        most = min(_SLICE_BYTES, config.capacity_bytes // 4) // self.directory.file_bytes
        self._slice_blocks = max(1, min(_SLICE_BLOCKS, most))
        self._lookups = Lookups(config.lookup_deadline_s)
        self._health = Health(config.retry_s)
        self._jobs: dict[int, Job] = {}
        self._queued = {JobKind.LOAD: 0, JobKind.STORE: 0}
        self._outcomes: list[Outcome] = []
        self._tasks = Tasks(self.directory, self.scanner, region, self.known, self.counts, self._health)
        self._started_s = self._scan_due_s = time.monotonic()
        self._report_due_s: float | None = None
        self._readers = Workers("read", config.read_threads)
        self._writers = Workers("write", config.write_threads)
        self._seekers = Workers("lookup", 1)
        self._keeper = Workers("upkeep", 1)
        self._begin_scan(self._started_s)

    # Scheduler's side

    def lookup(self, key: bytes, request: str) -> Verdict:
        now_s = time.monotonic()
        self._take_answers()
        if not self._health.loads(now_s):
            return Verdict.MISS
        known = self.known.seen_within(key, self.config.trust_s)
        return self._lookups.ask(key, request, now_s, known=known)

    def forget_request(self, request: str) -> None:
        self._lookups.forget(request)

    def touch(self, keys: Sequence[bytes]) -> None:
        now_s = time.time()
        for key in keys:
            self.known.touched(key, now_s, self.config.block_rebuild_s)

    def submit_load(self, job_id: int, keys: Sequence[bytes], blocks: Sequence[int], weight: Weight) -> None:
        """Each key's bytes go into the region's block beside it."""
        job = self._admit(job_id, JobKind.LOAD, keys, len(keys), self.config.load_deadline_s)
        if job is None:
            return
        self.known.begin_reads(keys)
        for key, block in zip(keys, blocks, strict=True):
            self._readers.put(partial(self._tasks.load, job, key, block, weight))

    def submit_store(
        self, job_id: int, keys: Sequence[bytes], blocks: Sequence[int], weights: Sequence[Weight]
    ) -> None:
        """The region's blocks must not change until the job is over."""
        size = self._slice_blocks
        wanted = list(zip(keys, blocks, weights, strict=True))
        slices = [wanted[i : i + size] for i in range(0, len(wanted), size)]
        job = self._admit(job_id, JobKind.STORE, keys, len(slices), self.config.store_deadline_s)
        if job is not None:
            for one in slices:
                self._writers.put(partial(self._tasks.store, job, one))

    def collect(self) -> list[Outcome]:
        """Jobs that ended since the last call, those at their deadline included."""
        now_s = time.monotonic()
        while True:
            try:
                self._end(self._tasks.finished.get_nowait())
            except queue.Empty:
                break
        for job in [job for job in self._jobs.values() if job.deadline_s <= now_s]:
            self.counts.error("deadline")
            self._end(job)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def step_end(self) -> None:
        """Once per engine step: sends this step's questions, begins scans and reports that are due."""
        now_s = time.monotonic()
        self._take_answers()
        if unsent := self._lookups.take_unsent():
            self._seekers.put(partial(self._tasks.probe, unsent))
        self._note_hung(now_s)
        if now_s >= self._scan_due_s and not self._tasks.scanning.is_set():
            self._begin_scan(now_s)
        if self.known.reporting or not self.config.report_interval_s or not self._tasks.scanned_once.is_set():
            self._report_due_s = None
        elif self._report_due_s is None:
            self._report_due_s = now_s + self.config.report_interval_s
        elif now_s >= self._report_due_s:
            self.known.begin_report()

    def take_news(self) -> list[Change]:
        """What to announce in this step, bounded."""
        return self.known.take_news()

    @property
    def busy(self) -> bool:
        """Whether the engine should go on stepping though no request is there."""
        starting = (
            not self._tasks.scanned_once.is_set() and time.monotonic() - self._started_s < _STARTUP_SCAN_S
        )
        return bool(self._jobs) or self.known.has_news or starting

    def degraded(self) -> frozenset[Degraded]:
        return self._health.states(time.monotonic())

    def drain(self) -> None:
        """Waits until every job has ended; their outcomes come with the next `collect`."""
        kept: list[Outcome] = []
        while self._jobs:
            wait_s = min(job.deadline_s for job in self._jobs.values()) - time.monotonic()
            try:
                self._end(self._tasks.finished.get(timeout=max(wait_s, 0.001)))
            except queue.Empty:
                kept += self.collect()
        self._outcomes = kept + self._outcomes

    def close(self) -> None:
        """Ends all jobs. Threads that hang in the file system are left behind; they touch nothing of the engine."""
        for job in list(self._jobs.values()):
            self._end(job)
        deadline_s = time.monotonic() + _CLOSE_WAIT_S
        for workers in (self._readers, self._writers, self._seekers, self._keeper):
            workers.stop(max(deadline_s - time.monotonic(), 0))
        self._region.release()
        self.ledger.close()

    def wait_scanned(self, timeout_s: float) -> bool:
        """Whether the first scan ended in time."""
        return self._tasks.scanned_once.wait(timeout_s)

    def _admit(
        self, job_id: int, kind: JobKind, keys: Sequence[bytes], parts: int, deadline_s: float
    ) -> Job | None:
        """A job for the threads; None if it ends here, as refused."""
        now_s = time.monotonic()
        allowed = self._health.loads(now_s) if kind is JobKind.LOAD else self._health.stores(now_s)
        full = self._queued[kind] + len(keys) > self.config.queued_blocks
        job = Job(job_id, kind, keys, parts, now_s + deadline_s)
        self._jobs[job_id] = job
        self._queued[kind] += len(keys)
        if allowed and not full and keys:
            return job
        if keys:
            self.counts.refuse("queue" if allowed else "degraded", len(keys))
        self._end(job)
        return None

    def _end(self, job: Job) -> None:
        outcome = job.close()
        if outcome is None:
            return
        del self._jobs[job.job_id]
        self._queued[job.kind] -= len(job.keys)
        good = set(outcome.good_keys)
        for key in job.keys:
            if key in good:
                self._lookups.settle(key, found=True)
            elif job.kind is JobKind.LOAD:
                self._lookups.settle(key, found=False)
        self._outcomes.append(outcome)

    def _take_answers(self) -> None:
        while not self._tasks.answers.empty():
            key, found = self._tasks.answers.get()
            self._lookups.answer(key, found=found)

    def _note_hung(self, now_s: float) -> None:
        late_reads = self._readers.stuck(self.config.load_deadline_s)
        if late_reads or self._writers.stuck(self.config.store_deadline_s):
            self._health.enter(Degraded.HUNG, now_s)
        else:
            self._health.leave(Degraded.HUNG)

    def _begin_scan(self, now_s: float) -> None:
        self._tasks.scanning.set()
        self._scan_due_s = now_s + self.config.rescan_interval_s
        self._keeper.put(self._tasks.scan)
