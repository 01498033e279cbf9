# SPDX-License-Identifier: Apache-2.0
"""The control channel's thread: it alone touches the sockets and both state machines.

It sleeps until a message comes, the owner wants something, the transfer layer has news, or a timer is due; with
nothing under way it does not wake at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine_ext.transfer.thread import PullThread

from .config import ControlConfig
from .peer import Asked, LeaseEnded
from .reader import Reader, ReaderEvent
from .sockets import FromReader, FromSource, Received, Sockets
from .source import Source
from .wire import MalformedError, read_by_source

_log = logging.getLogger(__name__)

Heard = ReaderEvent | Asked | LeaseEnded


@dataclass(frozen=True, slots=True)
class ControlCounts:
    """What the channel holds now, and totals since it began."""

    peers: int
    """Addresses that we asked lately."""
    connections: int
    """Of ours, to them."""
    finds: int
    """Our lookups and leases."""
    pulls: int
    readers: int
    """Peers that were admitted here."""
    lookups: int
    """Lookups and leases of theirs."""
    malformed: int
    """Messages that were dropped."""
    refused: dict[str, int]
    """Handshakes that we refused, by `RefusalReason.value`."""


Command = Callable[[Source, Reader, float], object]


class ControlThread:
    """Started by `start`. `tell`, `heard`, `counts` and `stop` are for the owner's thread."""

    def __init__(
        self,
        config: ControlConfig,
        sockets: Sockets,
        source: Source,
        reader: Reader,
        pulls: PullThread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._crowd = 4 * config.max_lookups
        self._sockets = sockets
        self._source = source
        self._reader = reader
        self._pulls = pulls
        self._clock = clock
        self._commands: deque[Command] = deque()
        self._outbox: deque[Heard] = deque()
        self._stopping = False
        self._malformed = 0
        self.error: BaseException | None = None
        """What ended the thread, if an error did."""
        self.ended_s = 0.0
        """When that was."""
        self._thread = threading.Thread(target=self._run, name="pointsman-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, command: Command) -> None:
        """Runs it on the thread."""
        self._commands.append(command)
        self._sockets.wake()

    def heard(self) -> list[Heard]:
        """What happened since the last call, in order."""
        return [self._outbox.popleft() for _ in range(len(self._outbox))]

    def counts(self) -> ControlCounts:
        """Each number as of some moment just now."""
        return ControlCounts(
            peers=self._reader.peers,
            connections=self._sockets.lines,
            finds=self._reader.finds,
            pulls=self._reader.pulls,
            readers=self._source.readers,
            lookups=self._source.lookups,
            malformed=self._malformed + self._reader.malformed + self._sockets.malformed,
            refused={reason.value: count for reason, count in self._source.refused.copy().items()},
        )

    def stop(self, timeout_s: float) -> bool:
        """Ends everything, then the thread; True once it has ended. False: peers still hold leases."""
        self._stopping = True
        self._sockets.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def finish(self) -> None:
        """After `stop` was true and the pull thread has ended: its last words."""
        if self.error is None:
            self._hear_pulls()

    def _run(self) -> None:
        try:
            try:
                while not self._round():
                    pass
            finally:
                self._sockets.close()
        except BaseException as error:  # the owner learns it from `error`
            _log.exception("the control channel has ended")
            self.ended_s = self._clock()
            self.error = error

    def _round(self) -> bool:
        """True after the last one."""
        received = self._sockets.wait(self._pause_s())
        while self._commands:
            self._commands.popleft()(self._source, self._reader, self._clock())
        for message in received:
            self._receive(message)
        self._source.poll(self._clock())
        self._hear_pulls()
        if not self._stopping:
            return False
        self._reader.close()
        over = self._source.close()
        self._hear_pulls()
        return over

    def _pause_s(self) -> float | None:
        due = [time_s for time_s in (self._source.next_s(), self._reader.next_s()) if time_s is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    def _receive(self, message: Received) -> None:
        if isinstance(message, FromReader):
            try:
                said = read_by_source(message.data)
            except MalformedError:
                self._malformed += 1
                return
            crowded = len(self._outbox) >= self._crowd
            self._source.receive(message.route, said, self._clock(), crowded=crowded)
        elif isinstance(message, FromSource):
            self._reader.receive(message.address, message.data, self._clock())
        else:
            self._reader.lost(message.address, message.detail)

    def _hear_pulls(self) -> None:
        """Ends of pulls, and whatever the timers and they have to say to the owner."""
        for event in self._pulls.take():
            self._reader.transferred(event, self._clock())  # read after the bytes were there
        self._reader.poll(self._clock())
        self._outbox.extend(self._source.take())
        self._outbox.extend(self._reader.take())
