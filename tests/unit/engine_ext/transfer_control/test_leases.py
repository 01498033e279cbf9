# SPDX-License-Identifier: Apache-2.0
"""Leases from both ends: what they promise, how they are renewed, and how each of them ends once."""

from __future__ import annotations

import pytest

from engine_ext.transfer.control.peer import Asked, Found, LeaseEnded, NotFound, NotFoundReason
from engine_ext.transfer.control.wire import Ask, Release, Renew, Renewed, read_by_reader
from engine_ext.transfer.events import FailReason, JobId, Pulled, PullFailed

from .world import BLOCK_BYTES, World


def leased(world: World, **holds: int) -> int:
    """A find at a host that holds these keys."""
    host = world.hosts.get("a:1") or world.host()
    host.holds = {key.encode(): block for key, block in holds.items()}
    find = world.find(*host.holds)
    (found,) = world.told(find)
    assert isinstance(found, Found)
    assert found.keys == set(host.holds)
    return find


def test_a_find_is_answered_with_the_keys_that_the_source_pinned() -> None:
    world = World()
    host = world.host()
    host.holds = {b"x": 3, b"z": 5, b"unasked": 6}
    find = world.find(b"x", b"y", b"z", tenant="blue")
    assert world.told(find) == [Found(find, frozenset({b"x", b"z"}), 0.0)]
    (asked,) = host.asked()
    assert (asked.keys, asked.tenant) == ((b"x", b"y", b"z"), "blue")
    assert host.ended() == []


def test_a_pull_reads_the_blocks_that_were_leased_from_the_incarnation_that_leased_them() -> None:
    world = World()
    find = leased(world, x=3, y=7)
    pull = world.pull(find, {b"y": 10, b"x": 11})
    ((job, request),) = world.transfers.jobs.items()
    assert (request.address, request.boot_id) == ("a:1", "a" * 32)
    assert (request.source, request.destination) == ([7, 3], [10, 11])
    world.transfers.finish(job)
    world.step(0.25)
    assert world.told(pull) == [Pulled(JobId(pull), 2 * BLOCK_BYTES, 0.25)]


def test_a_lease_is_given_back_after_its_last_pull_and_says_whether_it_was_read() -> None:
    world = World()
    find = leased(world, x=3)
    world.pull(find, {b"x": 10})
    world.forget(find)
    host = world.hosts["a:1"]
    assert host.ended() == [], "a pull is under way"
    world.transfers.finish()
    world.step()
    assert host.ended() == [LeaseEnded(host.asked()[0].lookup_id, read=True)]


def test_a_lease_that_nobody_read_is_given_back_unread() -> None:
    world = World()
    world.forget(leased(world, x=3))
    assert [end.read for end in world.hosts["a:1"].ended()] == [False]


def test_an_answer_without_blocks_leases_nothing() -> None:
    world = World()
    host = world.host()
    find = world.find(b"x")
    assert world.told(find) == [Found(find, frozenset(), 0.0)]
    assert [end.read for end in host.ended()] == [False]
    assert (world.reader.finds, host.source.lookups) == (0, 0)


def test_a_lease_is_renewed_for_as_long_as_it_is_not_forgotten() -> None:
    world = World(longest_lease_s=1000)
    find = leased(world, x=3)
    world.run(100)
    assert world.hosts["a:1"].ended() == []
    pull = world.pull(find, {b"x": 10})
    world.transfers.finish()
    world.step()
    assert isinstance(world.told(pull)[0], Pulled)
    renewals = sum(isinstance(message, Renew) for _, message in world.sent)
    assert 25 < renewals < 40, "three per lease of nine seconds"


def test_a_forgotten_lease_is_renewed_while_a_pull_of_it_is_under_way() -> None:
    world = World()
    find = leased(world, x=3)
    pull = world.pull(find, {b"x": 10}, within_s=60)
    world.forget(find)
    world.run(30)
    world.transfers.finish()
    world.step()
    assert isinstance(world.told(pull)[0], Pulled)
    assert [end.read for end in world.hosts["a:1"].ended()] == [True]


def test_nobody_holds_a_lease_for_longer_than_the_source_allows() -> None:
    world = World(longest_lease_s=20)
    find = leased(world, x=3)
    world.run(40)
    assert [end.read for end in world.hosts["a:1"].ended()] == [False]
    pull = world.pull(find, {b"x": 10})
    assert world.told(pull) == [PullFailed(JobId(pull), FailReason.LEASE)]


def test_a_source_keeps_the_blocks_until_its_own_clock_says_that_the_lease_is_over() -> None:
    world = World()
    leased(world, x=3)
    host = world.hosts["a:1"]
    world.silent.add("a:1")
    world.run(8.9)
    assert host.ended() == []
    world.run(0.2)
    assert [end.read for end in host.ended()] == [False]


def test_a_reader_that_cannot_renew_gives_its_pulls_up_before_the_source_lets_go() -> None:
    world = World()
    find = leased(world, x=3)
    pull = world.pull(find, {b"x": 10}, within_s=60)
    world.silent.add("a:1")
    world.run(8.4)
    assert world.told(pull) == []
    world.run(0.2)
    assert world.told(pull) == [PullFailed(JobId(pull), FailReason.LEASE, quarantined=(10,))]
    assert world.hosts["a:1"].ended() == []


def test_bytes_that_a_reader_finds_after_it_was_frozen_past_the_lease_are_discarded() -> None:
    world = World()
    find = leased(world, x=3)
    pull = world.pull(find, {b"x": 10}, within_s=60)
    world.transfers.finish()
    world.step(9)  # everything stood still; the transfer says that all bytes are there
    assert world.told(pull) == [PullFailed(JobId(pull), FailReason.LEASE)]


def test_part_of_a_pull_that_arrived_is_discarded_too_once_the_lease_is_over() -> None:
    world = World()
    find = leased(world, x=3, y=4)
    pull = world.pull(find, {b"x": 10, b"y": 11}, within_s=60)
    world.transfers.fail(FailReason.PEER_GONE, arrived=(10,), quarantined=(11,))
    world.step(9)
    assert world.told(pull) == [PullFailed(JobId(pull), FailReason.PEER_GONE, (), (11,))]


def test_what_arrived_while_the_lease_held_is_kept() -> None:
    world = World()
    find = leased(world, x=3, y=4)
    pull = world.pull(find, {b"x": 10, b"y": 11}, within_s=60)
    world.transfers.fail(FailReason.PEER_GONE, arrived=(10,), quarantined=(11,))
    world.step(1)
    assert world.told(pull) == [PullFailed(JobId(pull), FailReason.PEER_GONE, (10,), (11,))]


def test_a_renewal_that_was_answered_while_the_reader_was_frozen_does_not_bring_a_lease_back() -> None:
    world = World()
    find = leased(world, x=3)
    world.silent.add("a:1")
    world.step(3)  # the renewal goes out
    world.silent.clear()
    (number,) = (message.number for _, message in world.sent if isinstance(message, Renew))
    host = world.hosts["a:1"]
    renew = Renew(boot_id="0" * 32, to="a" * 32, number=number, ids=(find,))
    host.source.receive(b"a:1", renew, world.now_s)
    ((_, answer),) = host.outbox
    host.outbox.clear()
    world.now_s += 6
    world.reader.receive("a:1", answer, world.now_s)
    pull = world.pull(find, {b"x": 10})
    assert world.told(pull) == [PullFailed(JobId(pull), FailReason.LEASE)]


def test_a_lease_that_has_run_out_is_not_renewed_even_if_nobody_noticed_yet() -> None:
    world = World()
    find = leased(world, x=3)
    host = world.hosts["a:1"]
    renew = Renew(boot_id="0" * 32, to="a" * 32, number=1, ids=(find,))
    host.source.receive(b"a:1", renew, world.now_s + 9)
    ((_, answer),) = host.outbox
    renewed = read_by_reader(answer)
    assert isinstance(renewed, Renewed)
    assert renewed.ids == ()
    assert [type(event) for event in host.source.take()] == [LeaseEnded]


def test_a_renewal_counts_from_when_it_was_asked_for() -> None:
    world = World()
    find = leased(world, x=3)
    pull = world.pull(find, {b"x": 10}, within_s=60)
    world.slow.add("a:1")
    world.run(8)
    world.slow.clear()
    world.silent.add("a:1")  # the answers to the renewals after 3 and 6 seconds are the last that come
    (host,) = world.hosts.values()
    for _, data in host.outbox:
        world.reader.receive("a:1", data, world.now_s)
    world.run(6.4)
    assert world.told(pull) == []
    world.run(0.2)  # 6 + 9 - 0.5
    assert world.told(pull) == [PullFailed(JobId(pull), FailReason.LEASE, quarantined=(10,))]


def test_a_second_reply_to_a_lookup_changes_nothing() -> None:
    world = World()
    find = leased(world, x=3)
    host = world.hosts["a:1"]
    host.source.reply(host.asked()[0].lookup_id, {b"x": 4}, world.now_s)
    assert host.outbox == []
    world.pull(find, {b"x": 10})
    (request,) = world.transfers.jobs.values()
    assert request.source == [3]


def test_a_lease_outlives_the_time_after_which_an_idle_peer_is_forgotten() -> None:
    world = World(idle_s=5)
    find = leased(world, x=3)
    world.run(20)
    assert world.hung_up == []
    pull = world.pull(find, {b"x": 10})
    world.transfers.finish()
    world.step()
    assert isinstance(world.told(pull)[0], Pulled)


def test_a_lease_counts_from_the_question_not_from_the_answer() -> None:
    world = World()
    host = world.host()
    host.holds = None
    find = world.find(b"x", within_s=60)
    world.step(5)
    host.source.reply(host.asked()[0].lookup_id, {b"x": 3}, world.now_s)
    world.silent.add("a:1")
    ((_, answer),) = host.outbox
    host.outbox.clear()
    world.reader.receive("a:1", answer, world.now_s)
    pull = world.pull(find, {b"x": 10}, within_s=60)
    world.run(3.6)
    assert [event.reason for event in world.told(pull) if isinstance(event, PullFailed)] == [FailReason.LEASE]


def test_a_lookup_that_the_owner_does_not_answer_in_time_ends_on_both_sides() -> None:
    world = World()
    host = world.host()
    host.holds = None
    find = world.find(b"x", within_s=0.5)
    world.run(1)
    assert world.told(find) == [NotFound(find, NotFoundReason.DEADLINE)]
    (asked,) = host.asked()
    assert host.ended() == [LeaseEnded(asked.lookup_id, read=False)]
    host.source.reply(asked.lookup_id, {b"x": 1}, world.now_s)
    assert (host.source.take(), host.outbox) == ([], []), "nothing is leased after the end was said"


def test_a_find_that_is_forgotten_before_its_answer_is_never_spoken_of() -> None:
    world = World()
    host = world.host()
    host.holds = None
    find = world.find(b"x")
    world.forget(find)
    assert [end.read for end in host.ended()] == [False]
    world.run(5)
    assert world.told(find) == []


@pytest.mark.parametrize("pairs", [{}, {b"x": 1, b"other": 2}])
def test_a_pull_of_what_is_not_leased_is_refused(pairs: dict[bytes, int]) -> None:
    world = World()
    pull = world.pull(leased(world, x=3), pairs)
    ((failed),) = world.told(pull)
    assert isinstance(failed, PullFailed)
    assert failed.reason is FailReason.BAD_BLOCKS
    assert not world.transfers.jobs


def test_a_pull_after_the_lease_was_given_back_is_refused() -> None:
    world = World()
    find = leased(world, x=3)
    world.forget(find)
    pull = world.pull(find, {b"x": 1})
    assert world.told(pull) == [PullFailed(JobId(pull), FailReason.LEASE)]


def test_an_aborted_pull_keeps_the_lease() -> None:
    world = World()
    find = leased(world, x=3)
    pull = world.pull(find, {b"x": 10})
    world.reader.abort(pull)
    world.step()
    assert world.told(pull) == [PullFailed(JobId(pull), FailReason.ABORTED, quarantined=(10,))]
    again = world.pull(find, {b"x": 11})
    world.transfers.finish()
    world.step()
    assert isinstance(world.told(again)[0], Pulled)
    world.forget(find)
    assert [end.read for end in world.hosts["a:1"].ended()] == [False], "not all of it"


def test_every_lookup_of_a_reader_that_leaves_ends_once() -> None:
    world = World()
    leased(world, x=3)
    host = world.hosts["a:1"]
    host.holds = None
    waiting = world.find(b"y")
    world.reader.close()
    world.step()
    assert sorted(end.lookup_id for end in host.ended()) == sorted(one.lookup_id for one in host.asked())
    assert world.told(waiting) == [NotFound(waiting, NotFoundReason.CLOSED)]
    assert (host.source.readers, host.source.lookups) == (0, 0)


def test_a_source_that_closes_ends_no_lease_before_its_reader_let_go() -> None:
    world = World()
    find = leased(world, x=3)
    pull = world.pull(find, {b"x": 10})
    host = world.hosts["a:1"]
    world.silent.add("a:1")
    assert not host.source.close()
    world.run(5)
    assert host.ended() == []
    assert not host.source.close()
    world.run(5)
    assert [end.read for end in host.ended()] == [False]
    assert host.source.close()
    assert [event.reason for event in world.told(pull) if isinstance(event, PullFailed)] == [FailReason.LEASE]


def test_a_reader_lets_go_at_once_of_a_source_that_closes() -> None:
    world = World()
    find = leased(world, x=3)
    pull = world.pull(find, {b"x": 10})
    host = world.hosts["a:1"]
    host.holds = None
    waiting = world.find(b"y")
    host.source.close()
    world.step()
    assert world.told(pull) == [PullFailed(JobId(pull), FailReason.PEER_GONE, quarantined=(10,))]
    assert [e.reason for e in world.told(waiting) if isinstance(e, NotFound)] == [NotFoundReason.UNREACHABLE]
    assert len(host.ended()) == 2
    assert host.source.close()
    late = world.find(b"x")
    assert [e.reason for e in world.told(late) if isinstance(e, NotFound)] == [NotFoundReason.UNREACHABLE]


def test_a_source_answers_no_more_lookups_than_it_may() -> None:
    world = World(max_lookups=3, max_lookups_per_reader=2)
    host = world.host()
    host.holds = {b"x": 1}
    finds = [world.find(b"x") for _ in range(3)]
    assert [type(world.told(find)[0]) for find in finds] == [Found, Found, NotFound]
    assert [e.reason for e in world.told(finds[2]) if isinstance(e, NotFound)] == [NotFoundReason.TOO_MANY]
    world.forget(finds[0])
    assert isinstance(world.told(world.find(b"x"))[0], Found)


def test_a_source_whose_owner_takes_nothing_takes_no_more_lookups() -> None:
    world = World()
    host = world.host()
    world.find(b"x")
    ask = Ask(boot_id="0" * 32, to="a" * 32, id=99, tenant="", keys=(b"k",), within_ms=100)
    host.source.receive(b"a:1", ask, world.now_s, crowded=True)
    assert host.source.lookups == 0


def test_a_lookup_that_comes_twice_is_asked_once() -> None:
    world = World()
    host = world.host()
    host.holds = None
    world.find(b"x", within_s=5)
    (ask,) = (message for _, message in world.sent if isinstance(message, Ask))
    host.source.receive(b"a:1", ask, world.now_s)
    world.step()
    assert len(host.asked()) == 1


def test_leases_of_others_are_out_of_a_readers_reach() -> None:
    world = World()
    find = leased(world, x=3)
    host = world.hosts["a:1"]
    for boot_id in ("9" * 32, "0" * 31 + "1"):
        host.source.receive(b"other", Release(boot_id=boot_id, to="a" * 32, id=find, read=True), world.now_s)
    assert host.source.lookups == 1
    assert host.source.take() == []


def test_events_of_lookups_come_in_order() -> None:
    world = World()
    host = world.host()
    host.holds = {b"x": 1}
    for _ in range(3):
        world.forget(world.find(b"x"))
    kinds = [type(event) for event in host.events]
    assert kinds == [Asked, LeaseEnded] * 3
