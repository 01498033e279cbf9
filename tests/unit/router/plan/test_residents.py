# SPDX-License-Identifier: Apache-2.0
"""Prompts in flight on the boards: what is shared with them, and that each goes once."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import pytest

from indexer import _core
from router.costs.model import CostModel
from router.costs.profile import load_profile
from router.plan.candidate import Candidate, Question, Residence
from router.plan.displacement import MOST_WAITS, WAITS, occupied_s
from router.plan.load import LoadBoard, Resident
from router.plan.native_board import NativeLoadBoard
from router.plan.planner import Planner
from router.plan.residents import Residents

COSTS = CostModel(load_profile("default"))
BOARDS = pytest.mark.parametrize("kind", [LoadBoard, NativeLoadBoard])
ONE = Candidate("w", 0, 16, 1, [Residence()], queue_s=0.0, decodes=3)


def prompt(*blocks: int) -> bytes:
    return array("Q", blocks).tobytes()


def resident(*prompts: bytes, size: int = 16) -> Resident:
    return Resident(size, prompts)


def promised(board: LoadBoard | NativeLoadBoard, worker: str, what: Resident) -> int:
    return board.promise(worker, 0, 0.1, 0.1, 0.0, resident=what)


def shared(board: LoadBoard | NativeLoadBoard, what: Resident, worker: str) -> int:
    return sum(one.shared for one in board.leading(what)(worker, 0))


def test_nothing_is_paid_while_there_is_room_or_the_room_is_not_known() -> None:
    assert occupied_s(COSTS, replace(ONE, fresh_tokens=500, resident_tokens=900), 256) == 0.0
    assert occupied_s(COSTS, replace(ONE, fresh_tokens=500, kv_capacity_tokens=1000), 256) == 0.0
    assert occupied_s(COSTS, replace(ONE, resident_tokens=900, kv_capacity_tokens=1000), 256) == 0.0


def test_room_costs_what_those_who_wait_for_it_lose() -> None:
    asked = replace(ONE, fresh_tokens=500, resident_tokens=500, kv_capacity_tokens=1000)
    stay_s = 256 * COSTS.decode_step_s(4)
    assert occupied_s(COSTS, asked, 256) == pytest.approx(WAITS * 0.5**5 / 0.5 * 0.5 * stay_s)
    for filled in (1000, 5000):
        full = replace(asked, resident_tokens=filled)
        assert occupied_s(COSTS, full, 256) == pytest.approx(WAITS * MOST_WAITS * 0.5 * stay_s)


def test_every_plan_of_a_worker_pays_for_the_room() -> None:
    planner, asked = Planner(COSTS, 0.1, 5.0), replace(ONE, residence=[Residence(ram=((0, 40),))])
    full = replace(asked, fresh_tokens=900, resident_tokens=900, kv_capacity_tokens=1000)
    added_s = occupied_s(COSTS, full, 256)
    pairs = zip(
        planner.plans(Question([1000], [asked]), asked),
        planner.plans(Question([1000], [full]), full),
        strict=True,
    )
    assert added_s > 0
    for before, after in pairs:
        assert after.score_s == pytest.approx(before.score_s + added_s)
        assert after.terms.displaced_s == pytest.approx(before.terms.displaced_s + added_s)
        assert after.terms.total_s == before.terms.total_s


@BOARDS
def test_a_prompt_is_in_flight_from_its_promise_to_its_release(
    kind: type[LoadBoard | NativeLoadBoard],
) -> None:
    board, asked = kind(), resident(prompt(1, 2, 3, 4))
    first = promised(board, "a", resident(prompt(1, 2, 3, 5, 6)))
    second = promised(board, "a", resident(prompt(1, 2)))
    other = promised(board, "b", resident(prompt(1), prompt(1, 2, 3, 4, 5)))
    assert [shared(board, asked, worker) for worker in "abc"] == [3, 4, 0]
    assert shared(board, resident(prompt(1, 2), prompt(1, 2)), "a") == 4
    assert shared(board, resident(prompt(1, 2), size=64), "a") == 0
    assert [board.resident_tokens(worker, 0) for worker in "abc"] == [80, 80, 0]
    board.release(first, 1.0)
    board.release(first, 1.0)
    assert shared(board, asked, "a") == 2
    assert board.resident_tokens("a", 0) == 32
    board.release(second, 1.0)
    board.release(other, 1.0)
    assert board.residents.prompts == board.residents.nodes == 0
    assert not any(shared(board, asked, worker) or board.resident_tokens(worker, 0) for worker in "abc")


@BOARDS
def test_what_is_in_flight_says_when_the_last_of_those_who_bring_it_is_scheduled(
    kind: type[LoadBoard | NativeLoadBoard],
) -> None:
    board = kind()
    board.promise("a", 0, 0.1, 0.1, 10.0, resident=resident(prompt(1, 2, 3)))
    pulling = Resident(16, (prompt(1, 2, 4),), loading_s=5.0)
    later = board.promise("a", 0, 0.1, 0.1, 20.0, resident=pulling)
    board.promise("b", 0, 0.1, 0.1, 20.0, resident=Resident(16, (prompt(1, 2),), loading_s=math.inf))
    asked = resident(prompt(1, 2, 3), prompt(7), prompt(1, 2, 4, 5))
    assert board.leading(asked)("a", 0) == [(3, 10.0), (0, -math.inf), (3, 25.0)]
    assert board.leading(asked)("b", 0) == [(2, -math.inf), (0, -math.inf), (2, -math.inf)]
    board.release(later, 21.0)
    assert board.leading(asked)("a", 0)[0] == (3, 10.0)


@BOARDS
def test_prompts_of_a_forgotten_worker_still_end_once(
    kind: type[LoadBoard | NativeLoadBoard],
) -> None:
    board = kind()
    ticket = promised(board, "a", resident(prompt(1, 2)))
    board.forget("a")
    again = promised(board, "b", resident(prompt(1, 2)))
    board.release(ticket, 1.0)
    board.release(ticket, 1.0)
    assert [board.resident_tokens(worker, 0) for worker in "ab"] == [0, 32]
    board.release(again, 1.0)
    assert board.residents.prompts == board.residents.nodes == 0


@pytest.mark.parametrize("kind", [Residents, _core.Residents])
def test_prompt_that_is_not_there_cannot_end(kind: type[Residents[int] | _core.Residents]) -> None:
    residents = kind()
    number = residents.begin(0, 16, prompt(1, 2, 3), 0.0)
    residents.end(number)
    with pytest.raises(KeyError):
        residents.end(number)
    nothing = residents.begin(0, 16, b"", 0.0)
    assert residents.nodes == 0
    residents.end(nothing)
    assert residents.prompts == 0
