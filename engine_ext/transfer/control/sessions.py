# SPDX-License-Identifier: Apache-2.0
"""Sessions with sources, one per address: knocking, admission, and forgetting. Pure."""

from __future__ import annotations

from engine_ext.transfer.errors import HandshakeRefusedError, RefusalReason
from engine_ext.transfer.handshake import Handshake

from .alarms import Alarms
from .config import ControlConfig
from .reading import Channel, Peer, SessionState, Transfers
from .wire import Admit, Bye, Knock, encode

Alarm = tuple[str, int | str]
"""What to look at: ("peer", address), ("find", id) or ("pull", id)."""


class Sessions:
    """Addresses that were used lately, at most `max_peers`; the one used last at the end."""

    def __init__(
        self,
        config: ControlConfig,
        handshake: Handshake,
        channel: Channel,
        transfers: Transfers,
        alarms: Alarms[Alarm],
    ) -> None:
        self._config = config
        self._handshake = handshake
        self._channel = channel
        self._transfers = transfers
        self._alarms = alarms
        self._peers: dict[str, Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def known(self, address: str) -> Peer | None:
        return self._peers.get(address)

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def use(self, address: str, now_s: float) -> Peer | None:
        """The peer at this address, made if it has to be; None: there are too many that are in use."""
        peer = self._peers.pop(address, None)
        if peer is None:
            if len(self._peers) >= self._config.max_peers and not self._evict():
                return None
            peer = Peer(address, now_s)
        self._peers[address] = peer
        peer.used_s = now_s
        self._alarms.at(now_s + self._config.idle_s, ("peer", address))
        return peer

    def knock(self, peer: Peer, now_s: float) -> bool:
        """Begins a handshake unless there is a session or one is on its way; False: not so soon."""
        if peer.state is not SessionState.SHUT:
            return True
        if now_s < peer.silent_until_s:
            return False
        peer.state = SessionState.KNOCKING
        peer.knock_until_s = now_s + self._config.handshake_timeout_s
        self._alarms.at(peer.knock_until_s, ("peer", peer.address))
        hello = self._handshake.hello()
        self._channel.send(peer.address, encode(Knock(boot_id=self._handshake.offer.boot_id, hello=hello)))
        return True

    def admit(self, peer: Peer, message: Admit) -> str:
        """Opens the session that the answer to our knock allows; the boot id of the peer's former incarnation.

        Empty where there was none, or it is the same. The caller ends what was that incarnation's.

        Raises:
            HandshakeRefusedError: it allows none; the session is shut.
        """
        peer.state = SessionState.SHUT
        offer = self._handshake.conclude(message.answer)
        if offer.boot_id != message.boot_id:
            raise HandshakeRefusedError(RefusalReason.MALFORMED, "two boot ids in one answer")
        former = peer.boot_id
        peer.offer, peer.state = offer, SessionState.OPEN
        peer.silent_until_s = float("-inf")
        self._transfers.connect(peer.address, offer)
        return former if former is not None and former != offer.boot_id else ""

    def doubt(self, peer: Peer) -> None:
        """It did not say a word for long: whoever uses it next makes sure first that it answers."""
        if peer.state is SessionState.OPEN:
            self.shut(peer)

    def shut(self, peer: Peer) -> None:
        """The next use knocks again, over the same connection."""
        peer.state = SessionState.SHUT

    def hang_up(self, peer: Peer) -> None:
        """The next use connects anew and knocks."""
        peer.state = SessionState.SHUT
        self._channel.hang_up(peer.address)

    def silent(self, peer: Peer, now_s: float) -> None:
        """It did not answer a knock in time."""
        peer.silent_until_s = now_s + self._config.retry_s
        self.hang_up(peer)

    def idle(self, peer: Peer, now_s: float) -> bool:
        """Forgets a peer that was not used for long; whether it did."""
        if peer.finds or peer.state is SessionState.KNOCKING:
            return False
        if now_s < peer.used_s + self._config.idle_s:
            return False
        self.forget(peer)
        return True

    def forget(self, peer: Peer) -> None:
        """Says good-bye where there is a session or a lease, and drops everything about the peer."""
        polite = peer.boot_id is not None and (peer.state is SessionState.OPEN or bool(peer.finds))
        if polite:
            bye = Bye(boot_id=self._handshake.offer.boot_id, to=peer.boot_id or "")
            self._channel.send(peer.address, encode(bye))
        self._transfers.forget(peer.address)
        peer.state = SessionState.SHUT
        self._channel.hang_up(peer.address, flush=polite)
        del self._peers[peer.address]
        self._alarms.drop(("peer", peer.address))

    def _evict(self) -> bool:
        idle = next(
            (
                peer
                for peer in self._peers.values()
                if not peer.finds and peer.state is not SessionState.KNOCKING
            ),
            None,
        )
        if idle is not None:
            self.forget(idle)
        return idle is not None
