# SPDX-License-Identifier: Apache-2.0
"""Links over real sockets and threads, with agents that do what a test says in the place of NIXL."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import zmq

from engine_ext.transfer.agent import PeerOffer, Posted, TransferState
from engine_ext.transfer.config import TransferConfig
from engine_ext.transfer.control.config import ControlConfig
from engine_ext.transfer.control.curve import load_keys
from engine_ext.transfer.control.link import Link, join
from engine_ext.transfer.control.peer import Asked, Found, NotFound, PeerEvent
from engine_ext.transfer.control.sockets import Sockets
from engine_ext.transfer.engine import PullEngine
from engine_ext.transfer.errors import AgentError
from engine_ext.transfer.handshake import Handshake
from engine_ext.transfer.node import TransferNode, new_boot_id
from engine_ext.transfer.region import Region

from .world import BLOCK_BYTES, BLOCKS, FINGERPRINT

PATIENCE_S = 30.0
Kind = TypeVar("Kind")


class Agent:
    """Transfers are over when they are posted, but while `held`."""

    def __init__(self) -> None:
        self.held = False
        self.posted: list[tuple[str, list[int], list[int]]] = []
        self.closed = False

    def add_peer(self, offer: PeerOffer) -> None: ...

    def remove_peer(self, boot_id: str) -> None: ...

    def post(self, boot_id: str, source: list[int], destination: list[int]) -> Posted:
        self.posted.append((boot_id, source, destination))
        return len(self.posted), self.check(0)

    def check(self, _: int) -> TransferState:
        return TransferState.RUNNING if self.held else TransferState.DONE

    def release(self, handle: int) -> None: ...

    def progress(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class Serving:
    def __init__(self, offer: PeerOffer) -> None:
        self._offer = offer
        self.closed = False
        self.error: AgentError | None = None

    def offer(self) -> PeerOffer:
        return self._offer

    def close(self) -> None:
        if self.error is not None:
            raise self.error
        self.closed = True


class CountingSockets(Sockets):
    """Counts how often its thread wakes."""

    waits = 0

    def wait(self, timeout_s: float | None) -> list[Any]:
        self.waits += 1
        return super().wait(timeout_s)


class Process:
    """One process's end. `holds` is what it answers peers with; None: nothing at all."""

    def __init__(self, fingerprint: dict[str, Any] | None = None, **options: Any) -> None:
        self.boot_id = new_boot_id()
        region = Region(1 << 30, BLOCK_BYTES, BLOCKS)
        self.agent = Agent()
        config = ControlConfig.load({"port": 0, **options})
        self.sockets = CountingSockets(config, load_keys(config))
        self.serving = Serving(
            PeerOffer(self.boot_id, f"pointsman-{self.boot_id}", b"metadata", region, ("UCX",))
        )
        print_ = msgspec.structs.replace(FINGERPRINT, **(fingerprint or {}))
        engine = PullEngine(TransferConfig(), region, lambda _: self.agent)
        node = TransferNode(self.boot_id, Handshake(print_, self.serving.offer()), engine, self.serving)
        self.link: Link = join(config, self.sockets, node)
        self.holds: dict[bytes, int] | None = {}
        self.events: list[PeerEvent] = []

    @property
    def address(self) -> str:
        return self.link.address

    def take(self) -> None:
        for event in self.link.take():
            self.events.append(event)
            if isinstance(event, Asked) and self.holds is not None:
                self.link.reply(event.lookup_id, self.holds)

    def find(self, address: str, *keys: bytes, within_s: float = PATIENCE_S) -> int:
        return self.link.find(address, keys, "t", time.monotonic() + within_s)

    def pull(self, find_id: int, pairs: dict[bytes, int], within_s: float = PATIENCE_S) -> int:
        return self.link.pull(find_id, pairs, time.monotonic() + within_s)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]


def until(look: Callable[[], object], *processes: Process) -> None:
    """Plays the owners of these processes until `look` is true."""
    stop_s = time.monotonic() + PATIENCE_S
    while True:
        for process in processes:
            process.take()
        if look():
            return
        assert time.monotonic() < stop_s, [process.events for process in processes]
        time.sleep(0.001)


def answer(reader: Process, find: int, *others: Process) -> Found | NotFound:
    """What became of a find."""

    def found() -> list[Found | NotFound]:
        return [e for e in reader.events if isinstance(e, Found | NotFound) and e.find_id == find]

    until(found, reader, *others)
    return found()[0]


@contextlib.contextmanager
def closing(*processes: Process) -> Iterator[None]:
    """Closes all of them, together: each may wait for another's leases."""
    try:
        yield
    finally:
        for process in processes:
            process.serving.error = None
            process.agent.held = False
        left = list(processes)
        stop_s = time.monotonic() + PATIENCE_S
        while left and time.monotonic() < stop_s:
            left = [process for process in left if not process.link.close(0.01)]
        assert not left


@contextlib.contextmanager
def bare(kind: int) -> Iterator[zmq.Socket[bytes]]:
    """A socket that speaks ZMQ but nothing of ours."""
    context = zmq.Context()
    made = context.socket(kind)
    made.linger = 0
    try:
        yield made
    finally:
        made.close(0)
        context.term()
