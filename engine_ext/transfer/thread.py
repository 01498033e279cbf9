# SPDX-License-Identifier: Apache-2.0
"""The pull engine on a thread of its own, for owners that must never wait: an engine's scheduler.

Calls of the owner put a command into a queue or take events out of one. The library is called only by the thread, with
the GIL released during posts and checks, so a copy over shared memory takes none of the owner's time. The thread
sleeps without a timeout while there is nothing under way.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from .agent import PeerOffer
from .engine import PullEngine
from .errors import TransferThreadError
from .events import Counts, Event, FailReason, JobId, PullFailed, PullRequest
from .mailbox import Mailbox

_Command = Callable[[PullEngine], object]


class PullThread:
    """The owner's side. Its methods are for one thread and do not block, but for `close`."""

    def __init__(
        self,
        engine: PullEngine,
        name: str = "pointsman-pull",
        notify: Callable[[], None] | None = None,
    ) -> None:
        """Takes the engine over and starts; nobody else may use it from here on.

        `notify` is called on the thread whenever `take` has something new; it must not block or raise.
        """
        self._engine = engine
        self._notify = notify or _nobody
        self._mailbox = Mailbox()
        self._ids = itertools.count(1)
        self._commands: deque[_Command] = deque()
        self._outbox: deque[Event] = deque()
        self._early: list[Event] = []
        self._wake = threading.Event()
        self._counts = engine.counts()
        self._error: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def connect(self, address: str, offer: PeerOffer) -> None:
        """As Machine.connect."""
        self._tell(lambda engine: engine.connect(address, offer))

    def forget(self, address: str) -> None:
        """As Machine.forget."""
        self._tell(lambda engine: engine.forget(address))

    def submit(self, request: PullRequest) -> JobId:
        """As PullEngine.submit."""
        job_id = JobId(next(self._ids))
        if self._stopping:
            self._early.append(PullFailed(job_id, FailReason.CLOSED))
            return job_id
        self._mailbox.opened(job_id, request.destination, request.deadline_s)
        self._tell(lambda engine: engine.submit(request, job_id))
        return job_id

    def abort(self, job_id: JobId) -> None:
        """The pull fails at the next `take`, its blocks in quarantine until their Released."""
        self._early.extend(self._mailbox.aborted(job_id))
        self._tell(lambda engine: engine.abort(job_id))

    def take(self) -> list[Event]:
        """What ended since the last call; a pull past its deadline fails here whatever the thread is doing.

        Raises:
            TransferThreadError: the thread has ended by an error; blocks that are not released never will be.
        """
        told, self._early = self._early, []
        said = [self._outbox.popleft() for _ in range(len(self._outbox))]
        told.extend(self._mailbox.take(said, self._engine.now_s()))
        if self._error is not None and not told:
            raise TransferThreadError("the transfer thread has ended") from self._error
        return told

    def counts(self) -> Counts:
        """As of the thread's last round."""
        return self._counts

    def close(self, timeout_s: float) -> bool:
        """Ends the engine as Machine.close and the thread with it. True once no block can be written any more.

        Waits up to `timeout_s`. The last events come from `take`.
        """
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._error is None

    def _tell(self, command: _Command) -> None:
        self._commands.append(command)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
                self._wake.wait(self._engine.next_poll_s())
            self._finish()
        except BaseException as error:  # handed to the owner by `take`
            self._error = error
            self._notify()

    def _round(self) -> None:
        self._wake.clear()  # before the commands are read: one that comes later wakes the next round
        while self._commands:
            self._commands.popleft()(self._engine)
        self._tell_owner(self._engine.poll())

    def _finish(self) -> None:
        while True:
            closed, events = self._engine.close()
            self._tell_owner(events)
            if closed:
                return
            self._wake.clear()
            self._wake.wait(1.0)

    def _tell_owner(self, events: list[Event]) -> None:
        self._outbox.extend(events)
        self._counts = self._engine.counts()
        if events:
            self._notify()


def _nobody() -> None:
    """Nobody waits."""
