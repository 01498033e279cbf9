# SPDX-License-Identifier: Apache-2.0
"""Agents that do what a test says: for faults that no real NIXL shows on demand."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from engine_ext.transfer.agent import PeerOffer, Posted, TransferState
from engine_ext.transfer.config import TransferConfig
from engine_ext.transfer.errors import AgentError
from engine_ext.transfer.events import Event, JobId, PullRequest
from engine_ext.transfer.machine import Machine
from engine_ext.transfer.region import Region

BLOCK_BYTES = 1000
OURS = Region(1 << 30, BLOCK_BYTES, 100)
THEIRS = Region(1 << 40, BLOCK_BYTES, 200)
BOOT_A, BOOT_B, BOOT_C = "a" * 32, "b" * 32, "c" * 32


def offer(boot_id: str = BOOT_A) -> PeerOffer:
    return PeerOffer(boot_id, f"pointsman-{boot_id}", b"metadata", THEIRS, ("UCX",))


@dataclass
class Transfer:
    boot_id: str
    source: list[int]
    destination: list[int]
    state: TransferState = TransferState.RUNNING


@dataclass
class ScriptedAgent:
    """Transfers run until the test sets their state."""

    number: int
    transfers: dict[int, Transfer] = field(default_factory=dict)
    peers: list[str] = field(default_factory=list)
    added: list[PeerOffer] = field(default_factory=list)
    """Every offer that was ever loaded."""
    post_state: TransferState = TransferState.RUNNING
    post_error: AgentError | None = None
    peer_error: AgentError | None = None
    close_error: AgentError | None = None
    copied: list[Transfer] = field(default_factory=list)
    """Those that were over inside their post."""
    closed: bool = False
    checks: int = 0
    progressed: int = 0
    _handles: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def add_peer(self, offer: PeerOffer) -> None:
        assert not self.closed
        assert offer.boot_id not in self.peers, "introduced twice"
        if self.peer_error is not None:
            raise self.peer_error
        self.peers.append(offer.boot_id)
        self.added.append(offer)

    def remove_peer(self, boot_id: str) -> None:
        assert not any(t.boot_id == boot_id for t in self.transfers.values()), "removed under a transfer"
        self.peers.remove(boot_id)

    def post(self, boot_id: str, source: list[int], destination: list[int]) -> Posted:
        assert not self.closed
        assert boot_id in self.peers
        if self.post_error is not None:
            raise self.post_error
        handle = next(self._handles)
        transfer = Transfer(boot_id, source, destination, self.post_state)
        if self.post_state is TransferState.DONE:
            self.copied.append(transfer)
        else:
            self.transfers[handle] = transfer
        return handle, self.post_state

    def check(self, handle: int) -> TransferState:
        assert not self.closed
        self.checks += 1
        return self.transfers[handle].state

    def release(self, handle: int) -> None:
        transfer = self.transfers.pop(handle)
        assert transfer.state is not TransferState.RUNNING, "released while it runs"

    def progress(self) -> None:
        self.progressed += 1

    def close(self) -> None:
        if self.close_error is not None:
            raise self.close_error
        self.closed = True
        self.transfers.clear()

    def end(self, state: TransferState = TransferState.DONE, boot_id: str | None = None) -> None:
        """Every transfer (of this peer) that runs is now in this state."""
        for transfer in self.transfers.values():
            if transfer.state is TransferState.RUNNING and boot_id in (None, transfer.boot_id):
                transfer.state = state


@dataclass
class ScriptedAgents:
    made: list[ScriptedAgent] = field(default_factory=list)
    error: AgentError | None = None

    def __call__(self, number: int) -> ScriptedAgent:
        if self.error is not None:
            raise self.error
        self.made.append(ScriptedAgent(number))
        return self.made[-1]


class Drive:
    """A machine, its agents and a clock that only the test moves."""

    def __init__(self, **options: object) -> None:
        defaults = {"part_bytes": 2 * BLOCK_BYTES, "depth": 2, "warm_up_s": 0.0}
        self.config = TransferConfig.load({**defaults, **options})
        self.agents = ScriptedAgents()
        self.machine = Machine(self.config, OURS, self.agents)
        self.now_s = 100.0
        self._ids = itertools.count(1)

    @property
    def agent(self) -> ScriptedAgent:
        return self.agents.made[-1]

    def connect(self, address: str = "A", boot_id: str = BOOT_A) -> None:
        self.machine.connect(address, offer(boot_id), self.now_s)

    def submit(
        self,
        destination: list[int],
        address: str = "A",
        boot_id: str = BOOT_A,
        within_s: float = 1.0,
        source: list[int] | None = None,
    ) -> JobId:
        job_id = JobId(next(self._ids))
        source = [block + 100 for block in destination] if source is None else source
        request = PullRequest(address, boot_id, source, destination, self.now_s + within_s)
        self.machine.submit(job_id, request, self.now_s)
        return job_id

    def step(self, seconds: float = 0.0) -> list[Event]:
        """Lets time pass, then polls and takes."""
        self.now_s += seconds
        self.machine.poll(self.now_s)
        return self.machine.take(self.now_s)
