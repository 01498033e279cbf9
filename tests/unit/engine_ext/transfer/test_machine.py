# SPDX-License-Identifier: Apache-2.0
"""Pulls that go well, and pulls that fail: what their owner is told, and which blocks it may use."""

from __future__ import annotations

import pytest

from engine_ext.transfer.agent import TransferState
from engine_ext.transfer.errors import AgentError, PeerGoneError
from engine_ext.transfer.events import FailReason, PeerLost, Proof, Pulled, PullFailed, Released
from engine_ext.transfer.machine import Machine

from .scripted import BLOCK_BYTES, BOOT_A, BOOT_B, OURS, Drive, ScriptedAgents


def test_a_pull_ends_when_its_last_part_does() -> None:
    drive = Drive()
    drive.connect()
    job = drive.submit([0, 1, 2])
    assert drive.step() == []
    assert [t.destination for t in drive.agent.transfers.values()] == [[0, 1], [2]]
    drive.agent.transfers[1].state = TransferState.DONE
    assert drive.step(0.1) == []
    assert drive.machine.busy([0])
    drive.agent.end()
    (pulled,) = drive.step(0.1)
    assert isinstance(pulled, Pulled)
    assert (pulled.job_id, pulled.size_bytes) == (job, 3 * BLOCK_BYTES)
    assert pulled.seconds == pytest.approx(0.2)
    assert not drive.machine.busy([0, 1, 2])
    counts = drive.machine.counts()
    assert (counts.transfers, counts.open_jobs, counts.open_blocks, counts.pulled_bytes) == (0, 0, 0, 3000)


def test_a_transfer_that_ends_inside_its_post_needs_no_check() -> None:
    drive = Drive()
    drive.connect()
    drive.agent.post_state = TransferState.DONE
    job = drive.submit([0, 1])
    assert drive.step() == [Pulled(job, 2 * BLOCK_BYTES, 0.0)]
    assert drive.agent.checks == 0


def test_a_poll_copies_one_part_s_worth_where_posts_copy() -> None:
    drive = Drive(depth=4)
    drive.connect()
    drive.agent.post_state = TransferState.DONE
    job = drive.submit([0, 1, 2, 3, 4])
    drive.machine.poll(drive.now_s)
    assert drive.machine.next_poll_s(drive.now_s) == 0.0
    assert drive.step() == []
    assert drive.step() == [Pulled(job, 5 * BLOCK_BYTES, 0.0)]


def test_no_more_parts_than_the_depth_are_under_way_with_a_peer() -> None:
    drive = Drive(depth=3)
    drive.connect()
    drive.submit(list(range(20)))
    for _ in range(3):
        drive.step()
        assert len(drive.agent.transfers) == 3
        drive.agent.end()


def test_pulls_of_one_peer_and_pulls_of_other_peers_take_turns() -> None:
    drive = Drive(depth=2)
    drive.connect("A", BOOT_A)
    drive.connect("B", BOOT_B)
    drive.submit(list(range(40)), "A", BOOT_A)
    short = drive.submit([50], "A", BOOT_A)
    other = drive.submit([60], "B", BOOT_B)
    ended = []
    for _ in range(3):
        ended.extend(drive.step())
        drive.agent.end()
    assert {event.job_id for event in ended if isinstance(event, Pulled)} == {short, other}


def test_at_its_deadline_a_pull_fails_at_once_and_only_what_was_posted_stays_in_quarantine() -> None:
    drive = Drive()
    drive.connect()
    job = drive.submit([0, 1, 2, 3, 4, 5])
    drive.step()
    drive.agent.transfers[1].state = TransferState.DONE
    drive.step(0.5)
    failed = drive.step(0.5)[0]
    assert failed == PullFailed(job, FailReason.DEADLINE, arrived=(0, 1), quarantined=(2, 3, 4, 5))
    assert not drive.machine.busy([0, 1])
    assert drive.machine.busy([2])
    assert drive.machine.counts().quarantined_blocks == 4


def test_a_part_that_was_never_posted_is_free_at_the_deadline() -> None:
    drive = Drive(depth=1)
    drive.connect()
    job = drive.submit([0, 1, 2, 3])
    drive.step()
    assert drive.step(1.0)[0] == PullFailed(job, FailReason.DEADLINE, quarantined=(0, 1))
    drive.agent.end()
    drive.step(1.0)
    assert drive.agent.transfers == {}, "nothing of a failed pull is posted later"


def test_a_late_end_releases_the_blocks_and_until_then_no_pull_gets_them() -> None:
    drive = Drive(depth=4)
    drive.connect()
    late = drive.submit([0, 1])
    drive.step()
    drive.step(1.0)
    drive.connect()
    refused = drive.submit([1, 2])
    assert drive.step() == [PullFailed(refused, FailReason.DESTINATION_BUSY)]
    drive.agent.end()
    assert drive.step(0.1) == [Released(late, (0, 1), Proof.FINISHED)]
    assert drive.machine.counts().transfers == 0
    again = drive.submit([1, 2])
    drive.step()
    drive.agent.end()
    assert drive.step() == [Pulled(again, 2 * BLOCK_BYTES, 0.0)]


def test_bytes_that_are_seen_only_after_the_deadline_are_not_used() -> None:
    drive = Drive()
    drive.connect()
    job = drive.submit([0, 1])
    drive.step()
    drive.agent.end()
    assert drive.step(1.0) == [PullFailed(job, FailReason.DEADLINE)], "nor are they called arrived"
    assert not drive.machine.busy([0, 1])


def test_a_process_stopped_between_poll_and_take_does_not_use_what_arrived() -> None:
    drive = Drive()
    drive.connect()
    job = drive.submit([0, 1, 2])
    drive.step()
    drive.agent.end()
    drive.machine.poll(drive.now_s)
    assert drive.machine.take(drive.now_s + 30.0) == [PullFailed(job, FailReason.DEADLINE)]
    assert not drive.machine.busy([0, 1, 2])


def test_an_aborted_pull_keeps_its_posted_blocks_until_they_are_over() -> None:
    drive = Drive(depth=1)
    drive.connect()
    job = drive.submit([0, 1, 2, 3])
    drive.step()
    drive.machine.abort(job, drive.now_s)
    drive.machine.abort(job, drive.now_s)
    assert drive.step() == [PullFailed(job, FailReason.ABORTED, quarantined=(0, 1))]
    drive.agent.end()
    assert drive.step(0.1) == [Released(job, (0, 1), Proof.FINISHED)]
    assert drive.machine.counts().quarantined_blocks == 0


@pytest.mark.parametrize(
    ("source", "destination", "reason"),
    [
        ([], [], FailReason.BAD_BLOCKS),
        ([1, 2], [1], FailReason.BAD_BLOCKS),
        ([1, 2], [3, 3], FailReason.BAD_BLOCKS),
        ([1], [100], FailReason.BAD_BLOCKS),
        ([1], [-1], FailReason.BAD_BLOCKS),
        ([200], [1], FailReason.BAD_BLOCKS),
    ],
)
def test_blocks_that_do_not_exist_or_repeat_are_refused(
    source: list[int], destination: list[int], reason: FailReason
) -> None:
    drive = Drive()
    drive.connect()
    job = drive.submit(destination, source=source)
    assert drive.step() == [PullFailed(job, reason)]
    assert drive.agent.transfers == {}


def test_pulls_above_the_bound_are_refused() -> None:
    drive = Drive(max_jobs=1)
    drive.connect()
    drive.submit([0])
    second = drive.submit([1])
    assert drive.step() == [PullFailed(second, FailReason.TOO_MANY)]


def test_a_refused_post_fails_the_pull_and_leaves_nothing_held() -> None:
    drive = Drive()
    drive.connect()
    drive.agent.post_error = AgentError("make transfer", "no")
    job = drive.submit([0, 1])
    failed = drive.step()
    assert failed == [PullFailed(job, FailReason.AGENT, detail="make transfer: no")]
    assert not drive.machine.busy([0, 1])


def test_a_post_to_a_lost_connection_ends_the_session() -> None:
    drive = Drive()
    drive.connect()
    drive.agent.post_error = PeerGoneError("make transfer", "disconnected")
    first, second = drive.submit([0]), drive.submit([1])
    events = drive.step()
    assert {e.job_id: e.reason for e in events if isinstance(e, PullFailed)} == {
        first: FailReason.PEER_GONE,
        second: FailReason.PEER_GONE,
    }
    assert PeerLost("A", BOOT_A, FailReason.PEER_GONE) in events
    assert drive.agent.peers == []


def test_a_failed_first_registration_is_raised() -> None:
    drive = Drive()
    with pytest.raises(AgentError, match="register"):
        Machine(drive.config, OURS, ScriptedAgents(error=AgentError("register with UCX", "no memory")))


def test_closing_fails_every_pull_and_destroys_the_agent() -> None:
    drive = Drive()
    drive.connect()
    job = drive.submit([0, 1])
    drive.step()
    assert drive.machine.close(drive.now_s)
    assert drive.machine.take(drive.now_s) == [
        PullFailed(job, FailReason.CLOSED, quarantined=(0, 1)),
        Released(job, (0, 1), Proof.AGENT_DESTROYED),
    ]
    assert drive.agent.closed
    after = drive.submit([2])
    assert drive.step() == [PullFailed(after, FailReason.CLOSED)]
    assert len(drive.agents.made) == 1


def test_closing_says_so_while_an_agent_cannot_be_destroyed() -> None:
    drive = Drive()
    drive.agent.close_error = AgentError("destroy agent", "something still refers to it")
    assert not drive.machine.close(drive.now_s)
    drive.agent.close_error = None
    assert drive.machine.close(drive.now_s)
