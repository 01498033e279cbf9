# SPDX-License-Identifier: Apache-2.0
"""A serving process's end of the channel: hears what has changed, tells what it observed, answers questions.

Nothing here is on the way of a request: ``tell`` appends to a list. While there is no keeper the process goes on with
what it knows; observations wait, up to a bound, for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from router.processes.frames import Frames, frame
from router.processes.seen import Answer, Batch, Counted, FamilyTold, Hello, Seen
from router.processes.told import Asking, FromKeeper, Telling

_log = logging.getLogger(__name__)
_GATHER_S = 0.05
_COUNT_S = 5.0
_AGAIN_S = 0.1
_MOST_WAITING = 100_000
METRICS = "metrics"
"""The question that is answered by ``Counted``, and an empty answer behind it."""

Answers = Mapping[str, Callable[[bytes], Awaitable[bytes]]]


class Hears(Protocol):
    """What becomes of what the keeper tells."""

    def connected(self) -> None:
        """Another keeper, or the first one, will tell all it knows."""

    def told(self, telling: Telling) -> None:
        """States have changed."""


class Counts(Protocol):
    """Metrics since they were last told."""

    def take(self) -> list[FamilyTold]: ...


class KeeperLink:
    """``start`` and ``stop`` once each, on one event loop."""

    def __init__(self, path: Path, process: int) -> None:
        """``path`` of the keeper's socket, ``process`` the number of this one."""
        self._path = path
        self._process = process
        self._hears: Hears | None = None
        self._early: list[Telling] = []
        """Told before anybody was there to hear it."""
        self._is_told = asyncio.Event()
        self._answers: Answers = {}
        self._counts: Counts | None = None
        self._waiting: list[Seen] = []
        self._dropped = 0
        self._batch = 1
        self._writer: asyncio.StreamWriter | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.dropped = 0
        """Observations that no keeper has heard of and none will."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a keeper."""
        return self._writer is not None

    async def start(self) -> Telling:
        """Connect, now and whenever the keeper was gone; returns what the first one tells first, which is everything."""
        self._loop = asyncio.get_running_loop()
        self._spawn(self._run())
        await self._is_told.wait()
        return self._early.pop(0)

    def follow(self, hears: Hears, answers: Answers, counts: Counts) -> None:
        """Be told from now on, answer questions, tell metrics."""
        self._hears, self._answers, self._counts = hears, answers, counts
        for telling in self._early:
            hears.told(telling)
        self._early.clear()
        self._spawn(self._count())

    async def stop(self) -> None:
        """Tell what is left, and leave."""
        if self._flush is not None:
            self._flush.cancel()
        self._send_waiting()
        self._send_counts()
        writer = self._writer
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if writer is not None:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def tell(self, seen: Seen) -> int:
        """Tell soon; returns the number of the batch that this will be in. O(1), never blocks."""
        if len(self._waiting) >= _MOST_WAITING:
            self._dropped += 1
            self.dropped += 1
            return self._batch
        self._waiting.append(seen)
        if self._flush is None and self._loop is not None:
            self._flush = self._loop.call_later(_GATHER_S, self._on_flush)
        return self._batch

    def _on_flush(self) -> None:
        self._flush = None
        self._send_waiting()

    def _send_waiting(self) -> None:
        if self._writer is None or not self._waiting:
            return  # the next connection begins with what waits
        waiting, self._waiting = self._waiting, []
        dropped, self._dropped = self._dropped, 0
        self._writer.write(frame(Batch(self._batch, waiting, dropped)))
        self._batch += 1

    def _send_counts(self) -> None:
        if self._writer is not None and self._counts is not None:
            self._writer.write(frame(Counted(self._counts.take())))

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(_COUNT_S)
            self._send_counts()

    async def _run(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(_AGAIN_S)
                continue
            try:
                await self._hear(reader, writer)
            except (msgspec.DecodeError, ConnectionError) as error:
                _log.error("the keeper said what is not understood: %s", error)
            finally:
                self._writer = None
                writer.close()
            _log.warning("the keeper is gone; requests are served with what is known")
            await asyncio.sleep(_AGAIN_S)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames: Frames[FromKeeper] = Frames(reader, FromKeeper)  # type: ignore[arg-type]
        writer.write(frame(Hello(self._process, os.getpid())))
        is_first = True
        while (message := await frames.next()) is not None:
            if is_first:
                is_first, self._writer = False, writer
                if self._hears is not None:
                    self._hears.connected()
                self._send_waiting()
            if isinstance(message, Telling):
                self._told(message)
            else:
                self._spawn(self._answer(message))

    def _told(self, telling: Telling) -> None:
        if self._hears is not None:
            self._hears.told(telling)
        else:
            self._early.append(telling)
            self._is_told.set()

    async def _answer(self, asking: Asking) -> None:
        answer = await self._find_answer(asking)
        if self._writer is not None:
            self._writer.write(frame(answer))

    async def _find_answer(self, asking: Asking) -> Answer:
        if asking.what == METRICS:
            self._send_counts()
            return Answer(asking.number, b"")
        find = self._answers.get(asking.what)
        if find is None:
            return Answer(asking.number, b"", f"{asking.what} is not known here")
        try:
            return Answer(asking.number, await find(asking.body))
        except Exception as error:
            _log.exception("a question about %s could not be answered", asking.what)
            return Answer(asking.number, b"", str(error) or type(error).__name__)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
