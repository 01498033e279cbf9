# SPDX-License-Identifier: Apache-2.0
"""Peers that die, restart, fall silent or never connect."""

from __future__ import annotations

import msgspec
import pytest

from engine_ext.transfer.agent import TransferState
from engine_ext.transfer.errors import AgentError
from engine_ext.transfer.events import FailReason, PeerLost, Proof, Pulled, PullFailed, Released

from .scripted import BLOCK_BYTES, BOOT_A, BOOT_B, Drive, offer


def failures(events: list[object]) -> dict[int, FailReason]:
    return {event.job_id: event.reason for event in events if isinstance(event, PullFailed)}


def test_a_pull_from_an_unknown_peer_is_refused() -> None:
    drive = Drive()
    job = drive.submit([0], "nobody")
    assert drive.step() == [PullFailed(job, FailReason.UNKNOWN_PEER)]


def test_a_dead_peer_fails_its_pulls_and_no_others() -> None:
    drive = Drive()
    drive.connect("A", BOOT_A)
    drive.connect("B", BOOT_B)
    dead = [drive.submit([0, 1], "A", BOOT_A), drive.submit([2, 3], "A", BOOT_A, within_s=9)]
    alive = drive.submit([4], "B", BOOT_B)
    drive.step()
    drive.step()
    drive.agent.end(TransferState.GONE, BOOT_A)
    events = drive.step()
    assert failures(events) == dict.fromkeys(dead, FailReason.PEER_GONE)
    assert events.count(PeerLost("A", BOOT_A, FailReason.PEER_GONE)) == 1
    drive.agent.end()
    assert [e.job_id for e in drive.step() if isinstance(e, Pulled)] == [alive]
    late = drive.submit([9], "A", BOOT_A)
    assert failures(drive.step()) == {late: FailReason.PEER_GONE}


def test_blocks_of_a_failed_connection_settle_before_they_are_released() -> None:
    drive = Drive(settle_s=0.5)
    drive.connect()
    job = drive.submit([0, 1, 2, 3])
    drive.step()
    drive.agent.end(TransferState.GONE)
    events = drive.step()
    assert events[0] == PullFailed(job, FailReason.PEER_GONE, quarantined=(0, 1, 2, 3))
    assert drive.step(0.4) == []
    assert drive.agent.peers == [BOOT_A], "not removed under its handles"
    assert set(drive.step(0.2)) == {
        Released(job, (0, 1), Proof.CONNECTION_ENDED),
        Released(job, (2, 3), Proof.CONNECTION_ENDED),
    }
    assert drive.agent.peers == []
    assert drive.machine.counts().transfers == 0


def test_a_restarted_peer_gets_a_new_session_and_the_old_boot_id_is_refused() -> None:
    drive = Drive()
    drive.connect("A", BOOT_A)
    old = drive.submit([0, 1], "A", BOOT_A)
    drive.step()
    drive.connect("A", BOOT_B)
    assert failures(drive.step()) == {old: FailReason.PEER_RESTARTED}
    stale = drive.submit([5], "A", BOOT_A)
    assert failures(drive.step()) == {stale: FailReason.STALE_BOOT}
    fresh = drive.submit([5], "A", BOOT_B)
    drive.step()
    assert drive.agent.peers == [BOOT_A, BOOT_B]
    drive.agent.end(TransferState.DONE, BOOT_B)
    assert Pulled(fresh, BLOCK_BYTES, 0.0) in drive.step()
    drive.agent.end(TransferState.DONE)
    assert drive.step(0.1) == [Released(old, (0, 1), Proof.FINISHED)]
    assert drive.agent.peers == [BOOT_B], "the old incarnation leaves once its transfers are over"


def test_the_same_incarnation_connects_anew_only_after_its_old_transfers_are_over() -> None:
    drive = Drive(settle_s=0.5)
    drive.connect()
    drive.submit([0, 1])
    drive.step()
    drive.agent.end(TransferState.GONE)
    drive.step()
    drive.connect()
    job = drive.submit([5], within_s=9)
    assert drive.step() == []
    assert [t.destination for t in drive.agent.transfers.values()] == [[0, 1]]
    drive.step(0.6)
    drive.step()
    drive.agent.end()
    assert [e.job_id for e in drive.step() if isinstance(e, Pulled)] == [job]
    assert drive.agent.peers == [BOOT_A]


def test_fresh_metadata_of_the_same_incarnation_replaces_what_the_agent_had_loaded() -> None:
    drive = Drive()
    drive.connect()
    drive.agent.post_error = AgentError("post", "stale descriptors")
    job = drive.submit([0])
    assert failures(drive.step()) == {job: FailReason.AGENT}
    drive.connect()
    drive.step()
    assert drive.agent.added == [offer()], "the same metadata is not loaded twice"
    fresh = msgspec.structs.replace(offer(), metadata=b"registered anew")
    drive.machine.connect("A", fresh, drive.now_s)
    drive.agent.post_error = None
    drive.submit([0])
    drive.step()
    assert drive.agent.added == [offer(), fresh]
    assert drive.agent.peers == [BOOT_A]
    drive.agent.end()
    assert [type(event) for event in drive.step()] == [Pulled]


def test_a_silent_peer_is_not_asked_again_until_it_connects() -> None:
    drive = Drive()
    drive.connect()
    drive.submit([0])
    drive.step()
    assert PeerLost("A", BOOT_A, FailReason.PEER_SILENT) in drive.step(1.0)
    refused = drive.submit([1])
    assert failures(drive.step()) == {refused: FailReason.PEER_SILENT}
    drive.connect()
    accepted = drive.submit([1])
    assert drive.step() == []
    drive.agent.end()
    assert accepted in [e.job_id for e in drive.step() if isinstance(e, Pulled)]


def test_a_peer_that_thaws_is_asked_again() -> None:
    drive = Drive()
    drive.connect()
    drive.submit([0])
    drive.step()
    drive.step(1.0)
    drive.agent.end()
    drive.step(0.1)
    drive.submit([1])
    assert drive.step() == []


def test_a_slow_peer_that_delivers_is_not_silent() -> None:
    drive = Drive(depth=1)
    drive.connect()
    drive.submit([0, 1, 2, 3])
    drive.step()
    drive.agent.end()
    drive.step(0.5)
    events = drive.step(0.5)
    assert not [event for event in events if isinstance(event, PeerLost)]
    drive.submit([8])
    assert drive.step() == []


def test_a_pull_that_only_waited_its_turn_tells_nothing_of_its_peer() -> None:
    drive = Drive(depth=1)
    drive.connect()
    drive.submit([0], within_s=9)
    drive.step()
    drive.submit([1], within_s=1)
    events = drive.step(1.0)
    assert [type(event) for event in events] == [PullFailed]


def test_stuck_transfers_count_against_their_peer_s_depth() -> None:
    drive = Drive(depth=2)
    drive.connect()
    drive.submit(list(range(10)))
    drive.step()
    drive.step(1.0)
    drive.connect()
    drive.submit([50, 51, 52], within_s=9)
    drive.step()
    assert len(drive.agent.transfers) == 2, "the quarantine of one peer is bounded by its depth"


def test_an_unusable_offer_ends_the_session_before_a_pull_waits_for_it() -> None:
    drive = Drive(warm_up_s=0.25)
    drive.agent.peer_error = AgentError("load metadata", "connection refused")
    drive.connect()
    job = drive.submit([0])
    events = drive.step()
    assert failures(events) == {job: FailReason.AGENT}
    assert PeerLost("A", BOOT_A, FailReason.AGENT) in events
    assert drive.step(0.1) == []


def test_a_new_connection_is_driven_on_before_its_first_pull() -> None:
    drive = Drive(warm_up_s=0.25, longest_poll_s=1e-3)
    drive.connect()
    drive.step()
    assert drive.agent.peers == [BOOT_A]
    assert drive.machine.next_poll_s(drive.now_s) == pytest.approx(1e-3)
    drive.step(0.1)
    assert drive.agent.progressed == 2
    drive.step(0.2)
    assert drive.machine.next_poll_s(drive.now_s) is None


def test_a_forgotten_peer_s_pulls_fail() -> None:
    drive = Drive()
    drive.connect()
    job = drive.submit([0])
    drive.step()
    drive.machine.forget("A", drive.now_s)
    drive.machine.forget("A", drive.now_s)
    assert failures(drive.step()) == {job: FailReason.PEER_GONE}
    assert drive.machine.counts().peers == 0
