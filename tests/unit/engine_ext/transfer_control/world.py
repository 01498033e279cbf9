# SPDX-License-Identifier: Apache-2.0
"""A reader and its sources without sockets, threads or a clock: messages move, and time passes, when a test says so."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_ext.transfer.agent import PeerOffer
from engine_ext.transfer.control.config import ControlConfig
from engine_ext.transfer.control.peer import Asked, Found, LeaseEnded, NotFound
from engine_ext.transfer.control.reader import Reader, ReaderEvent
from engine_ext.transfer.control.source import Source
from engine_ext.transfer.control.wire import ToReader, ToSource, read_by_reader, read_by_source
from engine_ext.transfer.events import (
    Event,
    FailReason,
    JobId,
    PeerLost,
    Pulled,
    PullFailed,
    PullRequest,
    Released,
)
from engine_ext.transfer.fingerprint import Fingerprint
from engine_ext.transfer.handshake import Handshake
from engine_ext.transfer.region import Region

BLOCK_BYTES = 1000
BLOCKS = 100
READER = "0" * 32
FINGERPRINT = Fingerprint(
    model="m",
    weights_revision="r",
    dtype="bfloat16",
    block_length_bytes=BLOCK_BYTES,
    layout="nhd",
    tp_map="tp=1:0",
    hash_seed="seed",
    tenant="",
)


def side(boot_id: str, fingerprint: Fingerprint = FINGERPRINT) -> Handshake:
    region = Region(1 << 30, fingerprint.block_length_bytes, BLOCKS)
    metadata = b"metadata of " + boot_id.encode()
    return Handshake(fingerprint, PeerOffer(boot_id, f"pointsman-{boot_id}", metadata, region, ("UCX",)))


@dataclass
class Transfers:
    """Stands where the pull thread does; a test ends its jobs."""

    offers: dict[str, PeerOffer] = field(default_factory=dict)
    jobs: dict[JobId, PullRequest] = field(default_factory=dict)
    connected: list[str] = field(default_factory=list)
    """Boot id of every session that was opened."""
    forgotten: list[str] = field(default_factory=list)
    events: deque[Event] = field(default_factory=deque)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(5000))

    def connect(self, address: str, offer: PeerOffer) -> None:
        self.offers[address] = offer
        self.connected.append(offer.boot_id)

    def forget(self, address: str) -> None:
        self.offers.pop(address, None)
        self.forgotten.append(address)

    def submit(self, request: PullRequest) -> JobId:
        job_id = JobId(next(self._ids))
        self.jobs[job_id] = request
        return job_id

    def abort(self, job_id: JobId) -> None:
        self.fail(FailReason.ABORTED, job_id, quarantined=tuple(self.jobs[job_id].destination))

    def finish(self, job_id: JobId | None = None) -> None:
        job_id = job_id or next(iter(self.jobs))
        request = self.jobs.pop(job_id)
        self.events.append(Pulled(job_id, len(request.source) * BLOCK_BYTES, 0.0))

    def fail(
        self,
        reason: FailReason,
        job_id: JobId | None = None,
        arrived: tuple[int, ...] = (),
        quarantined: tuple[int, ...] = (),
    ) -> None:
        job_id = job_id or next(iter(self.jobs))
        del self.jobs[job_id]
        self.events.append(PullFailed(job_id, reason, arrived, quarantined))


@dataclass
class Host:
    """A source's process: what listens at an address."""

    source: Source
    boot_id: str
    outbox: list[tuple[bytes, bytes]]
    events: list[Asked | LeaseEnded] = field(default_factory=list)
    holds: dict[bytes, int] | None = field(default_factory=dict)
    """What its owner answers every lookup with; None: it does not answer."""
    rate: float = 1.0
    """How fast its clock goes, which also sets it apart from the reader's."""

    def clock(self, now_s: float) -> float:
        return now_s * self.rate

    def asked(self) -> list[Asked]:
        return [event for event in self.events if isinstance(event, Asked)]

    def ended(self) -> list[LeaseEnded]:
        return [event for event in self.events if isinstance(event, LeaseEnded)]


class World:
    """One reader, and hosts by address. Messages to an address without a host are lost."""

    def __init__(self, *, fingerprint: Fingerprint = FINGERPRINT, **options: Any) -> None:
        self.now_s = 1000.0
        self.config = ControlConfig.load({"port": 0, "lease_s": 9.0, "lease_margin_s": 0.5, **options})
        self.transfers = Transfers()
        self.hosts: dict[str, Host] = {}
        self.silent: set[str] = set()
        """Addresses whose messages are lost in both directions."""
        self.slow: set[str] = set()
        """Addresses whose answers do not arrive yet."""
        self.hung_up: list[str] = []
        self.sent: list[tuple[str, ToSource]] = []
        self.received: list[ToReader] = []
        self.events: list[ReaderEvent] = []
        self.watch: Callable[[ReaderEvent], None] = lambda _: None
        """Sees each event at the moment at which it is told."""
        self._ids = itertools.count(1)
        self._to_sources: deque[tuple[str, bytes]] = deque()
        self.reader = Reader(self.config, side(READER, fingerprint), self, self.transfers)

    # The channel

    def send(self, address: str, data: bytes) -> None:
        self.sent.append((address, read_by_source(data)))
        self._to_sources.append((address, data))

    def hang_up(self, address: str, *, flush: bool = False) -> None:
        self.hung_up.append(address)
        if not flush:
            self._to_sources = deque(one for one in self._to_sources if one[0] != address)

    # The hosts

    def host(self, address: str = "a:1", boot_id: str = "a" * 32, **fingerprint: Any) -> Host:
        """Starts a process at this address, in the place of what was there."""
        outbox: list[tuple[bytes, bytes]] = []
        handshake = side(boot_id, msgspec.structs.replace(FINGERPRINT, **fingerprint))
        source = Source(self.config, handshake, lambda route, data: outbox.append((route, data)))
        self.hosts[address] = Host(source, boot_id, outbox)
        return self.hosts[address]

    # The owner

    def find(
        self, *keys: bytes, address: str = "a:1", tenant: str = "t", within_s: float = 1.0, step: bool = True
    ) -> int:
        find_id = next(self._ids)
        self.reader.find(find_id, address, keys, tenant, self.now_s + within_s, self.now_s)
        if step:
            self.step()
        return find_id

    def pull(self, find_id: int, pairs: dict[bytes, int], within_s: float = 1.0) -> int:
        pull_id = next(self._ids)
        self.reader.pull(pull_id, find_id, pairs, self.now_s + within_s, self.now_s)
        self.step()
        return pull_id

    def forget(self, find_id: int) -> None:
        self.reader.forget(find_id)
        self.step()

    def lost(self, reason: FailReason, address: str = "a:1") -> None:
        """The transfer layer has lost its session."""
        offer = self.transfers.offers[address]
        self.transfers.events.append(PeerLost(address, offer.boot_id, reason))

    # Time

    def step(self, seconds: float = 0.0) -> list[ReaderEvent]:
        """Lets time pass at once, then moves everything until nothing moves; what the reader's owner hears."""
        self.now_s += seconds
        heard: list[ReaderEvent] = []
        moving = True
        while moving:
            moving = self._carry()
            for host in self.hosts.values():
                host.source.poll(host.clock(self.now_s))
                moving |= self._answer(host)
            while self.transfers.events:
                moving = True
                self.reader.transferred(self.transfers.events.popleft(), self.now_s)
            self.reader.poll(self.now_s)
            told = self.reader.take()
            for event in told:
                self.watch(event)
            heard.extend(told)
            moving |= bool(self._to_sources)
        self.events.extend(heard)
        return heard

    def run(self, seconds: float) -> list[ReaderEvent]:
        """Lets time pass from timer to timer."""
        heard: list[ReaderEvent] = []
        end_s = self.now_s + seconds
        while True:
            timers = [self.reader.next_s()]
            for host in self.hosts.values():
                time_s = host.source.next_s()
                timers.append(None if time_s is None else time_s / host.rate + 1e-9)
            due_s = min((time_s for time_s in timers if time_s is not None), default=end_s)
            heard.extend(self.step(max(0.0, min(due_s, end_s) - self.now_s)))
            if due_s >= end_s:
                return heard

    def told(self, number: int) -> list[ReaderEvent]:
        """Everything that was said of this find or pull."""
        return [
            event
            for event in self.events
            if (isinstance(event, Found | NotFound) and event.find_id == number)
            or (isinstance(event, Pulled | PullFailed | Released) and event.job_id == number)
        ]

    def _carry(self) -> bool:
        moved = bool(self._to_sources)
        while self._to_sources:
            address, data = self._to_sources.popleft()
            host = self.hosts.get(address)
            if host is not None and address not in self.silent:
                host.source.receive(address.encode(), read_by_source(data), host.clock(self.now_s))
        return moved

    def _answer(self, host: Host) -> bool:
        for event in host.source.take():
            host.events.append(event)
            if isinstance(event, Asked) and host.holds is not None:
                host.source.reply(event.lookup_id, host.holds, host.clock(self.now_s))
                host.events.extend(host.source.take())
        if self.slow & {route.decode() for route, _ in host.outbox}:
            return False
        moved = bool(host.outbox)
        for route, data in host.outbox:
            address = route.decode()
            if address not in self.silent and self.hosts.get(address) is host:
                self.received.append(read_by_reader(data))
                self.reader.receive(address, data, self.now_s)
        host.outbox.clear()
        return moved
