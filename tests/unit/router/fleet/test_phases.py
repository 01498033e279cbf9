# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from router.config import load
from router.config_fleet import FleetConfig, WorkerEntry, parse_worker_argument
from router.errors import ConfigError
from router.fleet.fleet import Fleet
from router.fleet.metrics_text import WorkerMetrics
from router.fleet.phases import CAN_ANSWER, CAN_PREFILL, check_phases, models_without
from router.fleet.poller import PollResult, Reach
from router.fleet.static import spec_of_entry
from router.fleet.worker import ModelInfo, Role, Transfer, WorkerSpec, WorkerStatus
from router.request import Outcome

P2P, NIXL = Transfer.P2P, Transfer.NIXL


def spec(name: str, role: Role, transfer: Transfer | None = P2P) -> WorkerSpec:
    return WorkerSpec(name, f"http://{name}", role=role, transfer=transfer)


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [spec("a", Role.BOTH, None)],
        [spec("p", Role.PREFILL), spec("d", Role.DECODE)],
        [spec("p", Role.PREFILL), spec("b", Role.BOTH)],
        [spec("d", Role.DECODE, NIXL), spec("b", Role.BOTH, None)],
        [spec("p", Role.PREFILL, NIXL), spec("d", Role.DECODE, NIXL), spec("b", Role.BOTH, P2P)],
    ],
)
def test_fleets_with_both_phases_are_taken(specs: list[WorkerSpec]) -> None:
    check_phases(specs)


@pytest.mark.parametrize(
    ("specs", "field"),
    [
        ([spec("p", Role.PREFILL)], "fleet.workers"),
        ([spec("d", Role.DECODE)], "fleet.workers"),
        ([spec("b", Role.BOTH), spec("p", Role.PREFILL, None)], "fleet.workers[1].transfer"),
        ([spec("d", Role.DECODE, None), spec("b", Role.BOTH)], "fleet.workers[0].transfer"),
        ([spec("p", Role.PREFILL, P2P), spec("d", Role.DECODE, NIXL)], "fleet.workers[0].transfer"),
    ],
)
def test_a_phase_or_worker_that_can_never_be_used_is_named(specs: list[WorkerSpec], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_phases(specs)
    assert caught.value.field == field


def test_the_transfer_is_p2p_where_an_address_is_given_and_nothing_else_is_said() -> None:
    assert spec_of_entry(WorkerEntry("http://a:1", p2p="a:5710")).transfer is P2P
    assert spec_of_entry(WorkerEntry("http://a:1", p2p="a:5710", transfer="nixl")).transfer is NIXL
    assert spec_of_entry(WorkerEntry("http://a:1")).transfer is None
    assert parse_worker_argument("http://a:1,role=decode,transfer=nixl").transfer == "nixl"


def test_p2p_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_worker_argument("http://a:1,transfer=p2p")
    assert caught.value.field == "--worker.transfer"
    with pytest.raises(ConfigError) as caught:
        load(environ={"HOME": "/h"}, workers=[WorkerEntry("http://a:1", transfer="p2p")])
    assert caught.value.field == "fleet.workers[0].transfer"


def fleet_of(*specs: WorkerSpec) -> Fleet:
    fleet = Fleet(specs, FleetConfig(), lambda: 0.0)
    metrics = WorkerMetrics(running=0, waiting=0, block_size_tokens=16)
    for member in fleet._members.values():
        fleet._apply(member, PollResult(Reach.OK, None, metrics, {"m": ModelInfo("m", "m")}), 0.0)
    return fleet


def names(statuses: list[WorkerStatus]) -> list[str]:
    return [status.spec.id for status in statuses]


def test_whole_requests_and_prefills_go_to_workers_that_take_them() -> None:
    fleet = fleet_of(spec("p", Role.PREFILL), spec("d", Role.DECODE), spec("b", Role.BOTH))
    assert names(fleet.candidates("m", 0.0)) == ["d", "b"]
    assert names(fleet.prefillers("m", 0.0)) == ["p"]
    assert names(fleet.prefillers("m", 0.0, {"p"})) == []


def test_a_doubtful_prefill_worker_is_left_out_where_a_decode_worker_would_be_tried() -> None:
    fleet = fleet_of(spec("p", Role.PREFILL), spec("d", Role.DECODE))
    for worker in ("p", "d"):
        for _ in range(3):
            fleet.record_outcome(worker, Outcome.WORKER_ERROR, 0.0)
    assert names(fleet.prefillers("m", 0.1)) == []
    assert names(fleet.candidates("m", 0.1)) == ["d"]
    assert names(fleet.prefillers("m", 2.0, dry_run=True)) == ["p"]
    assert names(fleet.prefillers("m", 2.0)) == ["p"]
    assert names(fleet.prefillers("m", 2.0)) == []


def test_without_a_decode_worker_the_reason_says_so() -> None:
    fleet = fleet_of(spec("p", Role.PREFILL), spec("d", Role.DECODE))
    fleet._members["d"].answers = False
    assert fleet.candidates("m", 0.0) == []
    assert fleet.unavailable_reason("m") == "no_decode_worker"
    assert fleet.unavailable_reason("m", {"d"}) == "all_tried"


def test_models_that_lack_a_phase_are_named() -> None:
    fleet = fleet_of(spec("p", Role.PREFILL), spec("d", Role.DECODE))
    assert models_without(fleet.statuses(), CAN_PREFILL) == []
    fleet.get("p").answering = False  # type: ignore[union-attr]
    assert models_without(fleet.statuses(), CAN_PREFILL) == ["m"]
    assert models_without(fleet.statuses(), CAN_ANSWER) == []
