# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import combinations, islice, takewhile

import pytest

from router.demo.workload import WorkloadShape, endless_workloads, make_workload


def test_the_same_seed_gives_the_same_workload_and_another_seed_another() -> None:
    assert make_workload(1, 4) == make_workload(1, 4)
    assert make_workload(1, 4) != make_workload(2, 4)


def test_documents_share_only_their_beginning_and_have_the_asked_length() -> None:
    shape = WorkloadShape(document_chars=(900, 1000))
    documents = make_workload(1, 2, shape).documents
    assert len(documents) == 2 * shape.documents
    assert all(900 <= len(document) <= 1000 for document in documents)
    for one, other in combinations(documents, 2):
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        assert 16 < common < 160, "one block is everybody's, no document is another's"


def test_conversations_come_in_order_of_start_and_ask_about_documents_that_exist() -> None:
    workload = make_workload(3, 4)
    starts = [one.start_s for one in workload.conversations]
    assert starts == sorted(starts)
    assert {one.document for one in workload.conversations} <= set(range(len(workload.documents)))
    assert workload.requests == sum(len(one.turns) for one in workload.conversations)
    assert max(len(one.turns) for one in workload.conversations) > 1


def test_the_burst_asks_about_one_document_within_a_moment() -> None:
    shape = WorkloadShape(burst=4, burst_start_s=50.0)
    workload = make_workload(3, 4, shape)
    burst = [one for one in workload.conversations if one.start_s >= 50.0]
    assert len(burst) == 16
    hot = len(workload.documents) - 1
    assert {one.document for one in burst} == {hot}
    readers = [one for one in workload.conversations if one.document == hot and one.start_s < 50.0]
    assert [len(one.turns) for one in readers] == [1], "one reader before it, so one worker holds it"
    assert burst[-1].start_s - burst[0].start_s < 1.0
    questions = [turn.question for one in burst for turn in one.turns]
    assert len(set(questions)) == len(questions), "each has a text of its own"


@pytest.mark.parametrize("workers", [8, 64])
def test_the_load_stops_growing_at_eight_workers(workers: int) -> None:
    assert make_workload(1, workers) == make_workload(1, 8)


def test_endless_traffic_keeps_its_documents_and_changes_its_questions() -> None:
    first, second = islice(endless_workloads(1, 2), 2)
    assert first.documents == second.documents == make_workload(1, 2).documents
    assert first.conversations != second.conversations
