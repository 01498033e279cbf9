# SPDX-License-Identifier: Apache-2.0
"""Pulls that share a transfer: one post and one completion for all, and yet each with its own end."""

from __future__ import annotations

from engine_ext.transfer.agent import TransferState
from engine_ext.transfer.errors import AgentError, PeerGoneError
from engine_ext.transfer.events import FailReason, PeerLost, Proof, Pulled, PullFailed, Released

from .scripted import BLOCK_BYTES, BOOT_B, Drive


def joined(**options: object) -> Drive:
    """Parts of up to four blocks, pulls joined up to four."""
    sizes = {"part_bytes": 4 * BLOCK_BYTES, "join_bytes": 4 * BLOCK_BYTES}
    drive = Drive(**{**sizes, **options})
    drive.connect()
    return drive


def under_way(drive: Drive) -> list[list[int]]:
    return [transfer.destination for transfer in drive.agent.transfers.values()]


def test_pulls_that_wait_together_are_one_transfer_and_each_is_told() -> None:
    drive = joined()
    first, second = drive.submit([5]), drive.submit([2, 9])
    drive.step()
    assert under_way(drive) == [[2, 5, 9]]
    assert [t.source for t in drive.agent.transfers.values()] == [[102, 105, 109]]
    drive.agent.end()
    told = drive.step(0.1)
    assert [(e.job_id, e.size_bytes) for e in told if isinstance(e, Pulled)] == [
        (first, BLOCK_BYTES),
        (second, 2 * BLOCK_BYTES),
    ]
    assert not drive.agent.transfers


def test_a_joined_transfer_that_is_copied_inside_its_post_ends_all_its_pulls_at_once() -> None:
    drive = joined()
    drive.agent.post_state = TransferState.DONE
    jobs = [drive.submit([block]) for block in (3, 1, 2)]
    assert [e.job_id for e in drive.step() if isinstance(e, Pulled)] == jobs
    assert not drive.agent.transfers
    assert drive.machine.counts().open_blocks == 0


def test_no_more_are_joined_than_the_bound_allows() -> None:
    drive = joined(join_bytes=2 * BLOCK_BYTES)
    for block in (1, 2, 3):
        drive.submit([block])
    drive.step()
    assert under_way(drive) == [[1, 2], [3]]


def test_a_bound_of_nothing_gives_each_its_own() -> None:
    drive = joined(join_bytes=0)
    drive.submit([1])
    drive.submit([2])
    drive.step()
    assert under_way(drive) == [[1], [2]]


def test_pulls_of_different_peers_are_never_joined() -> None:
    drive = joined()
    drive.connect("B", BOOT_B)
    drive.submit([1])
    drive.submit([2], "B", BOOT_B)
    drive.step()
    assert under_way(drive) == [[1], [2]]


def test_the_tail_of_a_long_pull_goes_with_a_short_one() -> None:
    drive = joined(depth=3)
    drive.submit([1, 2, 3, 4, 5])
    drive.submit([9])
    drive.step()
    assert under_way(drive) == [[1, 2, 3, 4], [5, 9]]


def test_a_deadline_fails_its_own_pull_and_the_transfer_goes_on_for_the_others() -> None:
    drive = joined()
    short, long = drive.submit([1], within_s=0.5), drive.submit([2], within_s=2.0)
    drive.step()
    failed = drive.step(0.6)
    assert PullFailed(short, FailReason.DEADLINE, quarantined=(1,)) in failed
    assert drive.machine.busy([1])
    drive.connect()
    drive.agent.end()
    released, pulled = drive.step(0.1)
    assert released == Released(short, (1,), Proof.FINISHED)
    assert isinstance(pulled, Pulled)
    assert (pulled.job_id, pulled.size_bytes) == (long, BLOCK_BYTES)
    assert not drive.machine.busy([1, 2])
    assert not drive.agent.transfers


def test_a_transfer_that_nobody_waits_for_any_more_is_asked_from_quarantine() -> None:
    drive = joined(linger_interval_s=0.02)
    jobs = [drive.submit([1]), drive.submit([2])]
    drive.step()
    for job in jobs:
        drive.machine.abort(job, drive.now_s)
    drive.step()
    checks = drive.agent.checks
    drive.step(0.001)
    assert drive.agent.checks == checks
    drive.agent.end()
    released = drive.step(0.02)
    assert released == [
        Released(job, (block,), Proof.FINISHED) for job, block in zip(jobs, (1, 2), strict=True)
    ]


def test_a_connection_that_fails_ends_all_and_each_pulls_blocks_are_released() -> None:
    drive = joined(settle_s=0.5)
    jobs = [drive.submit([1]), drive.submit([2])]
    drive.step()
    drive.machine.abort(jobs[0], drive.now_s)
    drive.agent.end(TransferState.GONE)
    told = drive.step(0.1)
    assert PullFailed(jobs[1], FailReason.PEER_GONE, quarantined=(2,)) in told
    assert [type(event) for event in told].count(PeerLost) == 1
    assert drive.step(0.3) == []
    assert drive.step(0.3) == [
        Released(job, (block,), Proof.CONNECTION_ENDED) for job, block in zip(jobs, (1, 2), strict=True)
    ]


def test_an_end_that_says_nothing_fails_all_and_the_agent_is_replaced() -> None:
    drive = joined()
    jobs = [drive.submit([1]), drive.submit([2])]
    drive.step()
    drive.agent.end(TransferState.UNKNOWN)
    told = drive.step(0.1) + drive.step(0.1)
    assert [e.job_id for e in told if isinstance(e, PullFailed)] == jobs
    assert [(e.job_id, e.proof) for e in told if isinstance(e, Released)] == [
        (job, Proof.AGENT_DESTROYED) for job in jobs
    ]
    assert drive.agents.made[0].closed


def test_a_transfer_that_lingers_for_one_serves_the_other_to_its_end_on_a_retired_agent() -> None:
    drive = joined(linger_limit_s=1.0)
    short, long = drive.submit([1], within_s=0.5), drive.submit([2], within_s=9.0)
    drive.step()
    drive.step(0.6)
    drive.connect()
    drive.step(1.1)
    assert not drive.agents.made[0].closed, "an open pull needs it"
    drive.submit([3], within_s=5.0)
    drive.step()
    assert drive.agent.number == 2
    drive.agents.made[0].end()
    told = drive.step(0.1)
    assert Released(short, (1,), Proof.FINISHED) in told
    assert [e.job_id for e in told if isinstance(e, Pulled)] == [long]


def test_a_post_that_is_refused_fails_all_its_pulls_and_holds_nothing() -> None:
    for error, reason in (
        (AgentError("make transfer", "no"), FailReason.AGENT),
        (PeerGoneError("make transfer", "gone"), FailReason.PEER_GONE),
    ):
        drive = joined()
        drive.agent.post_error = error
        jobs = [drive.submit([1]), drive.submit([2])]
        told = drive.step()
        assert [(e.job_id, e.reason, e.quarantined) for e in told if isinstance(e, PullFailed)] == [
            (job, reason, ()) for job in jobs
        ]
        assert not drive.machine.busy([1, 2])
