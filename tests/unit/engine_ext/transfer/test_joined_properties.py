# SPDX-License-Identifier: Apache-2.0
"""Whatever happens in whatever order to pulls that share transfers: what arrived is the source's, byte for byte,
nothing is written into a block that is not busy, and no handle and no block is left."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from engine_ext.transfer.agent import TransferState
from engine_ext.transfer.events import Event, JobId, Pulled, PullFailed, Released

from .scripted import BLOCK_BYTES, BOOT_A, BOOT_B, Drive, ScriptedAgent, Transfer

BOOTS = {"A": BOOT_A, "B": BOOT_B}
ENDS = (TransferState.DONE, TransferState.DONE, TransferState.DONE, TransferState.GONE, TransferState.UNKNOWN)


class Joined(RuleBasedStateMachine):
    """Memory is a number per block. An adversary writes blocks of running transfers when it likes, and ends them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"part_bytes": 5 * BLOCK_BYTES, "join_bytes": 4 * BLOCK_BYTES}
        self.drive = Drive(linger_limit_s=3, settle_s=0.5, depth=2, **sizes)
        self.memory: dict[int, int] = {}
        self.open: dict[JobId, dict[int, int]] = {}
        self.held: dict[JobId, set[int]] = {}
        for address, boot_id in BOOTS.items():
            self.drive.connect(address, boot_id)

    @rule(
        address=st.sampled_from(sorted(BOOTS)),
        lists=st.lists(
            st.lists(st.integers(0, 30), min_size=1, max_size=7, unique=True), min_size=1, max_size=5
        ),
        within_s=st.floats(0.1, 3),
        seed=st.integers(0, 99),
    )
    def submit(self, address: str, lists: list[list[int]], within_s: float, seed: int) -> None:
        """Some pulls before the next poll, so that they wait together."""
        self.drive.connect(address, BOOTS[address])
        for destination in lists:
            source = random.Random(seed).sample(range(200), len(destination))
            job_id = self.drive.submit(destination, address, BOOTS[address], within_s, source)
            self.open[job_id] = dict(zip(destination, source, strict=True))

    @rule(choice=st.integers(0, 20), blocks=st.integers(1, 5))
    def some_bytes_land(self, choice: int, blocks: int) -> None:
        running = self.running()
        if running:
            _, transfer = running[choice % len(running)]
            self.write(transfer, blocks)

    @rule(choice=st.integers(0, 20), state=st.sampled_from(ENDS))
    def end(self, choice: int, state: TransferState) -> None:
        running = self.running()
        if running:
            _, transfer = running[choice % len(running)]
            if state is TransferState.DONE:
                self.write(transfer, len(transfer.destination))
            transfer.state = state

    @rule(inline=st.booleans())
    def posts_copy(self, inline: bool) -> None:
        for agent in self.drive.agents.made:
            agent.post_state = TransferState.DONE if inline else TransferState.RUNNING

    @rule(number=st.integers(1, 60))
    def abort(self, number: int) -> None:
        self.drive.machine.abort(JobId(number), self.drive.now_s)
        self.hear()

    @rule(address=st.sampled_from(sorted(BOOTS)))
    def forget(self, address: str) -> None:
        self.drive.machine.forget(address, self.drive.now_s)
        self.hear()

    @rule(seconds=st.floats(0, 2))
    def step(self, seconds: float) -> None:
        copied = {agent.number: len(agent.copied) for agent in self.drive.agents.made}
        told = self.drive.step(seconds)
        for agent in self.drive.agents.made:
            for transfer in agent.copied[copied.get(agent.number, 0) :]:
                for source, destination in zip(transfer.source, transfer.destination, strict=True):
                    self.memory[destination] = source
        self.note(told)

    def hear(self) -> None:
        """Blocks are a pull's until its owner has heard of its end: whoever aborts it may use them only then."""
        self.note(self.drive.machine.take(self.drive.now_s))

    def note(self, told: Sequence[Event]) -> None:
        for event in told:
            match event:
                case Pulled(job_id=job_id, size_bytes=size_bytes):
                    pairs = self.open.pop(job_id)
                    assert size_bytes == len(pairs) * BLOCK_BYTES
                    assert {block: self.memory.get(block) for block in pairs} == pairs
                case PullFailed(job_id=job_id, arrived=arrived, quarantined=quarantined):
                    pairs = self.open.pop(job_id)
                    assert not set(arrived) & set(quarantined)
                    assert {block: self.memory.get(block) for block in arrived} == {
                        block: pairs[block] for block in arrived
                    }
                    self.held[job_id] = set(quarantined)
                case Released(job_id=job_id, blocks=blocks):
                    assert set(blocks) <= self.held[job_id]
                    self.held[job_id] -= set(blocks)
        free = set(range(31)).difference(*self.open.values(), *self.held.values())
        assert not self.drive.machine.busy(free)

    def running(self) -> list[tuple[ScriptedAgent, Transfer]]:
        return [
            (agent, transfer)
            for agent in self.drive.agents.made
            if not agent.closed
            for transfer in agent.transfers.values()
            if transfer.state is TransferState.RUNNING
        ]

    def write(self, transfer: Transfer, blocks: int) -> None:
        for source, destination in list(zip(transfer.source, transfer.destination, strict=True))[:blocks]:
            assert self.drive.machine.busy([destination]), "a write into a block that is free"
            self.memory[destination] = source

    def teardown(self) -> None:
        for _ in range(40):
            self.step(0.5)
        counts = self.drive.machine.counts()
        assert (counts.open_jobs, counts.transfers, counts.open_blocks, counts.quarantined_blocks) == (0,) * 4
        assert not self.open
        assert not any(self.held.values())


Joined.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestJoined = Joined.TestCase
