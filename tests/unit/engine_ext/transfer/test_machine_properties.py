# SPDX-License-Identifier: Apache-2.0
"""Whatever happens in whatever order: no block is free while a transfer may write it, and everything ends."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_ext.transfer.agent import TransferState
from engine_ext.transfer.errors import AgentError
from engine_ext.transfer.events import JobId, Pulled, PullFailed, Released

from .scripted import BOOT_A, BOOT_B, BOOT_C, Drive

ADDRESSES = st.sampled_from(["A", "B"])
BOOTS = st.sampled_from([BOOT_A, BOOT_B, BOOT_C])


class Pulls(RuleBasedStateMachine):
    """An adversary ends transfers as it likes, or never; the owner believes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.drive = Drive(linger_limit_s=5, settle_s=0.5, depth=2, max_jobs=8)
        self.open: dict[JobId, set[int]] = {}
        self.deadline_s: dict[JobId, float] = {}
        self.quarantined: dict[JobId, set[int]] = {}

    @rule(address=ADDRESSES, boot_id=BOOTS)
    def connect(self, address: str, boot_id: str) -> None:
        # One incarnation has one address.
        self.drive.connect(address, BOOT_C if address == "B" else boot_id)

    @rule(
        address=ADDRESSES,
        boot_id=BOOTS,
        blocks=st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True),
        within_s=st.floats(0.1, 4),
    )
    def submit(self, address: str, boot_id: str, blocks: list[int], within_s: float) -> None:
        job_id = self.drive.submit(blocks, address, boot_id, within_s)
        self.open[job_id] = set(blocks)
        self.deadline_s[job_id] = self.drive.now_s + within_s

    @rule(choice=st.integers(0, 10), state=st.sampled_from(list(TransferState)))
    def end(self, choice: int, state: TransferState) -> None:
        running = [
            transfer
            for agent in self.drive.agents.made
            if not agent.closed
            for transfer in agent.transfers.values()
            if transfer.state is TransferState.RUNNING
        ]
        if running:
            running[choice % len(running)].state = state

    @rule(number=st.integers(1, 30))
    def abort(self, number: int) -> None:
        self.drive.machine.abort(JobId(number), self.drive.now_s)

    @rule(broken=st.booleans())
    def agents_break(self, broken: bool) -> None:
        error = AgentError("any", "broken") if broken else None
        self.drive.agents.error = error
        for agent in self.drive.agents.made:
            agent.close_error = error

    @rule(seconds=st.floats(0, 3))
    def step(self, seconds: float) -> None:
        for event in self.drive.step(seconds):
            match event:
                case Pulled(job_id=job_id):
                    assert self.drive.now_s < self.deadline_s[job_id]
                    del self.open[job_id]
                case PullFailed(job_id=job_id, arrived=arrived, quarantined=quarantined):
                    assert {*arrived, *quarantined} <= self.open.pop(job_id)
                    self.quarantined[job_id] = set(quarantined)
                case Released(job_id=job_id, blocks=blocks):
                    assert set(blocks) <= self.quarantined[job_id]
                    self.quarantined[job_id] -= set(blocks)
        late = [job for job in self.open if self.deadline_s[job] <= self.drive.now_s]
        assert not late, "a pull outlived its deadline"

    @invariant()
    def no_block_is_free_while_it_may_be_written(self) -> None:
        held: list[int] = []
        for agent in self.drive.agents.made:
            if not agent.closed:
                held.extend(block for t in agent.transfers.values() for block in t.destination)
        assert len(held) == len(set(held)), "two transfers into one block"
        assert all(self.drive.machine.busy([block]) for block in held)
        told = set().union(*self.quarantined.values(), *self.open.values())
        assert set(held) <= told, "a transfer writes where its owner does not expect it"

    def teardown(self) -> None:
        self.drive.agents.error = None
        for agent in self.drive.agents.made:
            agent.close_error = None
        for _ in range(30):
            self.step(1.0)
        counts = self.drive.machine.counts()
        assert (counts.open_jobs, counts.transfers, counts.open_blocks, counts.quarantined_blocks) == (
            0,
            0,
            0,
            0,
        )
        assert not any(self.quarantined.values())


Pulls.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPulls = Pulls.TestCase
