# SPDX-License-Identifier: Apache-2.0
"""The fleet of a serving process: the keeper's word, and what happened here since."""

from __future__ import annotations

import msgspec

from router.config_fleet import FleetConfig
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet, FleetCallbacks
from router.fleet.phases import CAN_ANSWER
from router.fleet.worker import Health, ModelInfo, WorkerSpec, WorkerStatus
from router.processes.followed_fleet import FollowedFleet
from router.processes.seen import OutcomeSeen
from router.processes.told import RankMapTold, WorkerTold
from router.request import Outcome

SETTINGS = FleetConfig(failure_threshold=3)


class Scene:
    """The fleet of a process, and the breaker of the keeper that it is told of."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.batch = 1
        self.told: list[OutcomeSeen] = []
        self.joined: list[str] = []
        self.removed: list[str] = []
        self.breaker = Breaker(3, 1.0, 30.0)
        callbacks = FleetCallbacks(on_joined=self.joined.append, on_removed=self.removed.append)
        self.fleet = FollowedFleet(SETTINGS, self.tell, lambda: self.now_s, callbacks)

    def tell(self, seen: OutcomeSeen) -> int:
        self.told.append(seen)
        return self.batch

    def put(self, *, answers: bool = True, draining: bool = False, running: int = 0) -> None:
        status = WorkerStatus(
            WorkerSpec("a", "http://a"),
            models={"m": ModelInfo("m", "m")},
            block_size_tokens=16,
            running=running,
        )
        told = WorkerTold(
            status, draining, True, answers, True, self.breaker.memory(), [RankMapTold(None, None)]
        )
        # As it comes over the channel.
        self.fleet.put(msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=WorkerTold))

    @property
    def health(self) -> Health:
        status = self.fleet.get("a")
        assert status is not None
        return status.health

    def fails(self, times: int = 1) -> None:
        for _ in range(times):
            self.fleet.record_outcome("a", Outcome.WORKER_ERROR, self.now_s)


def test_a_worker_is_as_the_keeper_tells_and_joins_once() -> None:
    one = Scene()
    one.put()
    assert (one.health, one.joined) == (Health.HEALTHY, ["a"])
    assert [s.spec.id for s in one.fleet.candidates("m", one.now_s)] == ["a"]
    one.put(draining=True)
    assert one.health is Health.DRAINING
    one.put(answers=False)
    assert one.health is Health.UNHEALTHY
    one.put()
    assert one.joined == ["a", "a"]
    one.fleet.remove("a")
    assert (one.removed, one.fleet.get("a")) == (["a"], None)


def test_lists_and_statuses_stay_the_same_objects_while_only_gauges_change() -> None:
    one = Scene()
    one.put()
    status, listed = one.fleet.get("a"), one.fleet.candidates("m", one.now_s)
    spec = status.spec if status is not None else None
    one.put(running=7)
    again = one.fleet.get("a")
    assert again is status
    assert again is not None
    assert again.running == 7
    assert again.spec is spec
    assert one.fleet.candidates("m", one.now_s) is listed


def test_failures_here_count_at_once_and_are_told() -> None:
    one = Scene()
    one.put()
    one.fails(3)
    assert one.health is Health.BACKOFF
    assert [seen.outcome for seen in one.told] == [Outcome.WORKER_ERROR] * 3


def test_failures_that_the_keeper_does_not_know_yet_are_laid_over_its_state_and_no_others() -> None:
    one = Scene()
    one.put()
    one.fails(2)  # in batch 1
    one.put()  # the keeper has heard of none
    one.fails()
    assert one.health is Health.BACKOFF
    one.batch = 2
    one.fleet.taken(1)
    for seen in one.told:
        one.breaker.record(seen.outcome, seen.at_s)
    one.breaker.record(Outcome.OK, one.now_s)  # another process was served
    one.put()
    assert one.health is Health.HEALTHY
    one.fails(2)
    assert one.health is Health.HEALTHY


def test_a_new_keeper_s_state_is_taken_as_it_is() -> None:
    one = Scene()
    one.put()
    one.fails(3)
    one.fleet.forget_pending()
    one.put()
    assert one.health is Health.HEALTHY


def test_a_turn_that_a_request_of_ours_took_is_not_given_again_before_it_lapses() -> None:
    one = Scene()
    one.put()
    one.fails(3)
    for seen in one.told:
        one.breaker.record(seen.outcome, seen.at_s)
    one.fleet.taken(1)
    one.put()
    one.now_s += 1.5
    assert len(one.fleet.candidates("m", one.now_s)) == 1  # its turn
    one.put()
    ready, _, paused = one.fleet._sorted("m", one.now_s, (), CAN_ANSWER, False)
    assert not ready
    assert len(paused) == 1


def test_the_keeper_s_fleet_tells_who_has_changed_and_not_of_every_answer() -> None:
    fleet = Fleet([WorkerSpec("a", "http://a")], SETTINGS, lambda: 0.0)
    changed = fleet.watch()
    changed.clear()
    fleet.record_outcome("a", Outcome.OK, 1.0)
    assert changed == set()
    fleet.record_outcome("a", Outcome.WORKER_ERROR, 1.0)
    assert changed == {"a"}
    changed.clear()
    fleet.remove("a")
    assert changed == {"a"}
