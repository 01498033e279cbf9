# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from router.replay.arrivals import Arrivals
from router.replay.scenarios import SCENARIOS, document_qa, hot_set, uniform_pool
from router.replay.traces import TraceRequest
from router.replay.workload import Workload

PREFIX_BLOCKS = 768


def sent(arrivals: Arrivals, answer_s: float = 1.0) -> list[TraceRequest]:
    """All requests of a source whose answers take ``answer_s``, one after the other in time."""
    taken: list[TraceRequest] = []
    running: list[tuple[float, int]] = []
    while arrivals.next_s is not None or running:
        if running and (arrivals.next_s is None or running[0][0] <= arrivals.next_s):
            done_s, index = running.pop(0)
            arrivals.finished(index, done_s)
            continue
        request = arrivals.take()
        taken.append(request)
        running.append((request.arrival_s + answer_s, request.index))
        running.sort()
    return taken


def shared_blocks(one: TraceRequest, other: TraceRequest) -> int:
    pairs = zip(one.block_ids, other.block_ids, strict=False)
    return next(
        (place for place, (a, b) in enumerate(pairs) if a != b), min(len(one.block_ids), len(other.block_ids))
    )


def test_document_qa_is_192_conversations_of_six_questions_each_about_a_document_of_its_own() -> None:
    workload = document_qa(0)
    requests = sent(workload.begin())
    assert sorted(one.index for one in requests) == list(workload.measured)
    by_document: dict[int, list[TraceRequest]] = {}
    for one in requests:
        assert one.full_blocks == len(one.block_ids)
        by_document.setdefault(one.block_ids[4], []).append(one)
    assert Counter(map(len, by_document.values())) == {6: 192}
    first, second = list(by_document.values())[:2]
    assert shared_blocks(first[0], second[0]) == 4, "the greeting alone"
    for before, after in pairwise(first):
        assert after.input_tokens == before.input_tokens + 256 + 256
        assert shared_blocks(before, after) == len(before.block_ids)
    assert first[0].input_tokens == 256 + 49_152 + 256


def test_document_qa_has_128_conversations_at_a_time() -> None:
    requests = sent(document_qa(0).begin(), answer_s=1000.0)
    starts = sorted(one.arrival_s for one in requests if one.input_tokens == 256 + 49_152 + 256)
    assert starts[127] == pytest.approx(127 / 60)
    assert starts[128] >= 6000.0, "the next one begins when one has ended"


@pytest.mark.parametrize(
    ("workload", "prefixes", "rate_per_s", "answer_tokens"),
    [(uniform_pool(3), 128, 30.0, 64), (hot_set(3), 64, 48.0, 512)],
)
def test_a_pool_sends_questions_about_shared_prefixes_at_a_constant_rate(
    workload: Workload, prefixes: int, rate_per_s: float, answer_tokens: int
) -> None:
    requests = sent(workload.begin())
    measured = {one.index: one for one in requests if one.index in set(workload.measured)}
    assert len(measured) == rate_per_s * 60
    assert {one.output_tokens for one in requests} == {answer_tokens}
    assert {one.input_tokens for one in requests} == {49_152 + 256}
    gaps = {round(b.arrival_s - a.arrival_s, 6) for a, b in pairwise(measured.values())}
    assert gaps == {round(1 / rate_per_s, 6)}
    drawn = Counter(one.block_ids[0] for one in measured.values())
    assert len(drawn) == prefixes
    assert max(drawn.values()) < 4 * len(measured) / prefixes
    same = [one for one in measured.values() if one.block_ids[0] == requests[0].block_ids[0]]
    assert shared_blocks(same[0], same[1]) == PREFIX_BLOCKS


def test_a_pool_is_warm_when_it_is_measured() -> None:
    requests = sent(uniform_pool(0).begin())
    from_index = uniform_pool(0).measured[0]
    assert from_index > 0
    assert {one.block_ids[0] for one in requests[:from_index]} == {one.block_ids[0] for one in requests}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_limit_is_of_what_is_measured_and_a_workload_begins_anew_each_time(name: str) -> None:
    make = {str(key): scenario.workload for key, scenario in SCENARIOS.items()}[name]
    workload = make(0, 60)
    assert len(workload.measured) == 60
    assert sent(workload.begin()) == sent(workload.begin())
    assert sent(workload.begin()) == sent(make(0, 60).begin())
