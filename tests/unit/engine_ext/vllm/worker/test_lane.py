# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine_ext.vllm.worker.lane import CudaLane, Finished, HostLane


@dataclass(eq=False)
class FakeEvent:
    """Reached when the test says so; its time is the place of its record in the log."""

    cuda: FakeCuda
    timed: bool
    at: int = -1
    reached: bool = False
    waited: bool = False

    def record(self, stream: FakeStream) -> None:
        self.at = len(self.cuda.log)
        self.cuda.log.append(("record", stream.name))

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timed
        assert end.timed
        assert end.reached
        return float(end.at - self.at)


@dataclass(eq=False)
class FakeStream:
    cuda: FakeCuda
    name: str
    synchronized: bool = False

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(("wait", self.name, other.name))

    def synchronize(self) -> None:
        self.synchronized = True


@dataclass
class FakeCuda:
    """What a lane asks of torch.cuda, in a log."""

    log: list[tuple[str, ...]] = field(default_factory=list)
    events: list[FakeEvent] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    inside: list[FakeStream] = field(default_factory=list)

    def Stream(self, device: Any) -> FakeStream:  # noqa: N802 - torch's name
        assert device == "cuda:3"
        self.streams.append(FakeStream(self, f"stream{len(self.streams)}"))
        return self.streams[-1]

    def Event(self, enable_timing: bool) -> FakeEvent:  # noqa: N802 - torch's name
        self.events.append(FakeEvent(self, enable_timing))
        return self.events[-1]

    def current_stream(self, device: Any) -> FakeStream:
        assert device == "cuda:3"
        return self.inside[-1] if self.inside else FakeStream(self, "model")

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.inside.append(stream)
        try:
            yield
        finally:
            self.inside.pop()

    def ends(self) -> list[FakeEvent]:
        return self.events[1::2]

    def copy(self, name: str) -> None:
        self.log.append((name, self.inside[-1].name if self.inside else "model"))


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def lane(cuda: FakeCuda) -> CudaLane:
    return CudaLane(cuda, "cuda:3")


def test_a_copy_runs_on_the_lanes_stream_behind_the_models_work_and_between_its_events(
    cuda: FakeCuda, lane: CudaLane
) -> None:
    lane.run(1, 10, lambda: cuda.copy("first"))
    lane.run(2, 20, lambda: cuda.copy("second"))
    wait, mark = ("wait", "stream0", "model"), ("record", "stream0")
    assert cuda.log == [wait, mark, ("first", "stream0"), mark, wait, mark, ("second", "stream0"), mark]


def test_transfers_end_in_order_with_their_size_and_seconds(cuda: FakeCuda, lane: CudaLane) -> None:
    for job in (1, 2, 3):
        lane.run(job, 10 * job, lambda: cuda.copy("copy"))
    assert lane.finished() == []
    first, second, third = cuda.ends()
    second.reached = True
    assert lane.finished() == [], "nothing overtakes on a stream"
    first.reached = True
    assert lane.finished() == [Finished(1, 10, 0.002), Finished(2, 20, 0.002)]
    third.reached = True
    assert [one.job_id for one in lane.finished()] == [3]
    assert lane.finished() == []


def test_waiting_waits_for_the_named_transfers_only_and_still_reports_them(
    cuda: FakeCuda, lane: CudaLane
) -> None:
    for job in (1, 2):
        lane.run(job, 10, lambda: cuda.copy("copy"))
    lane.wait({2, 99})
    assert [one.waited for one in cuda.ends()] == [False, True]
    for one in cuda.ends():
        one.reached = True
    assert [one.job_id for one in lane.finished()] == [1, 2]


def test_closing_waits_for_everything_on_the_stream(cuda: FakeCuda, lane: CudaLane) -> None:
    lane.run(1, 10, lambda: cuda.copy("copy"))
    lane.close()
    assert cuda.streams[0].synchronized
    assert lane.finished() == []


def test_a_refused_copy_is_the_callers_and_leaves_the_lane_as_it_was(cuda: FakeCuda, lane: CudaLane) -> None:
    def refuse() -> None:
        raise ValueError("a page that is not there")

    with pytest.raises(ValueError, match="not there"):
        lane.run(1, 10, refuse)
    lane.run(2, 10, lambda: cuda.copy("copy"))
    cuda.events[-1].reached = True
    assert [one.job_id for one in lane.finished()] == [2]


def test_a_host_copy_is_over_at_once_and_timed() -> None:
    times = iter([1.0, 1.5, 2.0, 2.25])
    lane, made = HostLane(lambda: next(times)), []
    lane.run(1, 10, lambda: made.append("first"))
    assert made == ["first"]
    lane.run(2, 20, lambda: made.append("second"))
    lane.wait({1, 2})
    assert lane.finished() == [Finished(1, 10, 0.5), Finished(2, 20, 0.25)]
    assert lane.finished() == []


def test_a_refused_host_copy_never_finishes() -> None:
    lane = HostLane(lambda: 0.0)

    def refuse() -> None:
        raise ValueError("a page that is not there")

    with pytest.raises(ValueError, match="not there"):
        lane.run(1, 10, refuse)
    assert lane.finished() == []
