# SPDX-License-Identifier: Apache-2.0
"""Makes snapshots of a running table, worker by worker, each between two batches of its streams."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from indexer.holders import HolderTable
from indexer.identity import WorkerId
from indexer.snapshot.format import Header, WorkerSection, encode_worker, pieces
from indexer.snapshot.sections import take
from indexer.subscriber import EventSubscriber

log = logging.getLogger(__name__)

_TURN_S = 10.0  # a subscriber's turn takes milliseconds; one that takes this long is stuck or stopped


@dataclass(slots=True)
class Made:
    """What became of a snapshot: workers in it, and those that did not fit."""

    workers: int = 0
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SnapshotMaker:
    """Its calls block for as long as records are copied: not for an event loop."""

    holders: HolderTable
    subscriber: EventSubscriber
    key_id: str
    unix_s: Callable[[], float]
    max_bytes: int
    """More is not written: workers that do not fit are left out, by name."""
    doubted: Callable[[WorkerId], bool] = lambda _: False
    """Workers to leave out, since their map is not only what their events said."""

    def pieces(self, made: Made) -> Iterator[bytes]:
        """A snapshot as it is now; ``made`` is filled on the way. Workers of which nothing is known are not in it."""
        header = Header(self.key_id, self.holders.index.export_format, self.unix_s())
        yield from pieces(header, self._workers(made))

    def _workers(self, made: Made) -> Iterator[bytes]:
        left_bytes = self.max_bytes
        for worker in list(self.holders.workers()):
            section = None if self.doubted(worker) else self._take(worker)
            if section is None:
                continue
            payload = encode_worker(section)
            if len(payload) > left_bytes:
                made.left_out.append(worker)
                continue
            left_bytes -= len(payload)
            made.workers += 1
            yield payload
        if made.left_out:
            log.warning("a snapshot is full without %s", ", ".join(made.left_out))

    def _take(self, worker: WorkerId) -> WorkerSection | None:
        answer: Future[WorkerSection | None] = Future()

        def command() -> None:
            try:
                answer.set_result(take(self.holders, worker, self.subscriber.channels(worker)))
            except Exception as error:
                answer.set_exception(error)

        self.subscriber.between_batches(command)
        try:
            return answer.result(_TURN_S)
        except FutureTimeoutError:
            log.warning("worker %s: not in a snapshot, its subscriber does not answer", worker)
            return None
