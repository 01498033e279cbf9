# SPDX-License-Identifier: Apache-2.0
"""Both ends of real links: NIXL, sockets, threads, and owners that are processes of their own.

Runs in the real engine's environment, which has nixl.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from signals import send_signal
from transfer_pair import EMPTY, PATIENCE_S, content, fingerprint, use_transport

from engine_ext.transfer.config import TransferConfig
from engine_ext.transfer.control.config import ControlConfig
from engine_ext.transfer.control.link import open_link
from engine_ext.transfer.control.peer import (
    Asked,
    BlocksNotPulled,
    BlocksPulled,
    Found,
    LeaseEnded,
    NotFound,
    PeerEvent,
)
from engine_ext.transfer.errors import TransferConfigError
from engine_ext.transfer.fingerprint import Fingerprint
from engine_ext.transfer.region import HostRegion

PART_BLOCKS = 16
TCP = "tcp,self"
"""For transfers that a source takes part in, so that they stop when it does."""


@contextlib.contextmanager
def closing(*ends: Any) -> Iterator[None]:
    """Closes them in this order."""
    try:
        yield
    finally:
        for end in ends:
            end.close()


def key(block: int) -> bytes:
    return b"block %d" % block


class End:
    """One process's link, with its region and its owner's part: played by `play`."""

    def __init__(
        self,
        blocks: int,
        tls: str | None = None,
        print_: Fingerprint | None = None,
        transfer: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        use_transport(tls)
        print_ = print_ or fingerprint()
        self.block_bytes = print_.block_length_bytes
        self.memory = mmap.mmap(-1, blocks * self.block_bytes)
        self._host = HostRegion(memoryview(self.memory), self.block_bytes)
        self.link = open_link(
            ControlConfig.load({"port": 0, **options}),
            TransferConfig.load({"part_bytes": PART_BLOCKS * self.block_bytes, **(transfer or {})}),
            print_,
            self._host.region,
        )
        self.holds: dict[bytes, int] = {}
        self.events: list[PeerEvent] = []
        self.leases: dict[int, tuple[int, ...]] = {}
        """Lookups of peers -> blocks that are pinned for them."""
        self.asked = self.ended = self.read = 0

    def play(self) -> list[PeerEvent]:
        """Takes what is there and answers peers; everything but their lookups and leases."""
        told: list[PeerEvent] = []
        for event in self.link.take():
            if isinstance(event, Asked):
                found = {key: self.holds[key] for key in event.keys if key in self.holds}
                self.leases[event.lookup_id] = tuple(found.values())
                self.asked += 1
                self.link.reply(event.lookup_id, found)
            elif isinstance(event, LeaseEnded):
                del self.leases[event.lookup_id]
                self.ended += 1
                self.read += event.read
            else:
                told.append(event)
        self.events.extend(told)
        return told

    def until(self, look: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
        stop_s = time.monotonic() + patience_s
        while True:
            self.play()
            if look():
                return
            if time.monotonic() > stop_s:
                raise TimeoutError(f"not within {patience_s} s: {self.events[-20:]}, {self.link.counts()}")
            time.sleep(0.0005)

    def find(self, address: str, blocks: Any, within_s: float = PATIENCE_S) -> Found | NotFound:
        keys = [key(block) for block in blocks]
        find_id = self.link.find(address, keys, "t", time.monotonic() + within_s)
        answer: list[Any] = []

        def found() -> list[Any]:
            answer[:] = [e for e in self.events if isinstance(e, Found | NotFound) and e.find_id == find_id]
            return answer

        self.until(found)
        one: Found | NotFound = answer[0]
        return one

    def pull(self, found: Found, pairs: Mapping[int, int], within_s: float = PATIENCE_S) -> int:
        """Begins to pull: the source's blocks -> ours."""
        named = {key(of): to for of, to in pairs.items()}
        return self.link.pull(found.find_id, named, time.monotonic() + within_s)

    def end_of(self, pull_id: int) -> BlocksPulled | BlocksNotPulled:
        ends: list[Any] = []

        def ended() -> list[Any]:
            ends[:] = [
                e
                for e in self.events
                if isinstance(e, BlocksPulled | BlocksNotPulled) and e.pull_id == pull_id
            ]
            return ends

        self.until(ended)
        one: BlocksPulled | BlocksNotPulled = ends[0]
        return one

    def block(self, number: int) -> bytes:
        return self.memory[number * self.block_bytes : (number + 1) * self.block_bytes]

    def fill(self, seed: int, blocks: Any) -> None:
        for number in blocks:
            self.memory[number * self.block_bytes : (number + 1) * self.block_bytes] = content(seed, number)

    def empty(self, blocks: Any) -> None:
        for number in blocks:
            self.memory[number * self.block_bytes : (number + 1) * self.block_bytes] = (
                bytes([EMPTY]) * self.block_bytes
            )

    def untouched(self, blocks: Any) -> bool:
        return all(self.block(number) == bytes([EMPTY]) * self.block_bytes for number in blocks)

    def close(self) -> bool:
        """Plays on while it closes: peers may hold leases."""
        stop_s = time.monotonic() + PATIENCE_S
        while not self.link.close(0.05):
            self.play()
            if time.monotonic() > stop_s:
                return False
        self.play()
        self._host.release()
        self.memory.close()
        return True


def _serve(pipe: Connection, blocks: int, seed: int, tls: str | None, options: dict[str, Any]) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):
        end = _bound(blocks, tls, options)
        end.fill(seed, range(blocks))
        end.holds = {key(block): block for block in range(blocks)}
        pipe.send(end.link.address)
        while True:
            end.play()
            if pipe.poll(0.0005):
                pipe.recv()
                pipe.send(
                    {"asked": end.asked, "ended": end.ended, "read": end.read, "leases": len(end.leases)}
                )
    os._exit(0)


def _bound(blocks: int, tls: str | None, options: dict[str, Any]) -> End:
    """Its predecessor's port may be in use for a moment longer."""
    stop_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return End(blocks, tls, **options)
        except TransferConfigError:
            if time.monotonic() > stop_s:
                raise
            time.sleep(0.01)


class LinkProcess:
    """A process of its own that runs `target(pipe, *args)` and says first what is its address."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self.first: Any = self.receive()

    def receive(self, patience_s: float = PATIENCE_S) -> Any:
        if not self.pipe.poll(patience_s):
            raise TimeoutError("the other process does not answer")
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        send_signal(self.process.pid, number)

    def close(self) -> None:
        """Whatever state it is in."""
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join()
        self.pipe.close()


class SourceProcess(LinkProcess):
    """Serves `blocks` blocks whose content follows from `seed`."""

    def __init__(self, blocks: int, seed: int, tls: str | None = None, **options: Any) -> None:
        super().__init__(_serve, blocks, seed, tls, options)
        self.address: str = self.first

    def tell(self) -> dict[str, int]:
        """What its owner has heard so far."""
        self.pipe.send("tell")
        told: dict[str, int] = self.receive()
        return told


def preload() -> None:
    """Lets the fork server import what every process here needs, while this one does."""
    _CONTEXT.set_forkserver_preload(["nixl", "zmq", "control_pair"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # UCX aborts a thawed source whose reader is gone
    ensure_running()


_CONTEXT = multiprocessing.get_context("forkserver")
