# SPDX-License-Identifier: Apache-2.0
"""Sources that come back as another incarnation at the same address."""

from __future__ import annotations

from engine_ext.transfer.control.peer import NotFoundReason
from engine_ext.transfer.events import FailReason

from .sessions import A, B, failures, found, reasons
from .world import World


def test_a_restart_between_two_finds_is_found_out_by_the_first_word_of_the_new_incarnation() -> None:
    world = World()
    world.host().holds = {b"x": 1}
    leased = world.find(b"x")
    world.host(boot_id=B).holds = {b"x": 2}
    unlucky = world.find(b"x")
    assert reasons(world, unlucky) == [NotFoundReason.PEER_RESTARTED]
    lucky = world.find(b"x")
    assert found(world, lucky) == {b"x"}
    assert world.transfers.connected == [A, B]
    stale = world.pull(leased, {b"x": 10})
    assert failures(world, stale) == [FailReason.LEASE]
    world.pull(lucky, {b"x": 10})
    (request,) = world.transfers.jobs.values()
    assert (request.boot_id, request.source) == (B, [2])


def test_pulls_from_a_former_incarnation_fail_and_nothing_of_them_is_used() -> None:
    world = World()
    world.host().holds = {b"x": 1}
    find = world.find(b"x")
    pull = world.pull(find, {b"x": 10}, within_s=60)
    world.host(boot_id=B)
    world.run(3.1)  # the next renewal
    assert failures(world, pull) == [FailReason.PEER_RESTARTED]
    assert world.reader.finds == 0


def test_a_restart_while_a_handshake_is_under_way_ends_only_what_the_former_one_was_asked() -> None:
    world = World()
    world.host().holds = {b"x": 1}
    find = world.find(b"x")
    pull = world.pull(find, {b"x": 10}, within_s=60)
    world.lost(FailReason.PEER_GONE)
    world.step()
    world.host(boot_id=B).holds = {b"x": 2}
    fresh = world.find(b"x")
    assert found(world, fresh) == {b"x"}
    assert failures(world, pull) == [FailReason.PEER_RESTARTED]


def test_a_peer_that_restarts_again_and_again_is_always_asked_in_its_present_life() -> None:
    world = World()
    for life in range(20):
        world.host(boot_id=f"{life:032x}".replace("0", "f")).holds = {b"x": life}
        find = world.find(b"x")
        if reasons(world, find):
            find = world.find(b"x")
        assert found(world, find) == {b"x"}
        world.pull(find, {b"x": 1})
        (request,) = world.transfers.jobs.values()
        assert request.source == [life]
        assert request.boot_id == world.hosts["a:1"].boot_id
        world.transfers.finish()
        world.step()
    assert world.reader.finds <= 20
    world.run(20)
    assert world.hosts["a:1"].source.lookups <= 1


def test_a_word_of_a_former_incarnation_that_comes_late_leases_nothing() -> None:
    world = World()
    world.host().holds = None
    find = world.find(b"x", within_s=60)
    old = world.hosts["a:1"]
    old.source.reply(old.asked()[0].lookup_id, {b"x": 1}, world.now_s)
    ((_, late),) = old.outbox
    world.host(boot_id=B).holds = {b"x": 2}
    world.find(b"x")
    fresh = world.find(b"x")
    assert found(world, fresh) == {b"x"}
    world.reader.receive("a:1", late, world.now_s)
    world.step()
    assert reasons(world, find) == [NotFoundReason.PEER_RESTARTED]
