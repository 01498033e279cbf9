# SPDX-License-Identifier: Apache-2.0
"""One machine drives the native load board and the plain one; they must never differ, not by a bit."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from router.plan.load import LoadBoard
from router.plan.native_board import NativeLoadBoard

WORKERS = [f"w{number}" for number in range(5)]
RANKS = range(2)
workers = st.sampled_from(WORKERS)
seconds = st.floats(0, 10)
tokens = st.integers(0, 10_000)

Ticket = tuple[int, int]
"""Of the native board and of the plain one."""


class BoardMachine(RuleBasedStateMachine):
    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.native, self.plain = NativeLoadBoard(), LoadBoard()
        self.now_s = 0.0

    @rule(
        target=tickets,
        worker=workers,
        rank=st.sampled_from(RANKS),
        prefill_s=seconds,
        ttft_s=seconds,
        sources=st.lists(workers, max_size=3, unique=True),
        observable=st.booleans(),
        prompt_tokens=tokens,
        missing_tokens=tokens,
    )
    def promise(
        self,
        worker: str,
        rank: int,
        prefill_s: float,
        ttft_s: float,
        sources: list[str],
        observable: bool,
        prompt_tokens: int,
        missing_tokens: int,
    ) -> Ticket:
        def on(board: NativeLoadBoard | LoadBoard) -> int:
            return board.promise(
                worker,
                rank,
                prefill_s,
                ttft_s,
                self.now_s,
                sources,
                observable=observable,
                prompt_tokens=prompt_tokens,
                missing_tokens=missing_tokens,
            )

        return on(self.native), on(self.plain)

    @rule(ticket=tickets)
    def first_token(self, ticket: Ticket) -> None:
        self.native.first_token(ticket[0], self.now_s)
        self.plain.first_token(ticket[1], self.now_s)

    @rule(ticket=tickets)
    def release(self, ticket: Ticket) -> None:
        """Also of tickets that were released before."""
        self.native.release(ticket[0], self.now_s)
        self.plain.release(ticket[1], self.now_s)

    @rule(worker=workers, running=st.integers(0, 9), waiting=st.integers(0, 9))
    def sampled(self, worker: str, running: int, waiting: int) -> None:
        for board in (self.native, self.plain):
            board.sampled(worker, running, waiting, self.now_s)

    @rule(worker=workers)
    def forget(self, worker: str) -> None:
        for board in (self.native, self.plain):
            board.forget(worker)

    @rule(worker=workers, hold=st.booleans())
    def hold(self, worker: str, hold: bool) -> None:
        """What the planner's table does changes nothing that anybody sees."""
        if hold:
            self.native.hold(worker)
        else:
            self.native.drop(worker)

    @rule(passed_s=st.floats(0, 4))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule(target=tickets, number=st.integers(0, 2**40))
    def ticket_that_was_never_given(self, number: int) -> Ticket:
        """Neither board numbers so, now or later."""
        return 2**63 + number, -1 - number

    @invariant()
    def read_the_same(self) -> None:
        for worker in WORKERS:
            for rank in RANKS:
                assert self.native.queue_s(worker, rank, self.now_s) == self.plain.queue_s(
                    worker, rank, self.now_s
                )
                assert self.native.decodes(worker, rank, self.now_s) == self.plain.decodes(
                    worker, rank, self.now_s
                )
                for name in ("prefilled_s", "prefill_tokens", "active_tokens"):
                    assert getattr(self.native, name)(worker, rank) == getattr(self.plain, name)(worker, rank)
            for name in ("pulls", "in_flight", "sessions"):
                assert getattr(self.native, name)(worker) == getattr(self.plain, name)(worker)


TestBoardMachine = BoardMachine.TestCase
TestBoardMachine.settings = settings(max_examples=200, stateful_step_count=50)


def test_numbers_of_workers_that_left_are_given_to_others() -> None:
    board = NativeLoadBoard()
    ticket = board.promise("early", 0, 1.0, 1.0, 0.0, ["source"])
    for number in range(1000):
        name = f"w{number}"
        board.sampled(name, 0, 0, 0.0)
        board.release(board.promise(name, 0, 1.0, 1.0, 0.0), 1.0)
        board.forget(name)
    board.forget("early")
    assert board.core.hold_worker("another") == 2
    board.release(ticket, 2.0)
    board.forget("source")
    assert {board.core.hold_worker("new"), board.core.hold_worker("newer")} == {0, 1}


def test_many_workers_keep_their_sessions_apart() -> None:
    board, names = NativeLoadBoard(), [f"w{number}" for number in range(300)]
    for number, name in enumerate(names):
        board.promise(name, 0, 1.0, 1.0, 0.0, [names[number * 7 % 300]])
    for number, name in enumerate(names):
        assert board.sessions(name) == {names[number * 7 % 300]}
