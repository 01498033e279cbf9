# SPDX-License-Identifier: Apache-2.0
"""Pulls under a lease. Pure.

- A pull begins only while its lease holds, in a session with the incarnation that gave the lease.
- It is over, as a failure of which nothing may be used, once the lease does not hold any more: checked when its end
  is heard of, by a clock that was read after the bytes were there.
- Where the transfer layer says that the peer is gone or another one before any byte moved, the handshake is made
  again, once, and with the metadata that it brings the pull is tried again, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine_ext.transfer.events import FailReason, JobId, Pulled, PullFailed, PullRequest

from .alarms import Alarms
from .reading import Find, FindState, Peer, Pull, SessionState, Transfers
from .sessions import Alarm, Sessions

_WORTH_ANOTHER_TRY = {
    FailReason.STALE_BOOT,
    FailReason.PEER_GONE,
    FailReason.PEER_RESTARTED,
    FailReason.PEER_SILENT,
    FailReason.UNKNOWN_PEER,
    FailReason.AGENT,
}


class Pulls:
    """Open pulls of all leases. Their ends go to `tell`, named by pull id."""

    def __init__(
        self,
        transfers: Transfers,
        sessions: Sessions,
        alarms: Alarms[Alarm],
        tell: Callable[[Pulled | PullFailed], None],
        ended: Callable[[Find], None],
    ) -> None:
        """`ended` hears of every find whose pull is over."""
        self._transfers = transfers
        self._sessions = sessions
        self._alarms = alarms
        self._tell = tell
        self._ended = ended
        self._pulls: dict[int, Pull] = {}
        self._jobs: dict[JobId, Pull] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    def begin(
        self, pull_id: int, find: Find, pairs: Mapping[bytes, int], deadline_s: float, now_s: float
    ) -> None:
        """Submits it, or lets it wait for a session."""
        if find.state is not FindState.LEASED or find.forgotten or not find.holds(now_s):
            self.refuse(pull_id, FailReason.LEASE)
        elif not pairs or any(key not in find.blocks for key in pairs):
            self.refuse(pull_id, FailReason.BAD_BLOCKS, "not leased")
        elif deadline_s <= now_s:
            self.refuse(pull_id, FailReason.DEADLINE)
        else:
            pull = Pull(pull_id, find, dict(pairs), now_s, deadline_s)
            self._pulls[pull_id] = find.pulls[pull_id] = pull
            self._go(pull, now_s)

    def refuse(self, pull_id: int, reason: FailReason, detail: str = "") -> None:
        """A pull that never was one."""
        self._tell(PullFailed(JobId(pull_id), reason, detail=detail))

    def abort(self, pull_id: int, reason: FailReason) -> None:
        """Unknown and ended ids are ignored."""
        pull = self._pulls.get(pull_id)
        if pull is not None and pull.verdict is None:
            pull.verdict = reason
            if pull.job_id is None:
                self._fail(pull, reason)
            else:
                self._transfers.abort(pull.job_id)

    def abort_all(self, find: Find, reason: FailReason) -> None:
        for pull_id in list(find.pulls):
            self.abort(pull_id, reason)

    def session_open(self, peer: Peer, now_s: float) -> None:
        """Pulls that waited for it begin."""
        for pull in list(peer.waiting.values()):
            self._go(pull, now_s)

    def no_session(self, peer: Peer, detail: str) -> None:
        """Pulls that waited for one fail."""
        for pull in list(peer.waiting.values()):
            self._fail(pull, pull.failure, detail)

    def overdue(self, pull_id: int, now_s: float) -> None:
        """Its alarm rang: it waited for a session until its deadline."""
        pull = self._pulls.get(pull_id)
        if pull is not None and pull.job_id is None:
            if now_s >= pull.deadline_s:
                self._fail(pull, FailReason.DEADLINE)
            else:
                self._alarms.at(pull.deadline_s, ("pull", pull_id))

    def transferred(self, event: Pulled | PullFailed, now_s: float) -> None:
        """What the transfer layer says; `now_s` was read after it said so."""
        pull = self._jobs.pop(event.job_id, None)
        if pull is None:
            return
        pull.job_id = None
        holds = pull.find.holds(now_s)
        if isinstance(event, PullFailed):
            if self._try_again(pull, event, now_s):
                return
            reason = pull.verdict or event.reason
            arrived = event.arrived if holds else ()
            self._fail(pull, reason, event.detail, arrived, event.quarantined)
        elif pull.verdict is not None or not holds:
            self._fail(pull, pull.verdict or FailReason.LEASE)
        else:
            pull.find.pulled += 1
            self._over(pull)
            self._tell(Pulled(JobId(pull.pull_id), event.size_bytes, now_s - pull.began_s))
            self._ended(pull.find)

    def _go(self, pull: Pull, now_s: float) -> None:
        peer = pull.find.peer
        if peer.state is SessionState.OPEN:
            self._submit(pull)
        elif self._sessions.knock(peer, now_s):
            peer.waiting[pull.pull_id] = pull
            self._alarms.at(pull.deadline_s, ("pull", pull.pull_id))
        else:
            self._fail(pull, FailReason.PEER_SILENT)

    def _submit(self, pull: Pull) -> None:
        find = pull.find
        find.peer.waiting.pop(pull.pull_id, None)
        source = [find.blocks[key] for key in pull.pairs]
        request = PullRequest(
            find.peer.address, find.boot_id, source, list(pull.pairs.values()), pull.deadline_s
        )
        pull.job_id = self._transfers.submit(request)
        self._jobs[pull.job_id] = pull

    def _try_again(self, pull: Pull, event: PullFailed, now_s: float) -> bool:
        untouched = not event.arrived and not event.quarantined
        if pull.verdict is not None or pull.tried_again or event.reason not in _WORTH_ANOTHER_TRY:
            return False
        if not untouched or now_s >= pull.deadline_s or not pull.find.holds(now_s):
            return False
        pull.tried_again = True
        pull.failure, pull.detail = event.reason, event.detail
        if pull.find.peer.state is SessionState.OPEN:
            self._sessions.shut(pull.find.peer)
        self._go(pull, now_s)
        return True

    def _fail(
        self,
        pull: Pull,
        reason: FailReason,
        detail: str = "",
        arrived: tuple[int, ...] = (),
        quarantined: tuple[int, ...] = (),
    ) -> None:
        pull.find.failed += 1
        self._over(pull)
        self._tell(PullFailed(JobId(pull.pull_id), reason, arrived, quarantined, detail or pull.detail))
        self._ended(pull.find)

    def _over(self, pull: Pull) -> None:
        del self._pulls[pull.pull_id]
        del pull.find.pulls[pull.pull_id]
        pull.find.peer.waiting.pop(pull.pull_id, None)
        self._alarms.drop(("pull", pull.pull_id))
