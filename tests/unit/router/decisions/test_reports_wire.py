# SPDX-License-Identifier: Apache-2.0
"""The batch of an engine extension, as the router reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.decisions.reports_wire import MalformedReportsError, read_batch

GOLDEN = (Path(__file__).parents[3] / "golden" / "reports" / "batch.json").read_bytes()


def changed(*path: str | int, to: object) -> bytes:
    """The golden batch with one value replaced."""
    document: Any = json.loads(GOLDEN)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return json.dumps(document).encode()


def test_the_batch_that_engines_write_is_read() -> None:
    batch = read_batch(GOLDEN)
    assert (batch.engine, batch.block_tokens, batch.dropped) == ("boot-b", 16, 3)
    first, second = batch.reports
    assert [one.source for one in first.sources] == ["ram", "10.0.0.7:5720", "10.0.0.9:5710"]
    near, far = first.sources[1:]
    assert (near.kind, near.asked_blocks, near.hit_blocks, near.missed_blocks) == ("pointsman", 4, 3, 1)
    assert (near.stale_blocks, near.moved_blocks, near.bytes, near.lookup_s) == (1, 3, 3000, 0.25)
    assert (far.kind, far.outcome, far.transfer_s, far.moved_blocks) == ("p2p", "deadline", 0.5, 1)
    assert (first.plan_id, first.promoted_blocks, first.promotion_bytes, first.promotion_s) == (
        "pm-1",
        6,
        6000,
        0.0625,
    )
    assert second.sources[0].outcome == "refused:model"
    assert second.sources[0].transfer_s is None
    assert (second.promotion_s, second.evicted_before_reuse_blocks) == (None, 1)


def test_what_a_newer_engine_says_besides_is_ignored() -> None:
    assert read_batch(changed("reports", 0, "more", to=[1])).reports[0].plan_id == "pm-1"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"version": 1}',
        GOLDEN[:-20],
        changed("version", to=2),
        changed("version", to="1"),
        changed("engine", to=""),
        changed("block_tokens", to=0),
        changed("dropped", to=-1),
        changed("reports", to={}),
        changed("reports", to=[json.loads(GOLDEN)["reports"][0]] * 1025),
        changed("reports", 0, "plan_id", to="x" * 257),
        changed("reports", 0, "revision", to=-1),
        changed("reports", 0, "promotion_s", to=-0.5),
        changed("reports", 0, "sources", to=[json.loads(GOLDEN)["reports"][0]["sources"][0]] * 65),
        changed("reports", 0, "sources", 0, "kind", to="cloud"),
        changed("reports", 0, "sources", 0, "asked_blocks", to=1.5),
        changed("reports", 0, "sources", 0, "hit_blocks", to=-1),
        changed("reports", 0, "sources", 0, "bytes", to=2**60),
        changed("reports", 0, "sources", 0, "lookup_s", to="0.5"),
        changed("reports", 0, "sources", 0, "transfer_s", to=float("inf")),
        changed("reports", 0, "sources", 0, "outcome", to=None),
    ],
)
def test_what_is_no_batch_is_refused_whole(body: bytes) -> None:
    with pytest.raises(MalformedReportsError):
        read_batch(body)


def test_another_version_is_named() -> None:
    with pytest.raises(MalformedReportsError, match="version 7; this router reads 1"):
        read_batch(b'{"version": 7, "whatever": true}')
