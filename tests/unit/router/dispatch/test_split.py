# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt one worker computes and another answers: promises, keys, records, ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from indexer.identity import WorkerId
from router.errors import NoWorkerAvailable
from router.fleet.metrics_text import WorkerMetrics
from router.fleet.poller import PollResult, Reach
from router.fleet.worker import ModelInfo, Role, Transfer, WorkerSpec
from router.plan.decider import Decider
from router.plan.disaggregation import Disaggregation
from router.plan.planner import Planner
from router.plan.policies import make_policy
from router.request import Outcome, Usage

from .conftest import BLOCK, Desk

MODEL = "m"
PROMPT = [7 * n % 3001 for n in range(3200)]
BODY = {"model": MODEL, "prompt": PROMPT, "stream": True}
USAGE = Usage(3200, 1, 0)


@dataclass
class SplitDesk(Desk):
    """A desk whose fleet has workers for one phase only."""

    busy: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        planner = Planner(self.calibration, 0.1, 5.0)
        self.dispatcher._decider = Decider(
            self.holders,
            self.board,
            make_policy(self.policy, planner),
            use_peers=True,
            disaggregation=Disaggregation(planner, self.calibration, 0.1),
        )

    def add_phase(self, worker: str, role: str, transfer: Transfer, ranks: int = 1) -> None:
        p2p = f"10.0.0.{ord(worker)}:7000" if transfer is Transfer.P2P else None
        spec = WorkerSpec(
            worker, f"http://{worker}", p2p=p2p, ranks=ranks, role=Role(role), transfer=transfer
        )
        self.fleet.add(spec)
        metrics = WorkerMetrics(running=0, waiting=0, block_size_tokens=BLOCK)
        models = {MODEL: ModelInfo(MODEL, MODEL)}
        self.fleet._apply(
            self.fleet._members[worker], PollResult(Reach.OK, None, metrics, models), self.now_s
        )
        self.holders.register(WorkerId(worker), MODEL, ranks)

    def make_busy(self, worker: str) -> None:
        """Answers that run there, so that a prefill beside them costs."""
        for _ in range(self.busy):
            self.board.first_token(self.board.promise(worker, 0, 0.0, 0.0, self.now_s), self.now_s)


@pytest.fixture
def desk() -> SplitDesk:
    return SplitDesk()


def fleet(desk: SplitDesk, transfer: Transfer = Transfer.P2P) -> None:
    desk.add_phase("p", "prefill", transfer)
    desk.add_phase("d", "decode", transfer)
    desk.make_busy("d")


async def test_both_legs_are_promised_from_the_decision_on(desk: SplitDesk) -> None:
    fleet(desk)
    attempt = await desk.dispatch(BODY)
    assert attempt.route.prefill is not None
    assert (attempt.route.worker_id, attempt.route.prefill.worker_id) == ("d", "p")
    assert desk.board.queue_s("p", 0, desk.now_s) > 0.1
    assert desk.board.in_flight("p") == 1
    assert desk.board.pulls("p") == desk.board.pulls("d") == 1
    attempt.prefill_finished(Outcome.OK, 200, USAGE)
    assert desk.board.in_flight("p") == 0
    assert desk.board.in_flight("d") == desk.busy + 1
    attempt.finish(Outcome.OK, 200)
    assert desk.board.in_flight("d") == desk.busy
    assert desk.board.pulls("p") == desk.board.pulls("d") == 0


@pytest.mark.parametrize("reported", [0, 1, 3])
async def test_a_leg_is_released_once_however_often_it_ends(desk: SplitDesk, reported: int) -> None:
    fleet(desk)
    attempt = await desk.dispatch(BODY)
    for _ in range(reported):
        attempt.prefill_finished(Outcome.OK, 200, USAGE)
    attempt.finish(Outcome.CLIENT_GONE, None)
    attempt.prefill_finished(Outcome.OK, 200, USAGE)
    assert desk.board.in_flight("p") == 0
    assert desk.board.residents.prompts == desk.board.residents.nodes == 0
    ok, cancelled = (
        desk.count("pointsman_attempts_total", worker="p", outcome=o) for o in ("ok", "cancelled")
    )
    assert (ok, cancelled) == ((1, 0) if reported else (0, 1))


async def test_the_keys_of_both_legs_name_one_fresh_id(desk: SplitDesk) -> None:
    fleet(desk)
    seen = set()
    for _ in range(3):
        attempt = await desk.dispatch(BODY)
        assert attempt.route.prefill is not None
        taken: Any = attempt.route.insert["kv_transfer_params"]
        handed: Any = attempt.route.prefill.insert["kv_transfer_params"]
        assert taken.keys() == {"remote_prefiller"}
        assert taken["remote_prefiller"]["remote_host"] == "10.0.0.112"
        assert taken["remote_prefiller"]["remote_port"] == 7000
        assert handed == {"remote_decoder": {"kv_request_id": taken["remote_prefiller"]["kv_request_id"]}}
        assert not attempt.route.prefill.first
        seen.add(taken["remote_prefiller"]["kv_request_id"])
        attempt.finish(Outcome.OK, 200)
    assert len(seen) == 3


async def test_nixl_sends_the_prefill_first_and_no_keys_to_the_decode_worker(desk: SplitDesk) -> None:
    fleet(desk, Transfer.NIXL)
    attempt = await desk.dispatch(BODY)
    assert attempt.route.prefill is not None
    assert attempt.route.prefill.first
    assert attempt.route.insert == {}
    handed: Any = attempt.route.prefill.insert["kv_transfer_params"]
    assert (handed["do_remote_decode"], handed["do_remote_prefill"]) == (True, False)
    attempt.finish(Outcome.OK, 200)


async def test_record_header_and_metric_tell_of_both_legs(desk: SplitDesk) -> None:
    fleet(desk)
    attempt = await desk.dispatch(BODY)
    assert (b"x-pointsman-prefill-worker", b"p") in attempt.route.response_headers
    assert (b"x-pointsman-worker", b"d") in attempt.route.response_headers
    assert (b"x-pointsman-path", b"peer:200") in attempt.route.response_headers
    record = attempt.record
    assert record.prefill is not None
    assert (record.worker, record.prefill.worker, record.prefill.transfer) == ("d", "p", "p2p")
    assert record.predicted_cached_tokens == 3200
    assert record.prefill.path_blocks == {"recompute": 200}
    assert record.candidates[0].prefill_worker == "p"
    assert record.candidates[0].seconds.remote == pytest.approx(record.prefill.predicted_s)
    assert "prefilled by p" in record.reason or "only candidate" in record.reason
    desk.now_s += 0.5
    attempt.prefill_finished(Outcome.OK, 200, Usage(3200, 1, 16))
    attempt.finish(Outcome.OK, 200)
    seen = record.prefill.observed
    assert (seen.outcome, seen.status, seen.duration_s, seen.cached_tokens) == ("ok", 200, 0.5, 16)
    assert desk.count("pointsman_split_requests_total", transfer="p2p") == 1


async def test_a_retry_is_never_split(desk: SplitDesk) -> None:
    fleet(desk)
    attempt = await desk.dispatch(BODY, tried=frozenset({"p"}))
    assert attempt.route.prefill is None
    assert attempt.route.worker_id == "d"
    attempt.finish(Outcome.OK, 200)


async def test_a_failed_prefill_worker_is_no_source_for_the_retry(desk: SplitDesk) -> None:
    fleet(desk)
    desk.store("p", PROMPT, in_ram=True)
    first = await desk.dispatch(BODY, tried=frozenset())
    first.finish(Outcome.CANCELLED, None)
    retry = await desk.dispatch(BODY, tried=frozenset({"p"}))
    assert retry.record.source is None
    retry.finish(Outcome.OK, 200)


@pytest.mark.parametrize(
    "changed",
    [
        {"n": 2},
        {"prompt": [PROMPT, PROMPT]},
        {"use_beam_search": True},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 1},
    ],
)
async def test_what_a_handover_cannot_serve_goes_to_one_decode_worker(
    desk: SplitDesk, changed: dict[str, Any]
) -> None:
    fleet(desk)
    attempt = await desk.dispatch(BODY | changed)
    assert attempt.route.prefill is None
    assert attempt.route.worker_id == "d"
    assert "remote_prefiller" not in str(attempt.route.insert)
    attempt.finish(Outcome.OK, 200)


async def test_a_pinned_rank_is_not_split(desk: SplitDesk) -> None:
    fleet(desk)
    request = desk.request(BODY, headers={"x-data-parallel-rank": "0"})
    attempt = await desk.dispatcher.dispatch(request, frozenset())
    assert attempt.route.prefill is None
    attempt.finish(Outcome.OK, 200)


async def test_a_prefill_worker_that_fails_is_left_out(desk: SplitDesk) -> None:
    fleet(desk)
    for _ in range(3):
        attempt = await desk.dispatch(BODY)
        assert attempt.route.prefill is not None
        attempt.prefill_finished(Outcome.WORKER_ERROR, None, None)
        attempt.finish(Outcome.CANCELLED, None)
    attempt = await desk.dispatch(BODY)
    assert attempt.route.prefill is None
    attempt.finish(Outcome.OK, 200)
    assert desk.count("pointsman_attempts_total", worker="d", outcome="cancelled") == 3
    assert not desk.fleet._members["d"].breaker.consecutive_failures


async def test_a_prefill_worker_that_proves_slow_is_no_longer_asked(desk: SplitDesk) -> None:
    fleet(desk)
    before_s = desk.calibration.model_for("p").prefill_s(0, len(PROMPT), 0)
    for _ in range(40):
        attempt = await desk.dispatch(BODY)
        if attempt.record.prefill is None:
            break
        desk.now_s += 3 * attempt.record.prefill.predicted_s
        attempt.prefill_finished(Outcome.OK, 200, USAGE)
        attempt.finish(Outcome.OK, 200)
    else:
        pytest.fail("it is still asked")
    assert desk.calibration.model_for("p").prefill_s(0, len(PROMPT), 0) > 1.5 * before_s


async def test_explain_shows_both_legs_and_promises_nothing(desk: SplitDesk) -> None:
    fleet(desk)
    record = await desk.dispatcher.explain(desk.request(BODY))
    assert record.prefill is not None
    assert record.prefill.worker == "p"
    assert desk.board.in_flight("p") == 0
    assert desk.count("pointsman_split_requests_total", transfer="p2p") == 0


async def test_a_prefill_rank_of_its_own_is_named_to_its_worker(desk: SplitDesk) -> None:
    desk.add_phase("p", "prefill", Transfer.P2P, ranks=2)
    desk.add_phase("d", "decode", Transfer.P2P)
    desk.make_busy("d")
    desk.store("p", PROMPT, rank=1)
    attempt = await desk.dispatch(BODY)
    assert attempt.route.prefill is not None
    assert (b"x-data-parallel-rank", b"1") in attempt.route.prefill.upstream_headers
    taken: Any = attempt.route.insert["kv_transfer_params"]
    assert taken["remote_prefiller"]["remote_port"] == 7001
    attempt.finish(Outcome.OK, 200)


async def test_prefill_workers_never_answer(desk: SplitDesk) -> None:
    desk.add_phase("p", "prefill", Transfer.P2P)
    with pytest.raises(NoWorkerAvailable, match="no_decode_worker"):
        await desk.dispatch(BODY)
