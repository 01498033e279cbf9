# SPDX-License-Identifier: Apache-2.0
"""A consumer or a source over a link whose other end the test plays, with time as a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine_ext.transfer.control.peer import BlocksNotPulled, Found, PeerEvent
from engine_ext.transfer.events import FailReason
from engine_ext.vllm.peers.account import Account
from engine_ext.vllm.peers.exchange import Exchange
from engine_ext.vllm.peers.foreign import ForeignPulls
from engine_ext.vllm.peers.jobs import Finished
from engine_ext.vllm.peers.metrics import Metric, Tally
from engine_ext.vllm.peers.reader import Answer, Reader
from engine_ext.vllm.peers.source import Source
from engine_ext.vllm.plan import Plan, Pull
from engine_ext.vllm.quarantine import Quarantine

CHUNK_TOKENS = 16
BLOCK_BYTES = 1000


@dataclass
class ScriptedLink:
    """Notes what it is told, and hands out what the test has put into `events`."""

    address: str = "me:1"
    finds: dict[int, tuple[str, list[bytes], str, float]] = field(default_factory=dict)
    pulls: dict[int, tuple[int, dict[bytes, int], float]] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)
    replies: dict[int, dict[bytes, int]] = field(default_factory=dict)
    events: list[PeerEvent] = field(default_factory=list)
    _last: int = 100

    def find(self, address: str, keys: Sequence[bytes], tenant: str, deadline_s: float) -> int:
        self._last += 1
        self.finds[self._last] = (address, list(keys), tenant, deadline_s)
        return self._last

    def forget(self, find_id: int) -> None:
        self.forgotten.append(find_id)

    def pull(self, find_id: int, pairs: Mapping[bytes, int], deadline_s: float) -> int:
        self._last += 1
        self.pulls[self._last] = (find_id, dict(pairs), deadline_s)
        return self._last

    def abort(self, pull_id: int) -> None:
        blocks = tuple(self.pulls[pull_id][1].values())
        self.events.append(BlocksNotPulled(pull_id, FailReason.ABORTED, (), blocks))

    def reply(self, lookup_id: int, found: Mapping[bytes, int]) -> None:
        self.replies[lookup_id] = dict(found)

    def take(self) -> list[PeerEvent]:
        taken, self.events = self.events, []
        return taken

    def idle(self) -> bool:
        return not self.events

    def close(self, timeout_s: float) -> bool:
        return timeout_s >= 0


class RecordedReports:
    """Every call of a `ReportSink`, by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *said, **_: self.calls.append((name, *said))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@dataclass
class InTree:
    """The in-tree tier as the test plays it: what a peer has by key, unknown while absent here."""

    known: dict[bytes, bool] = field(default_factory=dict)
    opened: list[tuple[str, str]] = field(default_factory=list)
    loads: dict[int, dict[bytes, int]] = field(default_factory=dict)
    closed: list[Any] = field(default_factory=list)

    def open(self, name: str, address: str) -> Any:
        self.opened.append((name, address))
        return name

    def lookup(self, handle: Any, key: bytes) -> bool | None:
        assert handle
        return self.known.get(key)

    def load(self, handle: Any, chunks: Mapping[bytes, int]) -> int:
        assert handle
        part = -1 - len(self.loads)
        self.loads[part] = dict(chunks)
        for key in list(self.known):
            del self.known[key]  # as the in-tree client does: a load ends the round
        return part

    def close(self, handle: Any) -> None:
        self.closed.append(handle)


class World:
    """One exchange and the engine's side of it."""

    def __init__(self, foreign: InTree | None = None) -> None:
        self.link = ScriptedLink()
        self.quarantine = Quarantine()
        self.tally = Tally()
        self.reports = RecordedReports()
        self.now_s = 1000.0
        self.in_tree = foreign
        pulls = ForeignPulls(foreign, self.quarantine, self.tally, linger_s=60.0)
        self.reader = Reader(
            self.link,
            self.quarantine,
            Account(self.tally, self.reports),
            pulls,
            block_bytes=BLOCK_BYTES,
            longest_pull_s=30.0,
        )
        self.source = Source("boot", self.tally, patience_s=0.5, pinned_limit=8)
        self.exchange = Exchange(self.link, self.reader, self.source)

    def begin(self, *pulls: Pull, request: str = "r", tenant: str = "blue") -> None:
        plan = Plan(plan_id=f"plan-{request}", tenant=tenant, pulls=pulls)
        self.reader.new_request(request, plan, self.now_s)

    def ask(self, key: bytes, request: str = "r") -> Answer:
        index = int(key[1:])
        start, end = index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS
        return self.reader.lookup(request, key, start, end, self.now_s)

    def scan(self, keys: Sequence[bytes], request: str = "r") -> list[Answer]:
        """One step of the engine: asks up to the first miss, then ends the step."""
        answers = []
        for key in keys:
            answers.append(self.ask(key, request))
            if answers[-1] is Answer.MISS:
                break
        self.reader.flush(self.now_s)
        return answers

    def hear(self, *events: PeerEvent) -> None:
        self.link.events.extend(events)
        self.exchange.poll(self.now_s)

    def found(self, *keys: bytes, find: int | None = None) -> int:
        """The last question, or `find`, is answered with these keys."""
        find_id = find if find is not None else max(self.link.finds)
        self.hear(Found(find_id, frozenset(keys), 0.002))
        return find_id

    def load(self, chunks: Mapping[bytes, int], job: int = 7, request: str = "r") -> None:
        self.reader.submit(request, job, list(chunks.items()), self.now_s)

    def done(self) -> list[Finished]:
        self.exchange.poll(self.now_s)
        return self.reader.take_finished()

    def counted(self, metric: Metric) -> dict[tuple[str, ...], float]:
        return {labels: value for (one, labels), value in self.tally.counts.items() if one is metric}


def pull(source: str, first: int, end: int, within_s: float = 1.0, kind: Any = "pointsman") -> Pull:
    """Of chunks `first` to `end`, in whole chunks."""
    return Pull(
        source=source,
        kind=kind,
        start_token=first * CHUNK_TOKENS,
        end_token=end * CHUNK_TOKENS,
        deadline_ms=int(within_s * 1000),
    )


def keys(first: int, end: int) -> list[bytes]:
    """Keys whose name is their place in the prompt."""
    return [b"k%d" % i for i in range(first, end)]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def in_tree() -> InTree:
    return InTree()


@pytest.fixture
def mixed(in_tree: InTree) -> World:
    """A world in which in-tree peers are allowed."""
    return World(in_tree)


@pytest.fixture
def make_pull() -> Callable[..., Pull]:
    return pull


@pytest.fixture
def make_keys() -> Callable[[int, int], list[bytes]]:
    return keys
