# SPDX-License-Identifier: Apache-2.0
"""What the transfer layer says of a session, and the one second try with fresh metadata."""

from __future__ import annotations

import pytest

from engine_ext.transfer.control.peer import NotFoundReason
from engine_ext.transfer.events import FailReason, JobId, Pulled, PullFailed

from .sessions import A, B, failures, found, knocks, reasons
from .world import World


@pytest.mark.parametrize(
    "reason",
    [
        FailReason.STALE_BOOT,
        FailReason.PEER_GONE,
        FailReason.AGENT,
        FailReason.PEER_SILENT,
        FailReason.UNKNOWN_PEER,
    ],
)
def test_a_pull_that_failed_before_any_byte_is_tried_once_more_with_fresh_metadata(
    reason: FailReason,
) -> None:
    world = World()
    world.host().holds = {b"x": 1}
    pull = world.pull(world.find(b"x"), {b"x": 10})
    world.transfers.fail(reason)
    world.step(0.1)
    assert world.told(pull) == []
    assert knocks(world) == 2
    assert world.transfers.connected == [A, A]
    assert len(world.transfers.jobs) == 1
    world.transfers.fail(reason)
    world.step(0.1)
    assert failures(world, pull) == [reason]
    assert knocks(world) == 2, "once"


def test_the_second_try_may_succeed() -> None:
    world = World()
    world.host().holds = {b"x": 1}
    pull = world.pull(world.find(b"x"), {b"x": 10})
    world.transfers.fail(FailReason.STALE_BOOT)
    world.step(0.1)
    world.transfers.finish()
    world.step(0.1)
    (pulled,) = world.told(pull)
    assert isinstance(pulled, Pulled)
    assert pulled.seconds == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("reason", "arrived", "quarantined"),
    [
        (FailReason.PEER_GONE, (10,), ()),
        (FailReason.PEER_GONE, (), (10,)),
        (FailReason.BAD_BLOCKS, (), ()),
        (FailReason.DESTINATION_BUSY, (), ()),
        (FailReason.DEADLINE, (), ()),
    ],
)
def test_no_other_failure_is_tried_again(
    reason: FailReason, arrived: tuple[int, ...], quarantined: tuple[int, ...]
) -> None:
    world = World()
    world.host().holds = {b"x": 1}
    pull = world.pull(world.find(b"x"), {b"x": 10})
    world.transfers.fail(reason, arrived=arrived, quarantined=quarantined)
    world.step()
    assert world.told(pull) == [PullFailed(JobId(pull), reason, arrived, quarantined)]
    assert knocks(world) == 1


def test_a_second_try_that_meets_another_incarnation_fails_as_restarted() -> None:
    world = World()
    world.host().holds = {b"x": 1}
    pull = world.pull(world.find(b"x"), {b"x": 10})
    world.host(boot_id=B)
    world.transfers.fail(FailReason.PEER_GONE)
    world.step()
    assert failures(world, pull) == [FailReason.PEER_RESTARTED]
    assert not world.transfers.jobs


def test_a_second_try_that_meets_nobody_fails_as_the_first_did() -> None:
    world = World(handshake_timeout_s=0.2)
    world.host().holds = {b"x": 1}
    pull = world.pull(world.find(b"x"), {b"x": 10})
    world.silent.add("a:1")
    world.transfers.fail(FailReason.PEER_GONE)
    world.step()
    world.run(0.3)
    assert failures(world, pull) == [FailReason.PEER_GONE]


def test_a_second_try_is_over_at_the_deadline_of_the_pull() -> None:
    world = World(handshake_timeout_s=5)
    world.host().holds = {b"x": 1}
    pull = world.pull(world.find(b"x"), {b"x": 10}, within_s=0.5)
    world.silent.add("a:1")
    world.transfers.fail(FailReason.PEER_GONE)
    world.step()
    world.run(0.4)
    assert failures(world, pull) == []
    world.run(0.2)
    assert failures(world, pull) == [FailReason.DEADLINE]


def test_a_session_that_the_transfer_layer_lost_is_made_anew_by_the_next_find() -> None:
    world = World()
    world.host().holds = {b"x": 1}
    world.find(b"x")
    world.lost(FailReason.PEER_SILENT)
    world.step()
    assert found(world, world.find(b"x")) == {b"x"}
    assert knocks(world) == 2


def test_a_peer_that_did_not_say_a_word_until_a_deadline_is_knocked_at_first_the_next_time() -> None:
    world = World()
    world.host().holds = {b"x": 1}
    world.find(b"x")
    world.silent.add("a:1")
    world.step(0.1)
    lost = world.find(b"x", within_s=0.2)
    world.run(0.3)
    assert reasons(world, lost) == [NotFoundReason.DEADLINE]
    world.silent.clear()
    assert found(world, world.find(b"x")) == {b"x"}
    assert knocks(world) == 2
