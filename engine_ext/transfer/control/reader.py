# SPDX-License-Identifier: Apache-2.0
"""The reader's side of the control channel: lookups behind a handshake, leases and their renewal. Pure.

Invariants:
- a find ends once, with Found or NotFound, no later than the first `poll` at or after its deadline;
- a lease is renewed until it is forgotten and its last pull is over, and given back then;
- another boot id than the one that was asked, in any message, ends everything that was asked of the former one, and
  the next find knocks anew;
- a message that is not understood, or that nobody waits for, changes nothing.

Costs: O(keys) per lookup, O(leases of the peer) per renewal, O(log finds) per timer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine_ext.transfer.errors import HandshakeRefusedError, RefusalReason
from engine_ext.transfer.events import Event, FailReason, PeerLost, Pulled, PullFailed, Released
from engine_ext.transfer.handshake import Handshake

from .alarms import Alarms
from .config import ControlConfig
from .finds import ENDED, Finds
from .peer import Found, NotFound, NotFoundReason
from .pulls import Pulls
from .reading import Channel, Find, FindState, Peer, SessionState, Transfers
from .renewals import Renewals
from .sessions import Alarm, Sessions
from .wire import Admit, Answer, MalformedError, Problem, ProblemKind, read_by_reader

ReaderEvent = Found | NotFound | Pulled | PullFailed | Released
"""Those of the transfer layer are named by pull id."""


class Reader:
    """See the module's page. Not thread-safe; every call takes the time."""

    def __init__(
        self, config: ControlConfig, handshake: Handshake, channel: Channel, transfers: Transfers
    ) -> None:
        self._config = config
        boot_id = handshake.offer.boot_id
        self._alarms: Alarms[Alarm] = Alarms()
        self._events: list[ReaderEvent] = []
        self._sessions = Sessions(config, handshake, channel, transfers, self._alarms)
        self._finds = Finds(config, boot_id, channel, self._alarms, self._events.append)
        self._renewals = Renewals(config, boot_id, channel, self._alarms)
        self._pulls = Pulls(transfers, self._sessions, self._alarms, self._events.append, self._finds.settle)
        self._closed = False
        self.malformed = 0
        """Messages that were dropped."""

    # What the owner wants

    def find(
        self, find_id: int, address: str, keys: Sequence[bytes], tenant: str, deadline_s: float, now_s: float
    ) -> None:
        """As PeerLink.find."""
        refused = self._finds.refusal(keys, tenant, deadline_s, now_s)
        if self._closed:
            refused = (NotFoundReason.CLOSED, "")
        if refused is not None:
            self._events.append(NotFound(find_id, *refused))
            return
        if not keys:
            self._events.append(Found(find_id, frozenset(), 0.0))
            return
        peer = self._sessions.use(address, now_s)
        if peer is None:
            self._events.append(NotFound(find_id, NotFoundReason.TOO_MANY, "own: peers in use"))
            return
        find = Find(find_id, peer, tuple(dict.fromkeys(keys)), tenant, now_s, deadline_s)
        self._finds.add(find)
        self._ask_or_knock(find, now_s)

    def forget(self, find_id: int) -> None:
        """As PeerLink.forget."""
        find = self._finds.get(find_id)
        if find is not None:
            find.forgotten = True
            self._finds.settle(find)

    def pull(
        self, pull_id: int, find_id: int, pairs: Mapping[bytes, int], deadline_s: float, now_s: float
    ) -> None:
        """As PeerLink.pull."""
        find = self._finds.get(find_id)
        if self._closed:
            self._pulls.refuse(pull_id, FailReason.CLOSED)
        elif find is None:
            self._pulls.refuse(pull_id, FailReason.LEASE)
        else:
            find.peer.used_s = now_s
            self._pulls.begin(pull_id, find, pairs, deadline_s, now_s)

    def abort(self, pull_id: int) -> None:
        """As PeerLink.abort."""
        self._pulls.abort(pull_id, FailReason.ABORTED)

    def close(self) -> None:
        """Ends every find and aborts every pull, whose ends `transferred` will bring; takes no more."""
        self._closed = True
        self._finds.silence()
        for find in self._finds.all():
            self._pulls.abort_all(find, FailReason.CLOSED)
            if find.state is not FindState.LEASED:
                self._finds.not_found(find, NotFoundReason.CLOSED)
        for peer in self._sessions.all():
            self._sessions.forget(peer)

    # What happens

    def receive(self, address: str, data: bytes, now_s: float) -> None:
        """What the peer at this address said."""
        peer = self._sessions.known(address)
        if peer is None:
            return
        try:
            message = read_by_reader(data)
        except MalformedError:
            self.malformed += 1
            return
        peer.heard_s = now_s
        if isinstance(message, Admit):
            self._admitted(peer, message, now_s)
            return
        if peer.boot_id is not None and message.boot_id != peer.boot_id:
            self._restarted(peer)
        if isinstance(message, Problem):
            self._problem(peer, message, now_s)
        elif message.boot_id == peer.boot_id:
            if isinstance(message, Answer):
                self._answered(peer, message, now_s)
            else:
                self._renewals.answered(peer, message, now_s)

    def lost(self, address: str, detail: str) -> None:
        """The connection was refused or has ended."""
        peer = self._sessions.known(address)
        if peer is not None:
            self._unreachable(peer, detail)

    def transferred(self, event: Event, now_s: float) -> None:
        """What the transfer layer says; `now_s` was read after it said so."""
        if isinstance(event, Pulled | PullFailed):
            self._pulls.transferred(event, now_s)
        elif isinstance(event, Released):
            self._events.append(event)
        else:
            self._peer_lost(event)

    def poll(self, now_s: float) -> None:
        """Moves every timer to `now_s`."""
        for kind, name in self._alarms.ring(now_s):
            if kind == "find":
                self._look_at_find(self._finds.get(int(name)), now_s)
            elif kind == "pull":
                self._pulls.overdue(int(name), now_s)
            else:
                self._look_at_peer(self._sessions.known(str(name)), now_s)

    def next_s(self) -> float | None:
        """When `poll` is next of use."""
        return self._alarms.next_s()

    def take(self) -> list[ReaderEvent]:
        """What the owner is to hear, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    @property
    def peers(self) -> int:
        return len(self._sessions)

    @property
    def finds(self) -> int:
        return len(self._finds)

    @property
    def pulls(self) -> int:
        return len(self._pulls)

    # Messages

    def _admitted(self, peer: Peer, message: Admit, now_s: float) -> None:
        if peer.state is not SessionState.KNOCKING:
            return
        try:
            former = self._sessions.admit(peer, message)
        except HandshakeRefusedError as refused:
            malformed = refused.reason is RefusalReason.MALFORMED and not refused.by_peer
            reason = NotFoundReason.MALFORMED if malformed else NotFoundReason.REFUSED
            self._unanswered(peer, reason, str(refused))
            return
        if former:
            self._end_of(peer, former)
        for find in list(peer.finds.values()):
            if find.state is FindState.QUEUED:
                self._finds.ask(find, now_s)
        self._pulls.session_open(peer, now_s)

    def _answered(self, peer: Peer, message: Answer, now_s: float) -> None:
        find = self._finds.answered(peer, message, now_s)
        if find is not None:
            self._renewals.lease_began(peer, find.asked_s, find.lease_s)

    def _problem(self, peer: Peer, message: Problem, now_s: float) -> None:
        if message.id is None:
            if message.kind is ProblemKind.CLOSING:
                self._gone(peer)
            elif message.kind is ProblemKind.TOO_MANY and peer.state is SessionState.KNOCKING:
                self._sessions.shut(peer)
                self._unanswered(peer, NotFoundReason.TOO_MANY, "peer: it serves as many readers as it can")
            return
        find = peer.finds.get(message.id)
        if find is None or find.state is not FindState.ASKED or message.boot_id != find.boot_id:
            return
        if message.kind is ProblemKind.STRANGER and not find.asked_again:
            find.asked_again, find.state = True, FindState.QUEUED
            if peer.state is SessionState.OPEN:
                self._sessions.shut(peer)
            self._ask_or_knock(find, now_s)
        elif message.kind is ProblemKind.TOO_MANY:
            self._finds.not_found(find, NotFoundReason.TOO_MANY, "peer: it has as many lookups as it can")
        else:
            self._finds.not_found(find, NotFoundReason.UNREACHABLE, message.kind.value)

    # Finds and their leases

    def _ask_or_knock(self, find: Find, now_s: float) -> None:
        if find.peer.state is SessionState.OPEN:
            self._finds.ask(find, now_s)
        elif not self._sessions.knock(find.peer, now_s):
            self._finds.not_found(find, NotFoundReason.UNREACHABLE, "no_answer: not a moment ago either")

    def _look_at_find(self, find: Find | None, now_s: float) -> None:
        if find is None:
            return
        asked = find.state is FindState.ASKED
        if self._finds.overdue(find, now_s):
            self._lose(find, FailReason.LEASE)
        elif asked and now_s >= find.deadline_s and find.peer.heard_s < find.asked_s:
            self._sessions.doubt(find.peer)

    def _lose(self, find: Find, reason: FailReason) -> None:
        """Its lease does not hold any more: nothing that comes of it may be used."""
        find.lease_end_s = ENDED
        self._pulls.abort_all(find, reason)
        self._finds.settle(find)

    # Peers

    def _look_at_peer(self, peer: Peer | None, now_s: float) -> None:
        if peer is None:
            return
        if peer.state is SessionState.KNOCKING and now_s >= peer.knock_until_s:
            self._sessions.silent(peer, now_s)
            self._unanswered(peer, NotFoundReason.UNREACHABLE, "no_answer: to the handshake")
        self._renewals.send_if_due(peer, now_s)
        if self._sessions.idle(peer, now_s):
            return
        due = [peer.next_renewal_s, max(peer.used_s + self._config.idle_s, now_s + 1)]
        if peer.state is SessionState.KNOCKING:
            due.append(peer.knock_until_s)
        self._alarms.at(min(due), ("peer", peer.address))

    def _unanswered(self, peer: Peer, reason: NotFoundReason, detail: str) -> None:
        """Whatever waits for this peer's word waits in vain."""
        for find in list(peer.finds.values()):
            if find.state is not FindState.LEASED:
                self._finds.not_found(find, reason, detail)
        self._pulls.no_session(peer, detail)

    def _unreachable(self, peer: Peer, detail: str) -> None:
        self._sessions.hang_up(peer)
        self._unanswered(peer, NotFoundReason.UNREACHABLE, detail)

    def _gone(self, peer: Peer) -> None:
        """It says that it ends."""
        for find in list(peer.finds.values()):
            if find.state is FindState.LEASED:
                self._lose(find, FailReason.PEER_GONE)
        self._unanswered(peer, NotFoundReason.UNREACHABLE, "closing: it said so")
        self._sessions.shut(peer)

    def _restarted(self, peer: Peer) -> None:
        """Somebody else answers at its address."""
        former = peer.boot_id
        peer.offer = None
        if peer.state is SessionState.OPEN:
            self._sessions.hang_up(peer)
        if former is not None:
            self._end_of(peer, former)

    def _end_of(self, peer: Peer, boot_id: str) -> None:
        """Ends what was asked of a former incarnation."""
        peer.renewals.clear()
        for find in list(peer.finds.values()):
            if find.boot_id != boot_id:
                continue
            if find.state is FindState.LEASED:
                self._lose(find, FailReason.PEER_RESTARTED)
            elif find.state is FindState.ASKED:
                self._finds.not_found(find, NotFoundReason.PEER_RESTARTED)

    def _peer_lost(self, event: PeerLost) -> None:
        peer = self._sessions.known(event.address)
        if peer is None or peer.state is not SessionState.OPEN or peer.boot_id != event.boot_id:
            return
        if event.reason is not FailReason.PEER_RESTARTED:  # that one our own handshake brought about
            self._sessions.shut(peer)
