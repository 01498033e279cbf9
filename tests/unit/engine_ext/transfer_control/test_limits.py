# SPDX-License-Identifier: Apache-2.0
"""How many peers, lookups and keys a process takes, and how all of it ends."""

from __future__ import annotations

from engine_ext.transfer.control.peer import Found, NotFoundReason
from engine_ext.transfer.control.wire import Ask, Bye, Knock, Release
from engine_ext.transfer.events import FailReason

from .sessions import A, B, C, failures, found, knocks, reasons
from .world import World, side


def test_lookups_and_their_sizes_are_bounded() -> None:
    world = World(max_finds=2, max_keys=3)
    world.host().holds = None
    world.find(b"x"), world.find(b"y")
    assert reasons(world, world.find(b"z")) == [NotFoundReason.TOO_MANY]
    world = World(max_finds=2, max_keys=3)
    assert reasons(world, world.find(b"1", b"2", b"3", b"4")) == [NotFoundReason.TOO_MANY]
    assert reasons(world, world.find(b"k" * 65)) == [NotFoundReason.MALFORMED]
    assert reasons(world, world.find(b"k", tenant="t" * 257)) == [NotFoundReason.MALFORMED]
    assert reasons(world, world.find(b"k", within_s=0)) == [NotFoundReason.DEADLINE]
    empty = world.find()
    assert world.told(empty) == [Found(empty, frozenset(), 0.0)]
    assert world.sent == []


def test_of_too_many_peers_the_one_that_was_idle_longest_makes_room() -> None:
    world = World(max_peers=2)
    for address, boot_id in (("a:1", A), ("b:1", B), ("c:1", C)):
        world.host(address, boot_id).holds = {b"x": 1}
    kept = world.find(b"x", address="a:1")
    world.forget(world.find(b"x", address="b:1"))
    assert found(world, world.find(b"x", address="c:1")) == {b"x"}
    assert world.transfers.forgotten == ["b:1"]
    assert ("b:1", Bye(boot_id="0" * 32, to=B)) in world.sent
    assert world.hosts["b:1"].source.readers == 0
    assert reasons(world, world.find(b"x", address="b:1")) == [NotFoundReason.TOO_MANY], "both are in use"
    world.forget(kept)
    assert found(world, world.find(b"x", address="b:1")) == {b"x"}


def test_a_peer_that_nobody_asks_is_forgotten_and_costs_no_timer_any_more() -> None:
    world = World(idle_s=50)
    world.host().holds = {b"x": 1}
    world.forget(world.find(b"x"))
    world.run(60)
    assert world.transfers.forgotten == ["a:1"]
    assert world.hung_up == ["a:1"]
    assert world.reader.next_s() is None
    assert found(world, world.find(b"x")) == {b"x"}


def test_a_source_forgets_idle_readers_for_new_ones_and_they_come_back_by_themselves() -> None:
    world = World(max_peers=1)
    host = world.host()
    host.holds = {b"x": 1}
    world.forget(world.find(b"x"))
    host.source.receive(b"other", Knock(boot_id=B, hello=side(B).hello()), world.now_s)
    host.outbox.clear()
    assert found(world, world.find(b"x")) == {b"x"}
    assert knocks(world) == 2


def test_a_source_with_as_many_readers_as_it_may_have_says_so() -> None:
    world = World(max_peers=1)
    host = world.host()
    host.source.receive(b"other", Knock(boot_id=B, hello=side(B).hello()), world.now_s)
    ask = Ask(boot_id=B, to=A, id=1, tenant="", keys=(b"k",), within_ms=60_000)
    host.source.receive(b"other", ask, world.now_s)
    host.outbox.clear()
    assert reasons(world, world.find(b"x")) == [NotFoundReason.TOO_MANY]


def test_messages_for_a_former_incarnation_change_nothing_at_the_present_one() -> None:
    world = World()
    host = world.host(boot_id=B)
    host.holds = {b"x": 1}
    world.find(b"x")
    for message in (
        Release(boot_id="0" * 32, to=A, id=1, read=True),
        Bye(boot_id="0" * 32, to=A),
        Ask(boot_id="0" * 32, to=A, id=5, tenant="", keys=(b"k",), within_ms=1000),
    ):
        host.source.receive(b"a:1", message, world.now_s)
    assert (host.source.readers, host.source.lookups) == (1, 1)
    assert host.source.take() == []


def test_after_close_everything_ends_as_closed() -> None:
    world = World()
    world.host().holds = {b"x": 1}
    leased = world.find(b"x")
    pull = world.pull(leased, {b"x": 10})
    world.reader.close()
    world.step()
    assert failures(world, pull) == [FailReason.CLOSED]
    assert reasons(world, world.find(b"x")) == [NotFoundReason.CLOSED]
    assert failures(world, world.pull(leased, {b"x": 1})) == [FailReason.CLOSED]
