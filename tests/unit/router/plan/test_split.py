# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.plan.candidate import Residence
from router.plan.split import Holder, Need, Part, chunk_runs, missing_chunks, splits

NEED = Need(0, 100, 1.0, 1000.0, 1e9)
"""Every chunk is worth having."""


def holder(name: str, *runs: tuple[int, int], rate: float = 1.0, start_s: float = 0.0) -> Holder:
    return Holder(name, runs, rate, start_s)


def parts(*holders: Holder, need: Need = NEED) -> list[list[tuple[str, int, int]]]:
    return [
        [(holders[one.holder].worker, one.start, one.end) for one in split] for split in splits(holders, need)
    ]


def test_equal_holders_of_everything_share_it_equally() -> None:
    assert parts(holder("a", (0, 100)), holder("b", (0, 100))) == [[("a", 0, 50), ("b", 50, 100)]]
    three = [holder(name, (0, 90)) for name in "abc"]
    assert parts(*three)[1] == [("a", 0, 30), ("b", 30, 60), ("c", 60, 90)]


def test_a_faster_holder_gets_more() -> None:
    [split] = parts(holder("slow", (0, 100)), holder("fast", (0, 100), rate=3.0))
    assert split == [("slow", 0, 25), ("fast", 25, 100)]


def test_who_holds_less_gives_what_it_has_where_that_is_less_than_its_share() -> None:
    assert parts(holder("long", (0, 100)), holder("short", (0, 20))) == [
        [("short", 0, 20), ("long", 20, 100)]
    ]


def test_one_goes_on_where_the_other_ends() -> None:
    assert parts(holder("tail", (30, 100)), holder("head", (0, 40))) == [[("head", 0, 40), ("tail", 40, 100)]]


def test_nothing_is_split_over_a_gap_or_within_one_worker() -> None:
    assert parts(holder("head", (0, 40)), holder("tail", (41, 100))) == []
    assert parts(holder("a", (0, 100)), holder("a", (0, 100))) == []
    assert parts(holder("a", (0, 100)), holder("b", (0, 100)), need=NEED._replace(begin=99)) == []


def test_chunks_that_are_not_worth_it_are_left_to_be_computed() -> None:
    """Reaching further through a session that has yet to be made costs more than it saves."""
    near = [holder(name, (0, 90)) for name in "ab"]
    far = holder("c", (0, 100), start_s=50.0)
    assert parts(*near, far, need=NEED._replace(gain_s=1.0))[0] == [("a", 0, 45), ("b", 45, 90)]
    assert parts(*near, far, need=NEED._replace(gain_s=10.0))[0][-1] == ("c", 50, 100)


def test_only_what_the_destination_lacks_is_asked_for() -> None:
    own = Residence(hbm=((0, 10),), ram=((0, 24),))
    assert missing_chunks(641, 16, 1, own) == (24, 40)
    assert missing_chunks(641, 16, 4, own) == (6, 10)
    assert missing_chunks(641, 16, 4, Residence(hbm=((0, 11),))) == (2, 10)
    assert missing_chunks(640, 16, 1, Residence(hbm=((0, 40),))) == (39, 40)


def test_spans_that_touch_are_one_run() -> None:
    assert chunk_runs(((0, 3), (3, 5), (6, 7)), 1) == [(0, 5), (6, 7)]
    # Where only the last block of a chunk has an event of its own, it stands for the chunk.
    assert chunk_runs(((3, 4), (7, 8), (15, 16)), 4) == [(0, 2), (3, 4)]


@st.composite
def many(draw: st.DrawFn) -> list[Holder]:
    found = []
    for name in "abcd"[: draw(st.integers(0, 4))]:
        edges = sorted(draw(st.sets(st.integers(0, 30), min_size=2, max_size=6)))
        runs = list(zip(edges[::2], edges[1::2], strict=False))
        found.append(holder(name, *runs, rate=draw(st.floats(0.1, 10)), start_s=draw(st.floats(0, 1))))
    return found


@given(holders=many(), begin=st.integers(0, 32), end=st.integers(0, 32), gain_s=st.floats(0, 10))
def test_a_split_covers_what_it_says_with_blocks_that_are_there(
    holders: list[Holder], begin: int, end: int, gain_s: float
) -> None:
    found = splits(holders, Need(begin, end, 1.0, gain_s, 5.0))
    assert [len(split) for split in found] in ([], [2], [3], [2, 3])
    for split in found:
        assert split[0].start == begin
        assert split[-1].end <= end
        assert len({holders[one.holder].worker for one in split}) == len(split)
        for one, following in itertools.pairwise(split):
            assert one.end == following.start
        for one in split:
            assert one.start < one.end
            assert any(first <= one.start and one.end <= last for first, last in holders[one.holder].runs)


@given(
    rates=st.lists(st.floats(0.2, 5), min_size=2, max_size=3),
    ends=st.lists(st.integers(5, 60), min_size=2, max_size=3),
)
def test_no_other_cut_of_prefixes_is_done_sooner(rates: list[float], ends: list[int]) -> None:
    """Against every possible cut; one chunk is the error of rounding."""
    count = min(len(rates), len(ends))
    holders = [
        holder(name, (0, end), rate=rate) for name, rate, end in zip("abc", rates, sorted(ends), strict=False)
    ]
    reach = sorted(ends)[count - 1]
    found = [split for split in splits(holders[:count], NEED) if len(split) == count]
    if not found:
        return  # one of them is too slow to be worth a chunk

    def done_s(split: tuple[Part, ...]) -> float:
        return max((one.end - one.start) / holders[one.holder].bytes_per_s for one in split)

    best_s = min(
        done_s(tuple(Part(i, *edges) for i, edges in enumerate(itertools.pairwise([0, *cuts, reach]))))
        for cuts in itertools.combinations(range(1, reach), count - 1)
        if all(cut <= holders[i].runs[0][1] for i, cut in enumerate(cuts))
    )
    assert done_s(found[0]) <= best_s + 2 / min(one.bytes_per_s for one in holders[:count])


@pytest.mark.parametrize("held", [0, 1])
def test_alone_nobody_can_share(held: int) -> None:
    assert splits([holder("a", (0, 100))][:held], NEED) == []
