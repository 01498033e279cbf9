# SPDX-License-Identifier: Apache-2.0
"""Lists of workers are the same object until something changes that planning looks at."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.config_fleet import FleetConfig
from router.fleet.fleet import Fleet
from router.fleet.metrics_text import WorkerMetrics
from router.fleet.poller import PollResult, Reach
from router.fleet.snapshot import Snapshot, excluding
from router.fleet.worker import ModelInfo, WorkerSpec, WorkerStatus
from router.request import Outcome


def poll(fleet: Fleet, name: str, models: tuple[str, ...] = ("m",), **metrics: object) -> None:
    info = {model: ModelInfo(model, model) for model in models}
    result = PollResult(Reach.OK, metrics=WorkerMetrics(**metrics), models=info)  # type: ignore[arg-type]
    fleet._apply(fleet._members[name], result, 1.0)


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(
        [WorkerSpec(name, f"http://{name}", ranks_given=False) for name in "abc"], FleetConfig(), lambda: 1.0
    )
    for name in "abc":
        poll(made, name, block_size_tokens=16)
    return made


def names(workers: object) -> list[str]:
    assert isinstance(workers, Snapshot | list) or hasattr(workers, "names")
    return [status.spec.id for status in workers]  # type: ignore[attr-defined]


def test_lists_are_the_same_object_while_only_gauges_change(fleet: Fleet) -> None:
    everyone, able = fleet.statuses(), fleet.candidates("m", 1.0)
    poll(fleet, "a", block_size_tokens=16, running=3, waiting=4, kv_cache_usage=0.5)
    fleet.record_outcome("a", Outcome.OK, 1.0)
    assert fleet.statuses() is everyone
    assert fleet.candidates("m", 2.0) is able


@pytest.mark.parametrize(
    "change",
    [
        lambda fleet: fleet.set_drain("a", True),
        lambda fleet: fleet.add(WorkerSpec("d", "http://d")),
        lambda fleet: fleet.remove("a"),
        lambda fleet: poll(fleet, "a", block_size_tokens=32),
        lambda fleet: poll(fleet, "a", block_size_tokens=16, cache_dtype="fp8"),
        lambda fleet: poll(fleet, "a", block_size_tokens=16, asleep=True),
        lambda fleet: poll(fleet, "a", models=("m", "n"), block_size_tokens=16),
        lambda fleet: fleet._apply(fleet._members["a"], PollResult(Reach.REFUSED), 1.0),
        lambda fleet: fleet._apply(fleet._members["a"], PollResult(Reach.OK, event_ranks=2), 1.0),
        lambda fleet: [fleet.record_outcome("a", Outcome.WORKER_ERROR, 1.0) for _ in range(3)],
    ],
)
def test_every_change_that_planning_looks_at_makes_new_lists(
    fleet: Fleet, change: Callable[[Fleet], object]
) -> None:
    everyone, able = fleet.statuses(), fleet.candidates("m", 1.0)
    change(fleet)
    assert fleet.statuses() is not everyone
    assert fleet.candidates("m", 1.0) is not able


def test_models_that_nobody_lists_share_one_list(fleet: Fleet) -> None:
    anyone = fleet.candidates("x1", 1.0)
    assert names(anyone) == ["a", "b", "c"]
    assert all(fleet.candidates(f"x{number}", 1.0) is anyone for number in range(100))
    assert fleet.candidates(None, 1.0) is anyone
    assert len(fleet._lists) == 1


def test_tried_workers_are_left_out_of_the_same_snapshot(fleet: Fleet) -> None:
    able = fleet.candidates("m", 1.0)
    rest = fleet.candidates("m", 1.0, {"b", "gone"})
    assert names(rest) == ["a", "c"]
    assert rest.snapshot is able  # type: ignore[attr-defined]
    assert not fleet.candidates("m", 1.0, {"a", "b", "c"})


def test_worker_in_its_pause_is_offered_to_one_caller_beside_the_others(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.record_outcome("b", Outcome.WORKER_ERROR, 1.0)
    assert names(fleet.candidates("m", 1.5)) == ["a", "c"]
    assert names(fleet.candidates("m", 9.0)) == ["a", "c", "b"]
    assert names(fleet.candidates("m", 9.0)) == ["a", "c"]


def test_excluding_is_a_sequence_of_what_is_left() -> None:
    statuses = [WorkerStatus(WorkerSpec(name, f"http://{name}")) for name in "abcd"]
    snapshot = Snapshot(statuses)
    assert excluding(snapshot, ()) is snapshot
    left = excluding(excluding(snapshot, {"a"}), {"c"})
    assert left == [statuses[1], statuses[3]]
    assert (len(left), left[0], left[-1:]) == (2, statuses[1], [statuses[3]])
    assert statuses[3] in left
    assert statuses[0] not in left
    assert excluding(statuses, {"a", "b"}) == statuses[2:]
    assert not excluding(snapshot, set("abcd"))
    assert Snapshot() == []
