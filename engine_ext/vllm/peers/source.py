# SPDX-License-Identifier: Apache-2.0
"""The source: peers' questions answered with what is here, pinned until their lease ends. Pure.

A question is looked at in the engine's step, where vLLM allows lookups. Chunks whose own write is under way make it
wait up to `patience_s`; then what is there is pinned in one store job and the answer names its chunks. The job counts
as finished when the lease ends, which is what unpins them. Keys contain the cache salt, so a question can only find
what was stored under the asker's salts; where the region belongs to one tenant, others get nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from engine_ext.transfer.control.peer import Asked

from .metrics import SERVED, Tally

KEY_BYTES = range(5, 129)
"""A block hash of the engine and four bytes of group index; anything else cannot be a key."""


class Presence(Enum):
    HERE = auto()
    COMING = auto()
    ABSENT = auto()


class Host(Protocol):
    """The engine's tiers as a source asks them (vLLM's `ParentManager`)."""

    def begin(self, name: str, tenant: str) -> Any:
        """Opens a synthetic request; every one is closed with `end`."""
        ...

    def lookup(self, request: Any, key: bytes) -> Presence: ...

    def pin(self, request: Any, keys: Sequence[bytes]) -> tuple[int, Sequence[int]]:
        """Pins chunks that are HERE. The store job to report as finished, and the chunks in the order of the keys."""
        ...

    def end(self, request: Any) -> None: ...


class Replies(Protocol):
    def reply(self, lookup_id: int, found: Mapping[bytes, int]) -> None: ...


@dataclass(slots=True)
class _Question:
    lookup_id: int
    keys: list[bytes]
    tenant: str
    until_s: float
    request: Any = None
    abandoned: bool = False


class Source:
    """Questions that wait and leases that run."""

    def __init__(
        self, boot: str, tally: Tally, *, patience_s: float, pinned_limit: int, tenant: str = ""
    ) -> None:
        self._boot = boot
        self._tally = tally
        self._patience_s = patience_s
        self._pinned_limit = pinned_limit
        self._tenant = tenant
        self._questions: dict[int, _Question] = {}
        self._leases: dict[int, tuple[int, int]] = {}
        self._finished: list[int] = []
        self.pinned = 0
        """Chunks, counted once per lease."""

    def asked(self, event: Asked, now_s: float) -> None:
        keys = [key for key in dict.fromkeys(event.keys) if len(key) in KEY_BYTES]
        self._questions[event.lookup_id] = _Question(
            event.lookup_id, keys, event.tenant, now_s + self._patience_s
        )

    def lease_ended(self, lookup_id: int) -> None:
        """Unpins, at the next `take_finished`. A question that is still open gets no answer any more."""
        if lookup_id in self._questions:
            self._questions[lookup_id].abandoned = True
        job_id, chunks = self._leases.pop(lookup_id, (None, 0))
        if job_id is not None:
            self._finished.append(job_id)
            self.pinned -= chunks

    def serve(self, host: Host, replies: Replies, now_s: float) -> None:
        """Once per step of the engine, with its tiers at hand."""
        for question in list(self._questions.values()):
            if self._settle(question, host, replies, now_s):
                del self._questions[question.lookup_id]

    def refuse_all(self, replies: Replies) -> None:
        """Answers what is not begun with nothing: the engine is being reset."""
        for question in list(self._questions.values()):
            if question.request is None:
                replies.reply(question.lookup_id, {})
                del self._questions[question.lookup_id]

    def take_finished(self) -> list[int]:
        """Store jobs whose lease has ended."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def leases(self) -> int:
        return len(self._leases)

    def _settle(self, question: _Question, host: Host, replies: Replies, now_s: float) -> bool:
        if question.abandoned:
            if question.request is not None:
                host.end(question.request)
            return True
        if self._tenant and question.tenant != self._tenant:
            self._tally.count(SERVED, "other_tenant", by=len(question.keys))
            replies.reply(question.lookup_id, {})
            return True
        if question.request is None:
            question.request = host.begin(f"pointsman-{self._boot}-{question.lookup_id}", question.tenant)
        here, coming = self._sort(question, host)
        if coming and now_s < question.until_s:
            return False
        self._answer(question, here, host, replies)
        return True

    def _sort(self, question: _Question, host: Host) -> tuple[list[bytes], int]:
        here, coming, left = [], 0, []
        for key in question.keys:
            presence = host.lookup(question.request, key)
            if presence is Presence.HERE:
                here.append(key)
            coming += presence is Presence.COMING
            if presence is not Presence.ABSENT:
                left.append(key)
        self._tally.count(SERVED, "absent", by=len(question.keys) - len(left))
        question.keys = left
        return here, coming

    def _answer(self, question: _Question, here: list[bytes], host: Host, replies: Replies) -> None:
        room = max(0, self._pinned_limit - self.pinned)
        self._tally.count(SERVED, "coming", by=len(question.keys) - len(here))
        self._tally.count(SERVED, "no_room", by=len(here) - min(room, len(here)))
        found: dict[bytes, int] = {}
        if keys := here[:room]:
            job_id, chunks = host.pin(question.request, keys)
            found = dict(zip(keys, map(int, chunks), strict=True))
            self._leases[question.lookup_id] = (job_id, len(keys))
            self.pinned += len(keys)
            self._tally.count(SERVED, "leased", by=len(keys))
        host.end(question.request)
        replies.reply(question.lookup_id, found)
