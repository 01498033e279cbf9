# SPDX-License-Identifier: Apache-2.0
"""What is known of chunks, and of the requests that read them last."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

S = TypeVar("S")
"""What the tier keeps of a chunk that it holds."""

Place = tuple[tuple[int, int], tuple[float, float, int]]
"""A cell of the order, and the place within it."""


class Chunk(Generic[S]):
    """A chunk that is held, or a ghost: one that is remembered."""

    __slots__ = ("children", "end_token", "evictable", "evicted", "forks", "key", "parent", "status", "visit")

    def __init__(self, key: Hashable, end_token: int, parent: Chunk[S] | None, visit: Visit[S]) -> None:
        self.key = key
        self.end_token = end_token
        """Where it ends in its prompt."""
        self.parent = parent
        """The chunk before it, without which it is of no use."""
        self.visit = visit
        self.children = 0
        """Held chunks right behind it."""
        self.forks = 0
        self.status: S | None = None
        self.evictable = False
        self.evicted = False
        """Whether it was held once and given up."""


class Request(Generic[S]):
    """One request's way along one chain of chunks."""

    __slots__ = ("cost_factor", "end_token", "last", "pinned_tokens", "private_from_token", "turn", "visits")

    def __init__(
        self, turn: int, cost_factor: float, pinned_tokens: int, private_from_token: int | None
    ) -> None:
        self.turn = turn
        self.cost_factor = cost_factor
        self.pinned_tokens = pinned_tokens
        self.private_from_token = private_from_token
        self.end_token = 0
        self.last: Chunk[S] | None = None
        """The deepest chunk so far."""
        self.visits: dict[int, Visit[S]] = {}
        """By reuse class."""


class Visit(Generic[S]):
    """The chunks of one class whose last reader is one request. They are of one age, and lie on one chain."""

    __slots__ = ("bucket", "evictable", "known", "place", "request", "reuse_class", "serial", "since_s")

    def __init__(self, request: Request[S], reuse_class: int, since_s: float, serial: int) -> None:
        self.request = request
        self.reuse_class = reuse_class
        self.since_s = since_s
        self.serial = serial
        self.bucket = 0
        """Of its age."""
        self.known = 0
        """Its chunks, ghosts included."""
        self.evictable: list[Chunk[S]] = []
        """Those that may be given up, by depth."""
        self.place: Place | None = None
