# SPDX-License-Identifier: Apache-2.0
"""The keeper's end of the channel: tells every serving process what has changed, takes what they observed, asks them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Mapping
from typing import Protocol

import msgspec

from router.processes.frames import Frames, frame
from router.processes.published import Published
from router.processes.seen import Answer, Batch, Counted, FromServing, Hello
from router.processes.told import Asking, Telling

_log = logging.getLogger(__name__)
_ANSWER_S = 10.0


class Takes(Protocol):
    """What becomes of what processes say."""

    def take(self, batch: Batch) -> None:
        """Observations."""

    def counted(self, process: int, told: Counted) -> None:
        """Metrics since the last time."""

    def left(self, process: int) -> None:
        """The process is gone."""


class _Serving:
    """One connected process."""

    def __init__(
        self,
        hello: Hello,
        writer: asyncio.StreamWriter,
        published: Published,
    ) -> None:
        self.process = hello.process
        self.questions: dict[int, asyncio.Future[Answer]] = {}
        self.taken = 0
        """The last batch that was taken."""
        self._told_taken = 0
        """The same as of the states that were published last."""
        self._said_taken = 0
        self._writer = writer
        self._published = published
        self._number = 0
        self._is_due = asyncio.Event()
        self._audience = published.follow(self._is_due.set)

    def publish(self) -> None:
        """The published states include all batches that were taken."""
        self._told_taken = self.taken
        if self._told_taken > self._said_taken:
            self._is_due.set()

    async def tell(self) -> None:
        """Write whatever is due, for good; as fast as the process reads, and no faster."""
        while True:
            if self._audience.is_due or self._told_taken > self._said_taken:
                self._number += 1
                whole, entries = self._audience.take()
                self._said_taken = self._told_taken
                self._writer.write(frame(Telling(self._number, self._said_taken, whole, entries)))
                await self._writer.drain()
            await self._is_due.wait()
            self._is_due.clear()

    def ask(self, asking: Asking) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.questions[asking.number] = future
        self._writer.write(frame(asking))
        return future

    def answered(self, answer: Answer) -> None:
        future = self.questions.pop(answer.number, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def close(self) -> None:
        self._published.leave(self._audience)
        for future in self.questions.values():
            future.cancel()
        self._writer.close()


class Feed:
    """Listens for serving processes. One event loop owns it."""

    def __init__(self, published: Published, takes: Takes) -> None:
        self._published = published
        self._takes = takes
        self._serving: dict[int, _Serving] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)

    @property
    def processes(self) -> list[int]:
        """Numbers of the connected processes."""
        return sorted(self._serving)

    async def start(self, listener: socket.socket) -> None:
        """Take processes from now on: they are told all that is published."""
        self._server = await asyncio.start_unix_server(self._connected, sock=listener)

    async def stop(self) -> None:
        """Leave them."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def publish(self) -> None:
        """To be called after ``Published.tell``: it includes what every process has told until now."""
        for serving in self._serving.values():
            serving.publish()

    async def ask(self, what: str, body: bytes = b"") -> Mapping[int, bytes]:
        """Answers by process; those that fail, die or take too long are left out and logged."""
        futures = {
            serving.process: serving.ask(Asking(next(self._numbers), what, body))
            for serving in self._serving.values()
        }
        if not futures:
            return {}
        await asyncio.wait(futures.values(), timeout=_ANSWER_S)
        answers: dict[int, bytes] = {}
        for process, future in futures.items():
            if not future.done() or future.cancelled():
                future.cancel()
                _log.warning("process %d did not answer about %s", process, what)
            elif (error := future.result().error) is not None:
                _log.warning("process %d failed to answer about %s: %s", process, what, error)
            else:
                answers[process] = future.result().body
        return answers

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        frames: Frames[FromServing] = Frames(reader, FromServing)  # type: ignore[arg-type]
        try:
            hello = await frames.next()
            if isinstance(hello, Hello):
                await self._follow(hello, frames, writer)
        except (msgspec.DecodeError, ConnectionError) as error:
            _log.error("a process said what is not understood: %s", error)
        finally:
            writer.close()

    async def _follow(self, hello: Hello, frames: Frames[FromServing], writer: asyncio.StreamWriter) -> None:
        serving = _Serving(hello, writer, self._published)
        self._serving[hello.process] = serving
        telling = asyncio.create_task(serving.tell(), name=f"tell process {hello.process}")
        try:
            while (message := await frames.next()) is not None:
                self._take(serving, message)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            serving.close()
            if self._serving.get(hello.process) is serving:
                del self._serving[hello.process]
                self._takes.left(hello.process)

    def _take(self, serving: _Serving, message: FromServing) -> None:
        match message:
            case Batch():
                self._takes.take(message)
                serving.taken = message.number
            case Counted():
                self._takes.counted(serving.process, message)
            case Answer():
                serving.answered(message)
            case Hello():
                pass
