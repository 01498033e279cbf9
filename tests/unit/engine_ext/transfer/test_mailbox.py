# SPDX-License-Identifier: Apache-2.0
"""What the owner of the thread is told when its own deadline and the thread's verdict disagree."""

from __future__ import annotations

from engine_ext.transfer.events import FailReason, JobId, PeerLost, Proof, Pulled, PullFailed, Released
from engine_ext.transfer.mailbox import Mailbox

JOB = JobId(1)


def opened(deadline_s: float = 10.0) -> Mailbox:
    mailbox = Mailbox()
    mailbox.opened(JOB, [4, 5, 6], deadline_s)
    return mailbox


def test_a_verdict_in_time_passes_unchanged() -> None:
    pulled = Pulled(JOB, 3000, 0.5)
    mailbox = opened()
    assert mailbox.take([pulled], 9.0) == [pulled]
    assert mailbox.take([], 11.0) == []


def test_a_verdict_that_was_in_time_counts_even_when_it_is_read_late() -> None:
    pulled = Pulled(JOB, 3000, 0.5)
    assert opened().take([pulled], 11.0) == [pulled]


def test_a_pull_fails_at_its_deadline_without_the_thread() -> None:
    failed = PullFailed(JOB, FailReason.DEADLINE, quarantined=(4, 5, 6))
    assert opened().take([], 10.0) == [failed]


def test_after_that_an_end_in_time_only_frees_the_blocks() -> None:
    mailbox = opened()
    mailbox.take([], 10.0)
    assert mailbox.take([Pulled(JOB, 3000, 0.5)], 10.1) == [Released(JOB, (4, 5, 6), Proof.FINISHED)]


def test_after_that_the_thread_s_failure_frees_what_it_does_not_hold() -> None:
    mailbox = opened()
    mailbox.take([], 10.0)
    verdict = PullFailed(JOB, FailReason.DEADLINE, arrived=(4,), quarantined=(5,))
    assert mailbox.take([verdict], 10.1) == [Released(JOB, (4, 6), Proof.FINISHED)]
    last = Released(JOB, (5,), Proof.AGENT_DESTROYED)
    assert mailbox.take([last], 10.2) == [last]


def test_an_aborted_pull_fails_at_once_and_once() -> None:
    mailbox = opened()
    assert mailbox.aborted(JOB) == [PullFailed(JOB, FailReason.ABORTED, quarantined=(4, 5, 6))]
    assert mailbox.aborted(JOB) == []
    assert mailbox.take([], 11.0) == []
    verdict = PullFailed(JOB, FailReason.ABORTED, quarantined=(4, 5, 6))
    assert mailbox.take([verdict], 11.0) == []


def test_other_events_pass() -> None:
    lost = PeerLost("A", "a" * 32, FailReason.PEER_GONE)
    assert Mailbox().take([lost], 0.0) == [lost]
