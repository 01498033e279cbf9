# SPDX-License-Identifier: Apache-2.0
"""Leases are renewed in time, those of one peer in one message. Pure.

A renewal counts from when it was sent, as a lease counts from when the lookup was: the source counts from later.
"""

from __future__ import annotations

import itertools

from .alarms import Alarms
from .config import ControlConfig
from .reading import Channel, FindState, Peer
from .sessions import Alarm
from .wire import MAX_IDS, Renew, Renewed, encode

_PER_LEASE = 3
_UNANSWERED = 8
"""Renewals whose answers are still of use; older ones are forgotten."""


class Renewals:
    """Costs O(leases of the peer) per renewal."""

    def __init__(self, config: ControlConfig, boot_id: str, channel: Channel, alarms: Alarms[Alarm]) -> None:
        self._config = config
        self._boot_id = boot_id
        self._channel = channel
        self._alarms = alarms
        self._numbers = itertools.count(1)

    def lease_began(self, peer: Peer, asked_s: float, lease_s: float) -> None:
        """The peer's next renewal is no later than this lease needs it."""
        peer.next_renewal_s = min(peer.next_renewal_s, asked_s + lease_s / _PER_LEASE)
        self._alarms.at(peer.next_renewal_s, ("peer", peer.address))

    def send_if_due(self, peer: Peer, now_s: float) -> None:
        """Renews every lease of the peer that still holds."""
        if now_s < peer.next_renewal_s:
            return
        leases = [f for f in peer.finds.values() if f.state is FindState.LEASED and f.holds(now_s)]
        peer.next_renewal_s = float("inf")
        if not leases or peer.boot_id is None:
            peer.renewals.clear()
            return
        number = next(self._numbers)
        peer.renewals[number] = now_s
        while len(peer.renewals) > _UNANSWERED:
            del peer.renewals[next(iter(peer.renewals))]
        ids = tuple(find.find_id for find in leases[:MAX_IDS])
        renew = Renew(boot_id=self._boot_id, to=peer.boot_id, number=number, ids=ids)
        self._channel.send(peer.address, encode(renew))
        self.lease_began(peer, now_s, min(find.lease_s for find in leases))

    def answered(self, peer: Peer, message: Renewed, now_s: float) -> None:
        """A lease that had ended by then stays ended."""
        sent_s = peer.renewals.pop(message.number, None)
        if sent_s is None:
            return
        lease_s = message.lease_ms / 1000
        for find_id in message.ids:
            find = peer.finds.get(find_id)
            if find is not None and find.holds(now_s):
                find.lease_s = lease_s
                find.lease_end_s = max(find.lease_end_s, sent_s + lease_s - self._config.lease_margin_s)
