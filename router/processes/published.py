# SPDX-License-Identifier: Apache-2.0
"""States by key, and who has yet to hear which of them. No I/O.

A follower that reads slowly gets the last state of each key once, never a queue of old ones; so memory is
O(keys x followers) whatever the pace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from router.processes.told import Entry, Key

_encode = msgspec.msgpack.Encoder().encode


class Audience:
    """One follower: the keys that it has yet to hear of, those that have waited longest first."""

    def __init__(self, published: Published, wake: Callable[[], None]) -> None:
        self._published = published
        self._wake = wake
        self._due = dict.fromkeys(published.keys())
        self._is_first = True

    def changed(self, keys: Iterable[Key]) -> None:
        """Hear of these again."""
        self._due.update(dict.fromkeys(keys))
        self._wake()

    @property
    def is_due(self) -> bool:
        """Whether there is anything to tell; the first time there always is."""
        return self._is_first or bool(self._due)

    def take(self) -> tuple[bool, list[Entry]]:
        """(whether it is all there is, the states that are due)."""
        due, self._due = self._due, {}
        first, self._is_first = self._is_first, False
        return first, [Entry(key, self._published.get(key)) for key in due]


class Published:
    """The states. One event loop owns it."""

    def __init__(self) -> None:
        self._states: dict[Key, bytes] = {}
        self._audiences: list[Audience] = []

    def keys(self) -> Iterable[Key]:
        return self._states.keys()

    def get(self, key: Key) -> bytes | None:
        return self._states.get(key)

    def tell(self, changes: Iterable[tuple[Key, object | None]]) -> None:
        """New states; None where there is none any more. Encoded once for all followers."""
        keys = []
        for key, value in changes:
            if value is not None:
                self._states[key] = _encode(value)
            elif self._states.pop(key, None) is None:
                continue
            keys.append(key)
        if keys:
            for audience in self._audiences:
                audience.changed(keys)

    def follow(self, wake: Callable[[], None]) -> Audience:
        """Begin to tell somebody; ``wake`` is called when something is due."""
        audience = Audience(self, wake)
        self._audiences.append(audience)
        return audience

    def leave(self, audience: Audience) -> None:
        """It is gone."""
        self._audiences.remove(audience)
