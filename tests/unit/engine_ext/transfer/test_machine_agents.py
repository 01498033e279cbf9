# SPDX-License-Identifier: Apache-2.0
"""Transfers that never end: the agent is replaced, and its end is the proof that frees the blocks."""

from __future__ import annotations

import pytest

from engine_ext.transfer.agent import TransferState
from engine_ext.transfer.errors import AgentError
from engine_ext.transfer.events import FailReason, JobId, Proof, Pulled, PullFailed, Released

from .scripted import BOOT_A, BOOT_B, Drive


def stuck(drive: Drive) -> JobId:
    """A pull from peer A that met its deadline and whose transfer runs on."""
    drive.connect("A", BOOT_A)
    job = drive.submit([0, 1], "A", BOOT_A)
    drive.step()
    drive.step(1.0)
    return job


def test_a_transfer_that_never_ends_is_freed_by_the_end_of_its_agent() -> None:
    drive = Drive(linger_limit_s=60)
    job = stuck(drive)
    assert drive.step(59.0) == []
    assert drive.machine.busy([0, 1])
    assert drive.step(2.0) == [Released(job, (0, 1), Proof.AGENT_DESTROYED)]
    assert drive.agents.made[0].closed
    assert not drive.machine.busy([0, 1])
    counts = drive.machine.counts()
    assert (counts.transfers, counts.quarantined_blocks, counts.agents) == (0, 0, 0)


def test_other_pulls_go_on_while_an_agent_is_retired_and_new_ones_use_its_successor() -> None:
    drive = Drive(linger_limit_s=60)
    job = stuck(drive)
    drive.connect("B", BOOT_B)
    drive.step(58.0)
    healthy = drive.submit([4], "B", BOOT_B, within_s=30)
    drive.step()
    assert drive.step(2.0) == [], "the agent still has a healthy pull"
    assert not drive.agents.made[0].closed
    fresh = drive.submit([6], "B", BOOT_B)
    drive.step()
    assert [agent.number for agent in drive.agents.made] == [1, 2]
    assert drive.agent.peers == [BOOT_B], "introduced again with the offer it gave"
    drive.agents.made[0].end(TransferState.DONE, BOOT_B)
    drive.agent.end()
    events = drive.step()
    assert {e.job_id for e in events if isinstance(e, Pulled)} == {healthy, fresh}
    assert Released(job, (0, 1), Proof.AGENT_DESTROYED) in events


def test_a_healthy_pull_cannot_keep_a_retired_agent_past_its_own_deadline() -> None:
    drive = Drive(linger_limit_s=10)
    stuck(drive)
    drive.connect("B", BOOT_B)
    slow = drive.submit([4], "B", BOOT_B, within_s=15)
    drive.step()
    drive.step(10.0)
    assert not drive.agents.made[0].closed
    events = drive.step(5.0)
    assert PullFailed(slow, FailReason.DEADLINE, quarantined=(4,)) in events
    assert Released(slow, (4,), Proof.AGENT_DESTROYED) in events
    assert drive.machine.counts().quarantined_blocks == 0


def test_an_agent_that_cannot_be_destroyed_keeps_its_blocks_and_is_tried_again() -> None:
    drive = Drive(linger_limit_s=10, retry_s=1)
    job = stuck(drive)
    drive.agent.close_error = AgentError("destroy agent", "something still refers to it")
    for _ in range(50):
        assert drive.step(10.0) == []
    assert drive.machine.busy([0, 1])
    drive.agent.close_error = None
    assert drive.step(1.0) == [Released(job, (0, 1), Proof.AGENT_DESTROYED)]


def test_an_error_that_does_not_say_whether_writes_may_land_retires_the_agent_at_once() -> None:
    drive = Drive()
    drive.connect()
    job = drive.submit([0, 1])
    drive.step()
    drive.agent.end(TransferState.UNKNOWN)
    events = drive.step()
    assert PullFailed(job, FailReason.AGENT, quarantined=(0, 1)) in events
    assert Released(job, (0, 1), Proof.AGENT_DESTROYED) in [*events, *drive.step()]
    assert drive.agents.made[0].closed


def test_a_post_that_fails_half_way_is_held_like_a_transfer() -> None:
    drive = Drive()
    drive.connect()
    drive.agent.post_state = TransferState.UNKNOWN
    job = drive.submit([0, 1])
    drive.machine.poll(drive.now_s)
    assert drive.machine.take(drive.now_s) == [PullFailed(job, FailReason.AGENT, quarantined=(0, 1))]
    assert drive.machine.busy([0])
    assert drive.step() == [Released(job, (0, 1), Proof.AGENT_DESTROYED)]


def test_pulls_wait_while_no_agent_can_be_made_and_it_is_tried_again() -> None:
    drive = Drive(linger_limit_s=10, retry_s=1)
    stuck(drive)
    drive.step(10.0)
    drive.connect("B", BOOT_B)
    drive.agents.error = AgentError("create backend UCX", "out of descriptors")
    job = drive.submit([4], "B", BOOT_B, within_s=5)
    drive.step()
    drive.step(0.5)
    assert drive.machine.next_poll_s(drive.now_s) == 0.5
    drive.agents.error = None
    drive.step(0.5)
    drive.agent.end()
    assert job in [e.job_id for e in drive.step() if isinstance(e, Pulled)]


def test_polls_are_rare_while_nothing_moves() -> None:
    drive = Drive(linger_limit_s=30, linger_interval_s=0.02, longest_poll_s=1e-3)
    drive.connect("A", BOOT_A)
    drive.connect("B", BOOT_B)
    drive.submit([0, 1], "A", BOOT_A, within_s=1)
    drive.submit([4], "B", BOOT_B, within_s=40)
    polls, begun_s = 0, drive.now_s
    while drive.now_s < begun_s + 50:
        drive.step()
        polls += 1
        pause_s = drive.machine.next_poll_s(drive.now_s)
        if pause_s is None:
            break
        assert pause_s > 0 or polls < 20
        drive.now_s += pause_s
    assert drive.machine.counts().quarantined_blocks == 0
    assert polls < 50 / 1e-3
    assert drive.machine.next_poll_s(drive.now_s) is None


def test_a_poll_is_due_while_blocks_are_held_or_an_agent_is_still_to_be_destroyed() -> None:
    drive = Drive(linger_limit_s=10, linger_interval_s=0.02, retry_s=1)
    job = stuck(drive)
    assert drive.machine.next_poll_s(drive.now_s) == pytest.approx(0.02)
    drive.agent.close_error = AgentError("destroy agent", "something still refers to it")
    for _ in range(3):
        drive.step(10.0)
    drive.agents.made[0].end()
    assert drive.step(1.0) == [Released(job, (0, 1), Proof.FINISHED)]
    due_s = drive.machine.next_poll_s(drive.now_s)
    assert due_s is not None
    assert 0 <= due_s <= 1
    drive.agents.made[0].close_error = None
    drive.step(due_s)
    assert drive.agents.made[0].closed
    assert drive.machine.next_poll_s(drive.now_s) is None


def test_an_idle_engine_asks_for_no_poll() -> None:
    drive = Drive()
    assert drive.machine.next_poll_s(drive.now_s) is None
    drive.connect()
    drive.agent.post_state = TransferState.DONE
    drive.submit([0, 1])
    drive.step()
    assert drive.machine.next_poll_s(drive.now_s) is None


def test_waiting_for_a_healthy_pull_before_an_agent_can_be_destroyed_is_no_busy_wait() -> None:
    drive = Drive()
    drive.connect("A", BOOT_A)
    drive.connect("B", BOOT_B)
    drive.submit([0], "A", BOOT_A)
    drive.submit([4], "B", BOOT_B, within_s=30)
    drive.step()
    drive.agent.end(TransferState.UNKNOWN, BOOT_A)
    drive.step()
    for _ in range(12):
        drive.step(0.01)
    assert not drive.agents.made[0].closed
    assert drive.machine.next_poll_s(drive.now_s) == pytest.approx(drive.config.longest_poll_s)
