# SPDX-License-Identifier: Apache-2.0
"""The engine on its own thread: the owner is never held up by the library."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engine_ext.transfer.agent import Posted, TransferState
from engine_ext.transfer.config import TransferConfig
from engine_ext.transfer.engine import PullEngine
from engine_ext.transfer.errors import TransferThreadError
from engine_ext.transfer.events import (
    Event,
    FailReason,
    JobId,
    Proof,
    Pulled,
    PullFailed,
    PullRequest,
    Released,
)
from engine_ext.transfer.thread import PullThread

from .scripted import BLOCK_BYTES, BOOT_A, OURS, ScriptedAgent, offer

PATIENCE_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.read = 0

    def __call__(self) -> float:
        self.read += 1
        return self.now_s


class BlockingAgent(ScriptedAgent):
    """Stands inside `post` until the test lets it go, as a copy over shared memory does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.inside = threading.Event()
        self.go_on = threading.Event()
        self.fail_with: BaseException | None = None

    def post(self, boot_id: str, source: list[int], destination: list[int]) -> Posted:
        self.inside.set()
        assert self.go_on.wait(PATIENCE_S)
        if self.fail_with is not None:
            raise self.fail_with
        return super().post(boot_id, source, destination)


class Stage:
    def __init__(self) -> None:
        self.clock = Clock()
        self.agent = BlockingAgent(1)
        self.agent.post_state = TransferState.DONE
        config = TransferConfig.load({"warm_up_s": 0.0})
        self.thread = PullThread(PullEngine(config, OURS, lambda number: self.agent, self.clock))
        self.thread.connect("A", offer())

    def submit(self, destination: list[int], within_s: float = 1.0) -> JobId:
        source = [block + 100 for block in destination]
        return self.thread.submit(PullRequest("A", BOOT_A, source, destination, self.clock() + within_s))

    def until(self, wanted: Callable[[list[Event]], bool]) -> list[Event]:
        events: list[Event] = []
        stop_s = time.monotonic() + PATIENCE_S
        while not wanted(events):
            assert time.monotonic() < stop_s, events
            events.extend(self.thread.take())
            threading.Event().wait(0.001)
        return events


@pytest.fixture
def stage() -> Iterator[Stage]:
    one = Stage()
    yield one
    one.agent.go_on.set()
    one.thread.close(PATIENCE_S)


def test_a_pull_goes_through_the_thread(stage: Stage) -> None:
    stage.agent.go_on.set()
    job = stage.submit([0, 1])
    assert stage.until(bool) == [Pulled(job, 2 * BLOCK_BYTES, 0.0)]


def test_a_pull_fails_at_its_deadline_while_the_library_is_busy_and_its_blocks_come_free_later(
    stage: Stage,
) -> None:
    job = stage.submit([0, 1])
    assert stage.agent.inside.wait(PATIENCE_S)
    assert stage.thread.take() == []
    stage.clock.now_s += 1.0
    assert stage.thread.take() == [PullFailed(job, FailReason.DEADLINE, quarantined=(0, 1))]
    stage.agent.go_on.set()
    assert stage.until(bool) == [Released(job, (0, 1), Proof.FINISHED)]


def test_an_abort_is_answered_while_the_library_is_busy(stage: Stage) -> None:
    job = stage.submit([0, 1])
    assert stage.agent.inside.wait(PATIENCE_S)
    stage.thread.abort(job)
    assert stage.thread.take() == [PullFailed(job, FailReason.ABORTED, quarantined=(0, 1))]
    stage.agent.go_on.set()
    assert stage.until(bool) == [Released(job, (0, 1), Proof.FINISHED)]


def test_an_error_of_the_thread_reaches_the_owner(stage: Stage) -> None:
    stage.agent.fail_with = ZeroDivisionError("a bug")
    stage.agent.go_on.set()
    stage.submit([0])
    stop_s = time.monotonic() + PATIENCE_S
    cause: BaseException | None = None
    while cause is None and time.monotonic() < stop_s:
        try:
            stage.thread.take()
        except TransferThreadError as error:
            cause = error.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert not stage.thread.close(PATIENCE_S), "nothing proves that its transfers are over"


def test_closing_ends_the_thread_and_destroys_the_agent(stage: Stage) -> None:
    stage.agent.go_on.set()
    assert stage.thread.close(PATIENCE_S)
    assert stage.agent.closed
    job = stage.submit([3])
    assert stage.thread.take() == [PullFailed(job, FailReason.CLOSED)]


def test_an_idle_thread_sleeps(stage: Stage) -> None:
    stage.agent.go_on.set()
    stage.submit([0])
    stage.until(bool)
    read = stage.clock.read
    threading.Event().wait(0.2)
    assert stage.clock.read - read <= 5, "at most the end of the round that was under way"


def test_whoever_waits_is_told_of_every_event_and_of_an_error() -> None:
    agent = BlockingAgent(1)
    agent.post_state = TransferState.DONE
    agent.go_on.set()
    told = threading.Event()
    config = TransferConfig.load({"warm_up_s": 0.0})
    thread = PullThread(PullEngine(config, OURS, lambda number: agent), notify=told.set)
    try:
        thread.connect("A", offer())
        for _ in range(2):
            told.clear()
            thread.submit(PullRequest("A", BOOT_A, [100], [0], time.monotonic() + PATIENCE_S))
            assert told.wait(PATIENCE_S)
            assert [type(event) for event in thread.take()] == [Pulled]
        told.clear()
        agent.fail_with = ZeroDivisionError("a bug")
        thread.submit(PullRequest("A", BOOT_A, [100], [0], time.monotonic() + PATIENCE_S))
        assert told.wait(PATIENCE_S)
        with pytest.raises(TransferThreadError):
            thread.take()
    finally:
        thread.close(PATIENCE_S)
