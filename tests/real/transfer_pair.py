# SPDX-License-Identifier: Apache-2.0
"""Both ends of real transfers: sources as processes of their own, and a reader in this process.

Runs in the real engine's environment, which has nixl. Sources come from a fork server that imported nixl once.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from signals import send_signal

from engine_ext.transfer.agent import PeerOffer
from engine_ext.transfer.config import TransferConfig
from engine_ext.transfer.events import Event, JobId, PullRequest
from engine_ext.transfer.fingerprint import Fingerprint
from engine_ext.transfer.handshake import Handshake
from engine_ext.transfer.nixl_agent import NixlServingAgent
from engine_ext.transfer.node import TransferNode, new_boot_id, open_node
from engine_ext.transfer.region import HostRegion, Region

BLOCK_BYTES = 64 << 10
EMPTY = 0xEE
"""What our blocks hold where nothing was pulled."""
PATIENCE_S = 60.0


def fingerprint() -> Fingerprint:
    return Fingerprint(
        model="m",
        weights_revision="r",
        dtype="bfloat16",
        block_length_bytes=BLOCK_BYTES,
        layout="nhd",
        tp_map="tp=1:0",
        hash_seed="s",
        tenant="",
    )


def content(seed: int, block: int) -> bytes:
    """The bytes of a source's block: no two are alike."""
    return random.Random(seed << 32 | block).randbytes(BLOCK_BYTES)


def use_transport(tls: str | None) -> None:
    """For agents that are made from now on; None: UCX's choice, which is shared memory here."""
    if tls is None:
        os.environ.pop("UCX_TLS", None)
    else:
        os.environ["UCX_TLS"] = tls


def _serve(pipe: Connection, blocks: int, seed: int, tls: str | None) -> None:
    use_transport(tls)
    with contextlib.suppress(EOFError, BrokenPipeError):
        memory = mmap.mmap(-1, blocks * BLOCK_BYTES)
        for block in range(blocks):
            memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = content(seed, block)
        host = HostRegion(memoryview(memory), BLOCK_BYTES)
        boot_id = new_boot_id()
        serving = NixlServingAgent(boot_id, TransferConfig(), host.region)
        handshake = Handshake(fingerprint(), serving.offer())
        pipe.send(boot_id)
        while (hello := pipe.recv()) is not None:
            pipe.send(handshake.answer(hello)[0] if hello != b"cpu" else sum(os.times()[:2]))
    os._exit(0)


class Source:
    """A process that serves `blocks` blocks whose content follows from `seed`."""

    def __init__(self, blocks: int, seed: int, tls: str | None = None) -> None:
        self.seed = seed
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(theirs, blocks, seed, tls), daemon=True)
        self.process.start()
        theirs.close()
        self.boot_id: str = self._receive()

    def answer(self, hello: bytes) -> Any:
        self.pipe.send(hello)
        return self._receive()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        send_signal(self.process.pid, number)

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join()
        self.pipe.close()

    def _receive(self) -> Any:
        if not self.pipe.poll(PATIENCE_S):
            raise TimeoutError("the source does not answer")
        return self.pipe.recv()


class Reader:
    """This process's end: a region full of EMPTY, and an engine that is polled by `drive`."""

    def __init__(self, blocks: int, tls: str | None = None, **options: Any) -> None:
        use_transport(tls)
        self.memory = mmap.mmap(-1, blocks * BLOCK_BYTES)
        self.empty(range(blocks))
        self._host = HostRegion(memoryview(self.memory), BLOCK_BYTES)
        config = TransferConfig.load({"part_bytes": 16 * BLOCK_BYTES, **options})
        self.node: TransferNode = open_node(config, fingerprint(), self.region, new_boot_id())
        self.engine = self.node.engine
        self.events: list[Event] = []

    @property
    def region(self) -> Region:
        return self._host.region

    def greet(self, source: Source, expected_boot_id: str | None = None) -> PeerOffer:
        answer = source.answer(self.node.handshake.hello(expected_boot_id))
        return self.node.handshake.conclude(answer, expected_boot_id)

    def connect(self, address: str, source: Source) -> PeerOffer:
        offer = self.greet(source)
        self.engine.connect(address, offer)
        return offer

    def submit(
        self,
        address: str,
        boot_id: str,
        source: list[int],
        destination: list[int],
        within_s: float = PATIENCE_S,
    ) -> JobId:
        deadline_s = self.engine.now_s() + within_s
        return self.engine.submit(PullRequest(address, boot_id, source, destination, deadline_s))

    def drive(self, until: Callable[[list[Event]], object]) -> list[Event]:
        """Polls until `until(events since the call)` is true; the events."""
        seen: list[Event] = []
        stop_s = time.monotonic() + PATIENCE_S
        while True:
            events = self.engine.poll()
            seen.extend(events)
            self.events.extend(events)
            if until(seen):
                return seen
            if time.monotonic() > stop_s:
                raise TimeoutError(f"not within {PATIENCE_S} s; so far {seen}, {self.engine.counts()}")
            pause_s = self.engine.next_poll_s()
            time.sleep(min(0.01, pause_s if pause_s is not None else 0.001))

    def read(self, block: int) -> bytes:
        return self.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]

    def empty(self, blocks: Any) -> None:
        for block in blocks:
            self.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = bytes([EMPTY]) * BLOCK_BYTES

    def untouched(self, blocks: Any) -> bool:
        return all(self.read(block) == bytes([EMPTY]) * BLOCK_BYTES for block in blocks)

    def end(self) -> list[Event]:
        closed, events = self.engine.close()
        assert closed
        self.node.serving.close()
        self._host.release()
        self.memory.close()
        return events


@contextlib.contextmanager
def ending(*things: Source | Reader) -> Iterator[None]:
    try:
        yield
    finally:
        for thing in things:
            thing.end()


def preload() -> None:
    """Lets the fork server import nixl while this process does."""
    _CONTEXT.set_forkserver_preload(["nixl"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # UCX aborts a thawed source whose reader is gone
    ensure_running()


_CONTEXT = multiprocessing.get_context("forkserver")
