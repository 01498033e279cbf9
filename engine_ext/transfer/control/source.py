# SPDX-License-Identifier: Apache-2.0
"""The source's side of the control channel: who was admitted, what was asked, what is leased. Pure.

Lookup:  ASKED (waits for the owner's reply) -> LEASED -> over, or ASKED -> over

Invariants:
- the owner hears LeaseEnded exactly once for every Asked, however it ends;
- a lease ends no earlier than this side's clock says it does, or when its reader said that it reads no more. Closing
  does not shorten one: a reader that reads one-sidedly would notice nothing;
- nothing is answered to a reader that no handshake admitted, nor under another boot id than ours.

Costs: O(keys) per lookup, O(log lookups) per timer, memory bounded by the limits of the configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine_ext.transfer.errors import RefusalReason
from engine_ext.transfer.handshake import Handshake

from .alarms import Alarms
from .config import ControlConfig
from .peer import Asked, LeaseEnded
from .wire import (
    Admit,
    Answer,
    Ask,
    Knock,
    Problem,
    ProblemKind,
    Release,
    Renew,
    Renewed,
    ToReader,
    ToSource,
    encode,
)

Send = Callable[[bytes, bytes], None]
"""Route (a ROUTER's identity frame) and message; drops what cannot be sent."""


@dataclass(slots=True, eq=False)
class _Reader:
    boot_id: str
    route: bytes
    lookups: dict[int, _Lookup] = field(default_factory=dict)
    """By the reader's own id."""


@dataclass(slots=True, eq=False)
class _Lookup:
    lookup_id: int
    reader: _Reader
    ask_id: int
    keys: tuple[bytes, ...]
    until_s: float
    """ASKED: when the reader stops waiting. LEASED: the lease's end."""
    longest_s: float = 0.0
    leased: bool = False


class Source:
    """See the module's page. Not thread-safe; every call takes the time."""

    def __init__(self, config: ControlConfig, handshake: Handshake, send: Send) -> None:
        self._config = config
        self._handshake = handshake
        self._boot_id = handshake.offer.boot_id
        self._send = send
        self._ids = itertools.count(1)
        self._readers: dict[str, _Reader] = {}
        """By boot id, the one that was heard of last at the end."""
        self._lookups: dict[int, _Lookup] = {}
        self._alarms: Alarms[int] = Alarms()
        self._events: list[Asked | LeaseEnded] = []
        self._closing = False
        self.refused: dict[RefusalReason, int] = {}
        """Handshakes that were refused, since the beginning."""

    def receive(self, route: bytes, message: ToSource, now_s: float, *, crowded: bool = False) -> None:
        """What a reader said. `crowded`: the owner has not taken what it was asked before."""
        self.poll(now_s)  # what has run out by now is not renewed
        if isinstance(message, Knock):
            self._knock(route, message)
            return
        reader = self._readers.get(message.boot_id)
        ask_id = message.id if isinstance(message, Ask) else None
        if message.to != self._boot_id:
            self._problem(route, ProblemKind.STALE_BOOT, ask_id)
        elif reader is None:
            self._problem(route, ProblemKind.STRANGER, ask_id)
        else:
            self._heard(reader, route)
            if isinstance(message, Ask):
                self._ask(reader, message, now_s, crowded)
            elif isinstance(message, Renew):
                self._renew(reader, message, now_s)
            elif isinstance(message, Release):
                self._release(reader, message)
            else:
                self._bye(reader)

    def reply(self, lookup_id: int, found: Mapping[bytes, int], now_s: float) -> None:
        """The owner's answer. Ignored for a lookup that is over: LeaseEnded was said."""
        self.poll(now_s)
        lookup = self._lookups.get(lookup_id)
        if lookup is None or lookup.leased:
            return
        blocks = tuple(found.get(key, -1) for key in lookup.keys)
        leased = any(block >= 0 for block in blocks)
        lookup.leased = True
        lookup.until_s = now_s + self._config.lease_s
        lookup.longest_s = now_s + self._config.longest_lease_s
        lookup.keys = ()
        self._say(
            lookup.reader.route,
            Answer(
                boot_id=self._boot_id,
                id=lookup.ask_id,
                blocks=blocks,
                lease_ms=int(self._config.lease_s * 1000) if leased else 0,
            ),
        )
        if leased:
            self._alarms.drop(lookup_id)
            self._alarms.at(lookup.until_s, lookup_id)
        else:
            self._end(lookup, read=False)

    def poll(self, now_s: float) -> None:
        """Ends what has run out."""
        for lookup_id in self._alarms.ring(now_s):
            lookup = self._lookups[lookup_id]
            if lookup.until_s > now_s:
                self._alarms.at(lookup.until_s, lookup_id)
            else:
                self._end(lookup, read=False)

    def next_s(self) -> float | None:
        """When `poll` is next of use."""
        return self._alarms.next_s()

    def take(self) -> list[Asked | LeaseEnded]:
        """What the owner is to hear, in order."""
        events, self._events = self._events, []
        return events

    def close(self) -> bool:
        """Admits and answers nothing more and asks readers to let go; True once no lease is left."""
        if not self._closing:
            self._closing = True
            for lookup in list(self._lookups.values()):
                if not lookup.leased:
                    self._problem(lookup.reader.route, ProblemKind.CLOSING, lookup.ask_id)
                    self._end(lookup, read=False)
            for reader in self._readers.values():
                self._problem(reader.route, ProblemKind.CLOSING, None)
        return not self._lookups

    @property
    def readers(self) -> int:
        return len(self._readers)

    @property
    def lookups(self) -> int:
        """Waiting and leased."""
        return len(self._lookups)

    # What readers say

    def _knock(self, route: bytes, message: Knock) -> None:
        if self._closing:
            self._problem(route, ProblemKind.CLOSING, None)
            return
        reader = self._readers.get(message.boot_id)
        if reader is None and not self._room():
            self._problem(route, ProblemKind.TOO_MANY, None)
            return
        answer, refused = self._handshake.answer(message.hello)
        self._say(route, Admit(boot_id=self._boot_id, answer=answer))
        if refused is not None:
            self.refused[refused.reason] = self.refused.get(refused.reason, 0) + 1
            return
        if reader is None:
            reader = self._readers[message.boot_id] = _Reader(message.boot_id, route)
        self._heard(reader, route)

    def _room(self) -> bool:
        """Whether one more reader can be admitted, after the longest unheard one without a lookup was forgotten."""
        if len(self._readers) < self._config.max_peers:
            return True
        idle = next((reader for reader in self._readers.values() if not reader.lookups), None)
        if idle is not None:
            del self._readers[idle.boot_id]
        return idle is not None

    def _ask(self, reader: _Reader, message: Ask, now_s: float, crowded: bool) -> None:
        if message.id in reader.lookups:
            return  # said twice
        if self._closing:
            self._problem(reader.route, ProblemKind.CLOSING, message.id)
            return
        full = len(self._lookups) >= self._config.max_lookups or crowded
        if (
            full
            or len(reader.lookups) >= self._config.max_lookups_per_reader
            or len(message.keys) > self._config.max_keys
        ):
            self._problem(reader.route, ProblemKind.TOO_MANY, message.id)
            return
        lookup = _Lookup(next(self._ids), reader, message.id, message.keys, now_s + message.within_ms / 1000)
        self._lookups[lookup.lookup_id] = reader.lookups[message.id] = lookup
        self._alarms.at(lookup.until_s, lookup.lookup_id)
        self._events.append(Asked(lookup.lookup_id, message.keys, message.tenant))

    def _renew(self, reader: _Reader, message: Renew, now_s: float) -> None:
        renewed = []
        until_s = now_s + self._config.lease_s
        for ask_id in message.ids:
            lookup = reader.lookups.get(ask_id)
            if lookup is not None and lookup.leased and not self._closing and until_s <= lookup.longest_s:
                lookup.until_s = until_s
                renewed.append(ask_id)
        self._say(
            reader.route,
            Renewed(
                boot_id=self._boot_id,
                number=message.number,
                ids=tuple(renewed),
                lease_ms=int(self._config.lease_s * 1000),
            ),
        )

    def _release(self, reader: _Reader, message: Release) -> None:
        lookup = reader.lookups.get(message.id)
        if lookup is not None:
            self._end(lookup, read=message.read)

    def _bye(self, reader: _Reader) -> None:
        for lookup in list(reader.lookups.values()):
            self._end(lookup, read=False)
        del self._readers[reader.boot_id]

    # Bookkeeping

    def _heard(self, reader: _Reader, route: bytes) -> None:
        reader.route = route
        self._readers[reader.boot_id] = self._readers.pop(reader.boot_id)

    def _end(self, lookup: _Lookup, *, read: bool) -> None:
        del self._lookups[lookup.lookup_id]
        del lookup.reader.lookups[lookup.ask_id]
        self._alarms.drop(lookup.lookup_id)
        self._events.append(LeaseEnded(lookup.lookup_id, read))

    def _problem(self, route: bytes, kind: ProblemKind, ask_id: int | None) -> None:
        self._say(route, Problem(boot_id=self._boot_id, kind=kind, id=ask_id))

    def _say(self, route: bytes, message: ToReader) -> None:
        self._send(route, encode(message))
