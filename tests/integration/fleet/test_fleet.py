# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest

from router.config_fleet import FleetConfig
from router.fleet.fleet import Fleet, FleetCallbacks
from router.fleet.metrics_text import MAX_METRICS_BYTES
from router.fleet.worker import Health, WorkerSpec
from router.request import Outcome

FAST = FleetConfig(poll_interval_s=0.02, poll_timeout_s=2.0)
# Long enough that no second poll happens within a test.
ONCE = FleetConfig(poll_interval_s=3600, poll_timeout_s=2.0)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Recorder:
    def __init__(self):
        self.events = []
        self._changed = asyncio.Event()
        self.callbacks = FleetCallbacks(
            on_status=lambda worker: self._add("status", worker),
            on_joined=lambda worker: self._add("joined", worker),
            on_process_start_time=lambda worker, value: self._add("started", worker, value),
            on_removed=lambda worker: self._add("removed", worker),
        )

    def _add(self, *event):
        self.events.append(event)
        self._changed.set()

    def of(self, kind):
        return [event for event in self.events if event[0] == kind]

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def make_fleet():
    fleets = []

    async def make(specs, settings=ONCE, clock=None, recorder=None):
        fleet = Fleet(specs, settings, clock or Clock(), recorder.callbacks if recorder else None)
        fleets.append(fleet)
        await fleet.start()
        return fleet

    yield make
    for fleet in fleets:
        await fleet.stop()


def ids(statuses):
    return [status.spec.id for status in statuses]


async def test_a_poll_fills_the_status(fake_worker, make_fleet):
    worker = await fake_worker(
        models=[
            {"id": "m", "root": "org/m", "parent": None, "max_model_len": 4096},
            {"id": "alias", "root": "org/m", "parent": None, "max_model_len": 4096},
            {"id": "lora1", "root": "/adapters/1", "parent": "alias"},
        ],
        sources={"0": {"endpoint": "tcp://*:5557"}, "1": {"endpoint": "tcp://*:5558"}},
    )
    fleet = await make_fleet([worker.spec(ranks_given=False)])
    status = fleet.statuses()[0]
    assert status.health is Health.HEALTHY
    assert (status.kv_cache_usage, status.block_size_tokens, status.process_start_time_s) == (0.5, 32, 1000.0)
    assert status.sampled_at_s == 100.0
    assert status.spec.ranks == 2
    assert {name: (info.base, info.lora) for name, info in status.models.items()} == {
        "m": ("m", None),
        "alias": ("m", None),
        "lora1": ("m", "lora1"),
    }
    assert status.models["lora1"].max_model_len == 4096
    assert fleet.model_info("alias").base == "m"


async def test_configured_ranks_are_kept(fake_worker, make_fleet):
    worker = await fake_worker(sources={"0": {}, "1": {}})
    fleet = await make_fleet([worker.spec(ranks=4)])
    assert fleet.statuses()[0].spec.ranks == 4


async def test_only_workers_that_serve_the_model_are_candidates(fake_worker, make_fleet):
    a = await fake_worker()
    b = await fake_worker(models=[{"id": "n", "root": "n", "parent": None}])
    dead = WorkerSpec(id="dead", url="http://127.0.0.1:1")
    fleet = await make_fleet([a.spec(id="a"), b.spec(id="b"), dead])
    assert ids(fleet.candidates("m", 0.0)) == ["a"]
    assert ids(fleet.candidates("n", 0.0)) == ["b"]
    assert ids(fleet.candidates(None, 0.0)) == ["a", "b"]
    assert ids(fleet.candidates("nobody's", 0.0)) == ["a", "b"]
    assert ids(fleet.candidates(None, 0.0, exclude={"a"})) == ["b"]
    assert fleet.get("dead").health is Health.UNHEALTHY
    assert fleet.get("dead").last_error


async def test_reasons_for_no_candidate(fake_worker, make_fleet):
    a = await fake_worker()
    fleet = await make_fleet([a.spec(id="a"), WorkerSpec(id="dead", url="http://127.0.0.1:1")])
    assert fleet.unavailable_reason("m", exclude={"a", "dead"}) == "all_tried"
    assert fleet.unavailable_reason("m", exclude={"a"}) == "all_unhealthy"
    fleet.set_drain("a", True)
    assert fleet.unavailable_reason("m") == "all_draining"
    empty = await make_fleet([])
    assert empty.unavailable_reason("m") == "no_workers"


async def test_a_drained_worker_is_no_candidate_until_it_is_put_back(fake_worker, make_fleet):
    worker = await fake_worker()
    fleet = await make_fleet([worker.spec(id="a")])
    assert fleet.set_drain("a", True)
    assert fleet.candidates("m", 0.0) == []
    assert fleet.get("a").health is Health.DRAINING
    fleet.set_drain("a", False)
    assert ids(fleet.candidates("m", 0.0)) == ["a"]
    assert not fleet.set_drain("nobody", True)


async def test_a_worker_that_fails_requests_is_avoided_by_all_and_recovers(fake_worker, make_fleet):
    a, b, clock = await fake_worker(), await fake_worker(), Clock()
    fleet = await make_fleet([a.spec(id="a"), b.spec(id="b")], clock=clock)
    chosen_a = 0
    for step in range(200):  # the caller prefers a, which answers 500 to everything
        clock.now_s = 100 + step * 0.01
        candidates = ids(fleet.candidates("m", clock.now_s))
        if "a" in candidates:
            chosen_a += 1
            fleet.record_outcome("a", Outcome.WORKER_ERROR, clock.now_s)
        else:
            fleet.record_outcome("b", Outcome.OK, clock.now_s)
    assert chosen_a < 10
    assert fleet.get("a").health is Health.BACKOFF
    clock.now_s = fleet.get("a").retry_at_s + 0.1
    assert [ids(fleet.candidates("m", clock.now_s)) for _ in range(3)] == [["b", "a"], ["b"], ["b"]]
    fleet.record_outcome("a", Outcome.OK, clock.now_s)
    assert ids(fleet.candidates("m", clock.now_s)) == ["a", "b"]


async def test_client_errors_never_take_a_worker_out(fake_worker, make_fleet):
    worker = await fake_worker()
    fleet = await make_fleet([worker.spec(id="a")])
    for _ in range(100):
        fleet.record_outcome("a", Outcome.CLIENT_ERROR, 0.0)
        fleet.record_outcome("a", Outcome.BUSY, 0.0)
    assert fleet.get("a").health is Health.HEALTHY
    assert ids(fleet.candidates("m", 0.0)) == ["a"]


async def test_a_paused_worker_is_used_when_it_is_the_only_one(fake_worker, make_fleet):
    worker = await fake_worker()
    fleet = await make_fleet([worker.spec(id="a")])
    for _ in range(3):
        fleet.record_outcome("a", Outcome.WORKER_ERROR, 0.0)
    assert fleet.get("a").health is Health.BACKOFF
    assert ids(fleet.candidates("m", 0.1)) == ["a"]


async def test_a_sleeping_worker_is_used_last(fake_worker, make_fleet):
    awake = await fake_worker()
    asleep = await fake_worker(metrics=awake.metrics.replace('"awake"} 1', '"awake"} 0'))
    fleet = await make_fleet([asleep.spec(id="asleep"), awake.spec(id="awake")])
    assert fleet.get("asleep").asleep
    assert ids(fleet.candidates("m", 0.0)) == ["awake"]
    assert ids(fleet.candidates("m", 0.0, exclude={"awake"})) == ["asleep"]


async def test_a_killed_worker_leaves_and_a_restarted_one_joins_as_a_new_process(fake_worker, make_fleet):
    recorder, worker = Recorder(), await fake_worker()
    fleet = await make_fleet([worker.spec(id="a")], FAST, recorder=recorder)
    for _ in range(3):
        fleet.record_outcome("a", Outcome.WORKER_ERROR, 100.0)
    await worker.stop()
    await recorder.until(lambda: fleet.get("a").health is Health.UNHEALTHY)
    assert fleet.candidates("m", 0.0) == []
    worker.metrics = worker.metrics.replace("1000.0", "2000.0")
    await worker.start()
    await recorder.until(lambda: len(recorder.of("joined")) == 2)
    assert recorder.of("started") == [("started", "a", 1000.0), ("started", "a", 2000.0)]
    assert fleet.get("a").health is Health.HEALTHY, "failures of the dead process do not count"


async def test_a_worker_that_answers_health_with_500_is_unhealthy(fake_worker, make_fleet):
    worker = await fake_worker(health=500)
    fleet = await make_fleet([worker.spec(id="a")])
    assert fleet.get("a").health is Health.UNHEALTHY
    assert "500" in fleet.get("a").last_error


async def test_one_missed_poll_does_not_take_a_worker_out_but_several_do(fake_worker, make_fleet):
    recorder, worker = Recorder(), await fake_worker()
    settings = FleetConfig(poll_interval_s=0.01, poll_timeout_s=0.2, failure_threshold=3)
    fleet = await make_fleet([worker.spec(id="a")], settings, recorder=recorder)
    await recorder.until(lambda: fleet.get("a").health is Health.HEALTHY)
    worker.hang.add("/health")
    await recorder.until(lambda: "no answer" in (fleet.get("a").last_error or ""))
    assert fleet.get("a").health is Health.HEALTHY
    await recorder.until(lambda: fleet.get("a").health is Health.UNHEALTHY)


async def test_hanging_metrics_leave_the_old_sample_with_its_age_and_polls_do_not_pile_up(
    fake_worker, make_fleet
):
    recorder, clock, worker = Recorder(), Clock(), await fake_worker()
    settings = FleetConfig(poll_interval_s=0.01, poll_timeout_s=0.25)
    fleet = await make_fleet([worker.spec(id="a")], settings, clock, recorder)
    await recorder.until(lambda: fleet.get("a").sampled_at_s == 100.0)
    worker.hang.add("/metrics")
    await recorder.until(lambda: "/metrics" in (fleet.get("a").last_error or ""))
    clock.now_s = 200.0
    polls = len(recorder.of("status"))
    await recorder.until(lambda: len(recorder.of("status")) >= polls + 5)
    assert fleet.get("a").sampled_at_s == 100.0
    assert fleet.get("a").health is Health.HEALTHY
    # One request at a time; the server may notice the end of the last one a little late.
    assert worker.most_open_requests <= 3


async def test_an_endless_metrics_page_is_read_up_to_the_limit(fake_worker, make_fleet):
    worker = await fake_worker(endless={"/metrics"})
    fleet = await make_fleet([worker.spec(id="a")])
    status = fleet.get("a")
    assert (status.block_size_tokens, status.sampled_at_s) == (32, 100.0)
    # What was sent beyond the limit lies in socket buffers.
    assert worker.streamed_bytes < MAX_METRICS_BYTES + 16 * 2**20


async def test_an_endless_model_list_is_dropped(fake_worker, make_fleet):
    worker = await fake_worker(endless={"/v1/models"})
    fleet = await make_fleet([worker.spec(id="a")])
    assert fleet.get("a").models == {}
    assert fleet.get("a").health is Health.HEALTHY


async def test_rubbish_answers_leave_the_worker_in_service(fake_worker, make_fleet):
    worker = await fake_worker(metrics="\x00\x01 rubbish", models="rubbish", sources=["x"])
    fleet = await make_fleet([worker.spec(id="a")])
    status = fleet.get("a")
    assert status.health is Health.HEALTHY
    assert (status.models, status.sampled_at_s, status.spec.ranks) == ({}, None, 1)
    assert ids(fleet.candidates("m", 0.0)) == ["a"]


async def test_workers_come_and_go_without_a_trace(fake_worker, make_fleet):
    recorder, worker = Recorder(), await fake_worker()
    fleet = await make_fleet([], FAST, recorder=recorder)
    for round_number in range(20):
        fleet.add(worker.spec(id=f"w{round_number}"))
        with pytest.raises(ValueError, match="already"):
            fleet.add(worker.spec(id=f"w{round_number}"))
        await recorder.until(lambda: fleet.statuses()[0].health is Health.HEALTHY)
        fleet.remove(f"w{round_number}")
        fleet.record_outcome(f"w{round_number}", Outcome.WORKER_ERROR, 0.0)
    assert fleet.statuses() == []
    assert fleet._members == {}
    assert len(recorder.of("removed")) == 20


async def test_a_callback_that_fails_does_not_end_polling(fake_worker, caplog):
    calls, polled = [], asyncio.Event()

    def fail(worker_id):
        calls.append(worker_id)
        if len(calls) >= 3:
            polled.set()
        raise RuntimeError("broken")

    worker = await fake_worker()
    fleet = Fleet([worker.spec(id="a")], FAST, callbacks=FleetCallbacks(on_status=fail))
    await fleet.start()
    async with asyncio.timeout(20):
        await polled.wait()
    await fleet.stop()
    assert "callback failed" in caplog.text
