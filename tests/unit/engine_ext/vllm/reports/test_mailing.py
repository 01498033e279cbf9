# SPDX-License-Identifier: Apache-2.0
"""The queue of one router, without a network."""

from __future__ import annotations

import json
from random import Random

from engine_ext.vllm.reports.mailing import BATCH_BYTES, BATCH_REPORTS, Answered, Mailing
from engine_ext.vllm.reports.messages import BOUNDS


def mailing(capacity: int = 10_000) -> Mailing:
    return Mailing(capacity, Random(1))


def taken(one: Mailing) -> list[dict[str, int]]:
    """The reports of the next batch."""
    body = one.batch("e", 16)
    assert body is not None
    assert len(body) < BOUNDS.batch_bytes
    reports: list[dict[str, int]] = json.loads(body)["reports"]
    return reports


def test_a_batch_stays_until_it_is_answered() -> None:
    one = mailing()
    assert one.batch("e", 16) is None
    one.add(b'{"n":1}')
    assert taken(one) == [{"n": 1}]
    one.add(b'{"n":2}')
    assert one.answered(None) is Answered.LATER
    assert taken(one) == [{"n": 1}], "the same again, so that what was taken and not answered is a repetition"
    assert one.answered(200) is Answered.TAKEN
    assert taken(one) == [{"n": 2}]
    assert one.answered(204) is Answered.TAKEN
    assert (len(one), one.sent, one.dropped) == (0, 2, 0)


def test_batches_are_bounded_in_reports_and_bytes() -> None:
    one = mailing()
    for number in range(BATCH_REPORTS + 5):
        one.add(b'{"n":%d}' % number)
    assert len(taken(one)) == BATCH_REPORTS
    one.answered(200)
    assert len(taken(one)) == 5
    one.answered(200)
    large = json.dumps({"text": "x" * (BATCH_BYTES // 3)}).encode()
    for _ in range(4):
        one.add(large)
    assert [len(taken(one)), one.answered(200), len(taken(one)), one.answered(200)] == [
        2,
        Answered.TAKEN,
        2,
        Answered.TAKEN,
    ]


def test_a_single_report_goes_out_whatever_its_size() -> None:
    one = mailing()
    one.add(json.dumps({"text": "x" * (BATCH_BYTES + 10)}).encode())
    assert len(taken(one)) == 1


def test_what_is_under_way_is_not_lost_to_newer_reports() -> None:
    one = mailing(capacity=2)
    one.add(b'{"n":1}')
    one.add(b'{"n":2}')
    assert len(taken(one)) == 2
    one.add(b'{"n":3}')
    assert (len(one), one.dropped) == (2, 1)
    one.answered(200)
    assert one.batch("e", 16) is None


def test_pauses_grow_with_failures_and_end_with_a_success() -> None:
    one = mailing()
    one.add(b"{}")
    assert one.pause_s() == 0.0
    pauses = []
    for _ in range(40):
        taken(one)
        one.answered(503)
        pauses.append(one.pause_s())
    assert 0.25 <= pauses[0] <= 0.5
    assert min(pauses[8:]) >= 15.0
    assert max(pauses) <= 30.0
    assert len(set(pauses[8:])) > 20, "several engines do not come back at once"
    taken(one)
    one.answered(200)
    assert one.pause_s() == 0.0
