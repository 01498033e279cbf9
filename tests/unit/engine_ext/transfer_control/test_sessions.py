# SPDX-License-Identifier: Apache-2.0
"""Sessions with sources: admitted, refused, restarted, silent, gone."""

from __future__ import annotations

from typing import Any

import pytest

from engine_ext.transfer.control.peer import Found, NotFound, NotFoundReason
from engine_ext.transfer.control.wire import Admit, Ask, Bye, Knock, Problem, ProblemKind, Release, encode
from engine_ext.transfer.events import FailReason, JobId, Pulled, PullFailed

from .world import BLOCK_BYTES, World, side

A, B, C = "a" * 32, "b" * 32, "c" * 32


def reasons(world: World, find: int) -> list[NotFoundReason]:
    return [event.reason for event in world.told(find) if isinstance(event, NotFound)]


def failures(world: World, pull: int) -> list[FailReason]:
    return [event.reason for event in world.told(pull) if isinstance(event, PullFailed)]


def knocks(world: World) -> int:
    return sum(isinstance(message, Knock) for _, message in world.sent)


def found(world: World, find: int) -> set[bytes]:
    (event,) = world.told(find)
    assert isinstance(event, Found)
    return set(event.keys)


def test_lookups_queue_behind_one_handshake_and_need_no_other() -> None:
    world = World()
    world.host().holds = {b"x": 1, b"y": 2}
    first, second = world.find(b"x", step=False), world.find(b"y", step=False)
    world.step()
    third = world.find(b"x", b"y")
    assert [found(world, find) for find in (first, second, third)] == [{b"x"}, {b"y"}, {b"x", b"y"}]
    assert knocks(world) == 1
    assert world.transfers.connected == [A]


@pytest.mark.parametrize(
    ("differs", "name"),
    [
        ({"model": "other"}, "model"),
        ({"weights_revision": "other"}, "weights_revision"),
        ({"dtype": "other"}, "dtype"),
        ({"block_length_bytes": 2 * BLOCK_BYTES}, "block_length"),
        ({"layout": "other"}, "layout"),
        ({"tp_map": "other"}, "tp_map"),
        ({"hash_seed": "other"}, "hash_seed"),
        ({"tenant": "other"}, "tenant"),
    ],
)
def test_a_mismatch_is_refused_by_its_name_before_anything_is_asked(
    differs: dict[str, Any], name: str
) -> None:
    world = World()
    host = world.host(**differs)
    find = world.find(b"x")
    (event,) = world.told(find)
    assert isinstance(event, NotFound)
    assert event.reason is NotFoundReason.REFUSED
    assert event.detail.startswith(f"{name}:")
    assert host.source.readers == 0
    assert host.asked() == []
    assert world.transfers.connected == []
    (admit,) = world.received
    assert isinstance(admit, Admit)
    assert b"metadata" not in admit.answer, "a refusal gives nothing away that could be read from"
    assert not any(isinstance(message, Ask) for _, message in world.sent)


def test_a_reader_that_was_refused_cannot_ask_all_the_same() -> None:
    world = World()
    host = world.host(tenant="other")
    world.find(b"x")
    ask = Ask(boot_id="0" * 32, to=A, id=7, tenant="", keys=(b"x",), within_ms=1000)
    host.source.receive(b"a:1", ask, world.now_s)
    world.step()
    assert host.asked() == []
    assert world.received[-1] == Problem(boot_id=A, kind=ProblemKind.STRANGER, id=7)


def test_a_dead_address_costs_one_handshake_and_then_nothing_for_a_while() -> None:
    world = World(handshake_timeout_s=0.3, retry_s=2.0)
    first = world.find(b"x", within_s=10)
    world.run(0.29)
    assert world.told(first) == []
    world.run(0.02)
    assert reasons(world, first) == [NotFoundReason.UNREACHABLE]
    assert world.hung_up == ["a:1"]
    assert reasons(world, world.find(b"x", within_s=10)) == [NotFoundReason.UNREACHABLE]
    assert knocks(world) == 1
    world.run(2)
    world.host().holds = {b"x": 1}
    assert found(world, world.find(b"x")) == {b"x"}


def test_a_find_waits_for_no_handshake_beyond_its_own_deadline() -> None:
    world = World(handshake_timeout_s=5)
    find = world.find(b"x", within_s=0.05)
    world.run(0.06)
    assert reasons(world, find) == [NotFoundReason.DEADLINE]


def test_a_connection_that_is_refused_is_found_out_at_once_and_tried_again_by_the_next_find() -> None:
    world = World()
    find = world.find(b"x")
    world.reader.lost("a:1", "refused")
    world.step()
    assert reasons(world, find) == [NotFoundReason.UNREACHABLE]
    world.host().holds = {b"x": 1}
    assert found(world, world.find(b"x")) == {b"x"}


@pytest.mark.parametrize("damage", ["garbage", "metadata", "other_reader"])
def test_a_damaged_answer_to_the_handshake_is_never_loaded(damage: str) -> None:
    world = World()
    find = world.find(b"x")
    good, _ = side(A).answer(side("0" * 32).hello())
    answer = {
        "garbage": b"\xc1 garbage",
        "metadata": good.replace(b"metadata of", b"METADATA of"),
        "other_reader": side(A).answer(side("1" * 32).hello())[0],
    }[damage]
    world.reader.receive("a:1", encode(Admit(boot_id=A, answer=answer)), world.now_s)
    world.step()
    expected = NotFoundReason.REFUSED if damage == "metadata" else NotFoundReason.MALFORMED
    assert reasons(world, find) == [expected]
    assert world.transfers.connected == []
    world.host().holds = {b"x": 1}
    assert found(world, world.find(b"x")) == {b"x"}


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xc1" * 50, b"\x90", b"\x81\xa4type\xa3ask", b"x" * (3 << 20)]
)
def test_garbage_is_dropped_counted_and_changes_nothing(data: bytes) -> None:
    world = World()
    world.host().holds = {b"x": 1}
    find = world.find(b"x")
    world.reader.receive("a:1", data, world.now_s)
    world.reader.receive("nobody:1", data, world.now_s)
    assert world.reader.malformed == 1
    pull = world.pull(find, {b"x": 5})
    world.transfers.finish()
    world.step()
    assert isinstance(world.told(pull)[0], Pulled)


def test_an_answer_that_does_not_fit_the_question_leases_nothing() -> None:
    world = World()
    host = world.host()
    for holds in ({b"x": 100}, {b"x": 2**31 - 1}):  # beyond the region that it offered
        host.holds = holds
        assert reasons(world, world.find(b"x")) == [NotFoundReason.MALFORMED]
    assert host.source.lookups == 0, "given back"


# Restarts


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


# What the transfer layer says


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


# Limits


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
