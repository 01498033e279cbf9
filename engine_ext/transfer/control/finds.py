# SPDX-License-Identifier: Apache-2.0
"""Lookups: asked, answered or not, given back. Pure.

Each ends once, with Found or NotFound, unless it is forgotten before. One that leased something stays until the lease
is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .alarms import Alarms
from .config import ControlConfig
from .peer import Found, NotFound, NotFoundReason
from .reading import Channel, Find, FindState, Peer, SessionState
from .sessions import Alarm
from .wire import MAX_KEY_BYTES, Answer, Ask, Release, encode

_MAX_TENANT_CHARS = 256
_MAX_WITHIN_S = 3600.0
ENDED = float("-inf")
"""The end of a lease of which nothing may be used any more."""


class Finds:
    """Costs O(keys) per lookup."""

    def __init__(
        self,
        config: ControlConfig,
        boot_id: str,
        channel: Channel,
        alarms: Alarms[Alarm],
        tell: Callable[[Found | NotFound], None],
    ) -> None:
        self._config = config
        self._boot_id = boot_id
        self._channel = channel
        self._alarms = alarms
        self._tell = tell
        self._finds: dict[int, Find] = {}
        self._silenced = False

    def __len__(self) -> int:
        return len(self._finds)

    def get(self, find_id: int) -> Find | None:
        return self._finds.get(find_id)

    def all(self) -> list[Find]:
        return list(self._finds.values())

    def silence(self) -> None:
        """Gives nothing back any more: everybody is told good-bye."""
        self._silenced = True

    def refusal(
        self, keys: Sequence[bytes], tenant: str, deadline_s: float, now_s: float
    ) -> tuple[NotFoundReason, str] | None:
        """Why such a lookup cannot be asked."""
        if len(self._finds) >= self._config.max_finds:
            return NotFoundReason.TOO_MANY, "lookups"
        if len(keys) > self._config.max_keys:
            return NotFoundReason.TOO_MANY, f"{len(keys)} keys, at most {self._config.max_keys}"
        if len(tenant) > _MAX_TENANT_CHARS or any(len(key) > MAX_KEY_BYTES for key in keys):
            return NotFoundReason.MALFORMED, "a key or the tenant is too long"
        return (NotFoundReason.DEADLINE, "") if deadline_s <= now_s else None

    def add(self, find: Find) -> None:
        """One that waits for a session."""
        self._finds[find.find_id] = find.peer.finds[find.find_id] = find
        self._alarms.at(find.deadline_s, ("find", find.find_id))

    def ask(self, find: Find, now_s: float) -> None:
        """In the session that its peer has."""
        find.state, find.asked_s = FindState.ASKED, now_s
        find.boot_id = find.peer.boot_id or ""
        within_s = min(max(0.0, find.deadline_s - now_s), _MAX_WITHIN_S)
        ask = Ask(
            boot_id=self._boot_id,
            to=find.boot_id,
            id=find.find_id,
            tenant=find.tenant,
            keys=find.keys,
            within_ms=int(within_s * 1000) + 1,
        )
        self._channel.send(find.peer.address, encode(ask))

    def answered(self, peer: Peer, message: Answer, now_s: float) -> Find | None:
        """The lookup that has a lease now, if this answer gives one."""
        find = peer.finds.get(message.id)
        if find is None or find.state is not FindState.ASKED or peer.offer is None:
            return None
        leased = [(key, block) for key, block in zip(find.keys, message.blocks, strict=False) if block >= 0]
        if len(message.blocks) != len(find.keys) or not peer.offer.region.holds([b for _, b in leased]):
            self.not_found(find, NotFoundReason.MALFORMED, "an answer that does not fit the question")
            return None
        if not leased:
            self._drop(find)
            self._tell(Found(find.find_id, frozenset(), now_s - find.began_s))
            return None
        find.lease_s = message.lease_ms / 1000
        find.lease_end_s = find.asked_s + find.lease_s - self._config.lease_margin_s
        if not find.holds(now_s):
            self.not_found(find, NotFoundReason.DEADLINE, "the answer took longer than its lease")
            return None
        find.state, find.blocks = FindState.LEASED, dict(leased)
        self._alarms.at(find.lease_end_s, ("find", find.find_id))
        self._tell(Found(find.find_id, frozenset(find.blocks), now_s - find.began_s))
        return find

    def not_found(self, find: Find, reason: NotFoundReason, detail: str = "") -> None:
        """Ends one that has no lease."""
        if find.state is FindState.ASKED and find.peer.state is SessionState.OPEN:
            self._release(find)
        self._drop(find)
        self._tell(NotFound(find.find_id, reason, detail))

    def overdue(self, find: Find, now_s: float) -> bool:
        """Its alarm rang. True for a lease that has ended; a lookup past its deadline is ended here."""
        if find.state is FindState.LEASED:
            if not find.holds(now_s):
                return True
            self._alarms.at(find.lease_end_s, ("find", find.find_id))
        elif now_s < find.deadline_s:
            self._alarms.at(find.deadline_s, ("find", find.find_id))
        else:
            self.not_found(find, NotFoundReason.DEADLINE)
        return False

    def settle(self, find: Find) -> None:
        """Gives back what nobody will use any more, once its last pull is over."""
        lost = find.state is FindState.LEASED and find.lease_end_s == ENDED
        if (find.forgotten or lost) and not find.pulls and find.find_id in self._finds:
            if find.state is not FindState.QUEUED:
                self._release(find)
            self._drop(find)

    def _release(self, find: Find) -> None:
        if self._silenced or find.peer.boot_id != find.boot_id:
            return
        read = find.pulled > 0 and not find.failed
        release = Release(boot_id=self._boot_id, to=find.boot_id, id=find.find_id, read=read)
        self._channel.send(find.peer.address, encode(release))

    def _drop(self, find: Find) -> None:
        del self._finds[find.find_id]
        del find.peer.finds[find.find_id]
        self._alarms.drop(("find", find.find_id))
