# SPDX-License-Identifier: Apache-2.0
"""Loss, restarts and odd replays, over real sockets."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest
from eventually import eventually_now
from kv_batches import batch, cleared, placeholder, prompt, removed, stored
from kv_publisher import Frames, ScriptedEngine, end, honest, reply

from indexer.identity import Tier, WorkerId

from .conftest import MODEL, Indexer


def chain(engine: ScriptedEngine, first: int, count: int, **how: bool) -> None:
    """Blocks ``first``... of one chain that begins at block 1, one batch each."""
    for name in range(first, first + count):
        engine.batch(batch(stored([name], parent=name - 1 if name > 1 else None)), **how)


# Batches lost on the wire


def test_lost_batches_are_fetched_before_the_one_that_showed_the_loss(indexer: Indexer) -> None:
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        chain(engine, 1, 3)
        chain(engine, 4, 2, send=False)
        chain(engine, 6, 1)
        indexer.wait_seq("w", 5)
        assert indexer.matched([1, 2, 3, 4, 5, 6]) == {("w", 0): 6}
        counters = indexer.stream("w").counters
        assert (counters.gaps, counters.incarnations, counters.replay_failures) == (1, 0, 0)
        assert indexer.state("w").partial is None
        assert engine.asked == [0, 2]  # the last applied one is asked for again, to compare


@pytest.mark.parametrize("frames_before_026", [False, True])
def test_replays_of_old_and_new_engines_are_understood(indexer: Indexer, frames_before_026: bool) -> None:
    def script(start: int, engine: ScriptedEngine) -> Iterable[Frames]:
        for seq, payload in sorted(engine.kept.items()):
            if seq >= start:
                yield reply(seq, payload, topic=None if frames_before_026 else b"kv-events")
        yield [b"", b"\xff" * 8, b""] if frames_before_026 else end()

    with ScriptedEngine(script=script) as engine:
        chain(engine, 1, 4)  # published before anybody listens
        indexer.follow("w", engine)
        indexer.wait_seq("w", 3)
        assert indexer.matched([1, 2, 3, 4]) == {("w", 0): 4}
        assert indexer.state("w").partial is None


def test_lost_batches_without_replay_make_the_holder_partial(indexer: Indexer) -> None:
    with ScriptedEngine(replay=None) as engine:
        indexer.follow("w", engine)
        chain(engine, 1, 3)
        chain(engine, 4, 2, send=False)
        chain(engine, 6, 1)
        indexer.wait_seq("w", 5)
        assert indexer.matched([1, 2, 3, 4, 5, 6]) == {("w", 0): 3}
        assert indexer.stream("w").counters.gaps == 1
        assert indexer.state("w").partial == "sequences 3 to 4 are lost"


def test_batches_that_the_replay_has_evicted_make_the_holder_partial(indexer: Indexer) -> None:
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        chain(engine, 1, 3)
        indexer.wait_seq("w", 2)
        engine.kept.clear()
        chain(engine, 4, 1, send=False, keep=False)
        chain(engine, 5, 1, send=False)
        chain(engine, 6, 1)
        indexer.wait_seq("w", 5)
        assert indexer.matched([1, 2, 3, 4, 5, 6]) == {("w", 0): 3}
        assert indexer.stream("w").counters.gaps == 1
        assert indexer.state("w").partial == "sequences 3 to 3 are lost"
        # The same connection is the same process: what it holds stays.
        assert indexer.incarnation("w") == 1


# A new process at the old address


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("first_seen", [0, 3])
def test_a_new_process_at_the_address_inherits_nothing(
    indexer: Indexer, replay: bool, first_seen: int
) -> None:
    with ScriptedEngine() as old:
        indexer.follow("w", old, replay=replay)
        chain(old, 1, 20)
        indexer.wait_seq("w", 19)
        assert indexer.matched(list(range(1, 21))) == {("w", 0): 20}
    with ScriptedEngine(events=old.events, replay=old.replay) as new:
        # Its first batches are out before the subscription is back.
        for number in range(first_seen):
            new.batch(batch(stored([500 + number])))
        new.wait_for_subscriber()
        if replay and first_seen == 0:
            indexer.wait_live("w")
        new.batch(batch(stored([600])))
        indexer.wait_seq("w", first_seen)
        assert indexer.matched([1, 2, 3]) == {}
        assert indexer.matched([600]) == {("w", 0): 1}
        assert indexer.incarnation("w") == 2
        assert indexer.state("w").suspect is None
        if first_seen:
            assert indexer.matched([500]) == ({("w", 0): 1} if replay else {})
        assert (indexer.state("w").partial is None) == (replay or first_seen == 0)


def test_a_new_process_whose_numbers_overtook_the_old_ones_is_found_by_its_replay(indexer: Indexer) -> None:
    with ScriptedEngine() as old:
        indexer.follow("w", old)
        chain(old, 1, 5)
        indexer.wait_seq("w", 4)
    with ScriptedEngine(events=old.events, replay=old.replay) as new:
        for number in range(30):
            new.batch(batch(stored([500 + number])))
        new.wait_for_subscriber()
        new.batch(batch(stored([600])))
        indexer.wait_seq("w", 30)
        eventually_now(lambda: indexer.matched([500]) == {("w", 0): 1}, "the new history")
        assert indexer.matched([1, 2]) == {}
        assert indexer.incarnation("w") == 2


def test_without_replay_an_overtaking_process_is_suspect_until_its_start_time_is_known(
    indexer: Indexer,
) -> None:
    with ScriptedEngine(replay=None) as old:
        indexer.follow("w", old)
        indexer.subscriber.process_started(WorkerId("w"), 100.0)
        chain(old, 1, 5)
        indexer.wait_seq("w", 4)
    with ScriptedEngine(events=old.events, replay=None) as new:
        new.skip_to(30)
        new.wait_for_subscriber()
        eventually_now(lambda: indexer.state("w").suspect, "the suspicion")
        assert indexer.matched([1, 2]) == {}  # at once
        indexer.subscriber.process_started(WorkerId("w"), 200.0)
        eventually_now(
            lambda: indexer.incarnation("w") == 2,
            "the new incarnation",
        )
        new.batch(batch(stored([600])))
        indexer.wait_seq("w", 30)
        assert indexer.matched([600]) == {("w", 0): 1}
        assert indexer.matched([1, 2]) == {}
        assert indexer.state("w").partial


def test_a_broken_connection_to_the_same_process_loses_nothing(indexer: Indexer) -> None:
    """The start time is the same: the suspicion ends, and what was held is held."""
    with ScriptedEngine(replay=None) as engine:
        indexer.follow("w", engine)
        indexer.subscriber.process_started(WorkerId("w"), 100.0)
        chain(engine, 1, 3)
        indexer.wait_seq("w", 2)
        events = engine.events
    # The same process behind a load balancer that cut the connection: numbers go on.
    with ScriptedEngine(events=events, replay=None) as engine:
        engine.skip_to(3)
        engine.wait_for_subscriber()
        eventually_now(lambda: indexer.state("w").suspect, "the suspicion")
        indexer.subscriber.process_started(WorkerId("w"), 100.0)
        eventually_now(lambda: indexer.state("w").suspect is None, "the end of the suspicion")
        chain(engine, 4, 1)
        indexer.wait_seq("w", 3)
        assert indexer.matched([1, 2, 3, 4]) == {("w", 0): 4}


def test_a_restart_seen_by_stream_and_metrics_is_one_restart(indexer: Indexer) -> None:
    with ScriptedEngine(replay=None) as old:
        indexer.follow("w", old)
        indexer.subscriber.process_started(WorkerId("w"), 100.0)
        chain(old, 1, 5)
        indexer.wait_seq("w", 4)
    with ScriptedEngine(events=old.events, replay=None) as new:
        new.wait_for_subscriber()
        new.batch(batch(stored([600])))
        indexer.wait_seq("w", 0)
        indexer.subscriber.process_started(WorkerId("w"), 200.0)
        new.batch(batch(stored([601], parent=600)))
        indexer.wait_seq("w", 1)
        assert indexer.matched([600, 601]) == {("w", 0): 2}
        assert indexer.incarnation("w") == 2
        assert indexer.state("w").partial is None


# Replays that are not as they should be


def test_a_long_replay_is_drained_to_its_end(indexer: Indexer) -> None:
    with ScriptedEngine() as engine:
        chain(engine, 1, 1000)
        indexer.follow("w", engine)
        indexer.wait_seq("w", 999)
        assert indexer.matched(list(range(1, 1001))) == {("w", 0): 1000}
        engine.batch(batch(stored([1001], parent=1000)))
        indexer.wait_seq("w", 1000)
        assert indexer.stream("w").counters.replays == 1


def test_a_replay_that_stalls_is_given_up_and_what_came_counts(indexer: Indexer) -> None:
    def stalling(start: int, engine: ScriptedEngine) -> Iterable[Frames]:
        yield from list(honest(start, engine))[:10]

    with ScriptedEngine(script=stalling) as engine:
        chain(engine, 1, 30)
        indexer.follow("w", engine)  # returns when the replay was given up
        assert indexer.stream("w").counters.replay_failures == 1
        assert indexer.matched(list(range(1, 31))) == {("w", 0): 10}
        partial = indexer.state("w").partial
        assert partial is not None
        assert "replay failed" in partial
        # Later batches are taken, with what a working replay still gives.
        engine.script = honest
        chain(engine, 31, 1)
        indexer.wait_seq("w", 30)
        assert indexer.matched(list(range(1, 32))) == {("w", 0): 31}


@pytest.mark.parametrize(
    "nonsense",
    [[b"what"], [b"", b"", b"short", b"x"], [b"", b"", b"", b"", b"", b""], [b"x", b"", b"\0" * 8, b"y"]],
)
def test_a_malformed_frame_ends_the_replay_and_nothing_else(indexer: Indexer, nonsense: Frames) -> None:
    def script(start: int, engine: ScriptedEngine) -> Iterable[Frames]:
        good = list(honest(start, engine))
        yield from good[:3]
        yield nonsense
        yield from good[3:]

    with ScriptedEngine(script=script) as engine:
        chain(engine, 1, 6)
        indexer.follow("w", engine)
        assert indexer.stream("w").counters.replay_failures == 1
        assert indexer.matched([1, 2, 3, 4, 5, 6]) == {("w", 0): 3}
        engine.script = honest
        chain(engine, 7, 1)
        indexer.wait_seq("w", 6)
        assert indexer.matched([1, 2, 3, 4, 5, 6, 7]) == {("w", 0): 7}


def test_a_replay_that_repeats_and_goes_back_counts_no_block_twice(indexer: Indexer) -> None:
    def script(start: int, engine: ScriptedEngine) -> Iterable[Frames]:
        everything = [reply(seq, payload) for seq, payload in sorted(engine.kept.items())]
        # From the asked start or from the asked one on, then again from the very beginning.
        yield from everything[start:]
        yield from everything
        yield from everything[-2:]
        yield end()

    with ScriptedEngine(script=script) as engine:
        indexer.follow("w", engine)
        chain(engine, 1, 3)
        chain(engine, 4, 2, send=False)
        chain(engine, 6, 1)
        indexer.wait_seq("w", 5)
        assert indexer.matched([1, 2, 3, 4, 5, 6]) == {("w", 0): 6}
        # One removal is enough: nothing was counted twice.
        engine.batch(batch(removed([1, 2, 3, 4, 5, 6])))
        indexer.wait_seq("w", 6)
        assert indexer.holders.index.counts(indexer.state("w").slot).hbm == 0
        assert indexer.stream("w").counters.duplicates > 0
        assert indexer.state("w").totals["stored"] == 6


def test_a_replay_socket_that_is_not_there_does_not_hold_up_live_batches(indexer: Indexer) -> None:
    with ScriptedEngine() as gone:
        nowhere = gone.replay
    with ScriptedEngine(replay=None) as engine:
        engine.replay = nowhere
        indexer.follow("w", engine)
        chain(engine, 1, 3)
        indexer.wait_seq("w", 2)
        assert indexer.matched([1, 2, 3]) == {("w", 0): 3}
        assert indexer.stream("w").counters.replay_failures == 1


def test_live_messages_of_another_shape_are_no_end(indexer: Indexer) -> None:
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        chain(engine, 1, 2)
        for frames in ([b"alone"], [b"", b"1234567", b"x"], [b"", b"\0" * 8, b"x", b"y"]):
            engine.send_frames(frames)
        chain(engine, 3, 1)
        indexer.wait_seq("w", 2)
        assert indexer.matched([1, 2, 3]) == {("w", 0): 3}
        assert indexer.state("w").partial


# What came before the router


def test_children_before_their_parents_are_joined_and_never_taken_for_roots(
    indexer: Indexer, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing_yet(start: int, engine: ScriptedEngine) -> Iterable[Frames]:
        yield end()

    with ScriptedEngine(script=nothing_yet) as engine, caplog.at_level(logging.DEBUG):
        indexer.follow("w", engine)
        for name in range(11, 211):
            engine.batch(batch(stored([name], parent=name - 1)))
        indexer.wait_seq("w", 199)
        # Its tokens are those of a prompt that begins with block 11; it is not one.
        assert indexer.matched([11, 12, 13]) == {}
        assert indexer.holders.index.counts(indexer.state("w").slot).detached == 200
        engine.batch(batch(stored(list(range(1, 11)))))
        indexer.wait_seq("w", 200)
        assert indexer.matched(list(range(1, 211))) == {("w", 0): 210}
        assert indexer.matched([11, 12, 13]) == {}
        assert indexer.state("w").totals["joined"] == 200
    lines = [record for record in caplog.records if record.name.startswith("indexer")]
    assert len(lines) < 10


def test_history_before_a_clear_is_not_visible_once_the_recovery_is_over(indexer: Indexer) -> None:
    with ScriptedEngine() as engine:
        for first in range(1, 1001, 20):
            engine.batch(
                batch(stored(list(range(first, first + 20)), parent=first - 1 if first > 1 else None))
            )
        engine.batch(batch(placeholder(list(range(1, 501)))))
        engine.batch(batch(cleared()))
        for name in (1001, 1002, 1003):
            engine.batch(batch(stored([name], parent=name - 1 if name > 1001 else None)))
        indexer.follow("w", engine)  # returns when the recovery is over
        hashes = indexer.holders.index.hash_blocks(prompt(list(range(1, 1001))), 4, MODEL, "", [])
        runs = [run for _, run in indexer.holders.runs(hashes)]
        # What RAM held is in doubt: the clear does not say whether the host's copies went too.
        assert all(run.tier is Tier.RAM and run.doubtful for run in runs)
        assert indexer.matched([1001, 1002, 1003]) == {("w", 0): 3}
        counts = indexer.holders.index.counts(indexer.state("w").slot)
        assert (counts.hbm, counts.ram, counts.doubtful_ram) in {(3, 0, 500), (3, 500, 500)}


def test_tiers_of_a_block_that_left_hbm_are_kept(indexer: Indexer) -> None:
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        engine.batch(batch(stored([1, 2])))
        engine.batch(batch(placeholder([1, 2])))
        engine.batch(batch(removed([1, 2])))
        indexer.wait_seq("w", 2)
        counts = indexer.holders.index.counts(indexer.state("w").slot)
        assert (counts.hbm, counts.ram) == (0, 2)
        assert indexer.matched([1, 2]) == {("w", 0): 2}
