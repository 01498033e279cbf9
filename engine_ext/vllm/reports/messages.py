# SPDX-License-Identifier: Apache-2.0
"""The batch of reports as it goes to `POST /admin/api/reports` of a router: JSON. Pure.

    {
      "version": 1,
      "engine": "8c1f...",            boot id of the engine's process
      "block_tokens": 64,             tokens of one block as counted here
      "reports": [
        {
          "plan_id": "pm-5f0c...",    as the plan had it
          "revision": 0,              a higher one of the same plan replaces the earlier, an equal one is a repetition
          "request_id": "cmpl-...",   the engine's own
          "ended_unix_s": 1700000000.0,
          "sources": [
            {
              "source": "10.0.0.7:5720", "kind": "pointsman",
              "asked_blocks": 64, "hit_blocks": 60, "missed_blocks": 4, "stale_blocks": 4,
              "moved_blocks": 60, "bytes": 15728640,
              "lookup_s": 0.002, "transfer_s": 0.011,
              "outcome": "ok"
            }
          ],
          "promoted_blocks": 60, "promotion_bytes": 15728640, "promotion_s": 0.004,
          "evicted_before_reuse_blocks": 0
        }
      ],
      "dropped": 0                    reports lost for this router since the engine began
    }

`missed_blocks` are those asked for that the source did not have or did not answer for; `stale_blocks` those of them
that the plan promised and the source says it lacks. `lookup_s` is the longest of a request's lookups at one source,
`transfer_s` the sum of its transfers; null where there was none. `outcome` is `ok` or the first thing that went wrong:
a word of `[a-z0-9_]`, for some followed by a colon and a detail. Bounds: `BOUNDS`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from engine_ext.vllm.reports.sink import SourceKind

REPORT_VERSION = 1


class Bounds(NamedTuple):
    """What a router takes."""

    reports: int = 1024
    """In a batch."""
    sources: int = 64
    """In a report."""
    text: int = 256
    """Characters of a text."""
    batch_bytes: int = 2**20


BOUNDS = Bounds()


class SourceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came from one place."""

    source: str
    kind: SourceKind
    asked_blocks: int
    hit_blocks: int
    missed_blocks: int
    stale_blocks: int
    moved_blocks: int
    bytes: int
    lookup_s: float | None
    transfer_s: float | None
    outcome: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one plan."""

    plan_id: str
    revision: int
    request_id: str
    ended_unix_s: float
    sources: tuple[SourceReport, ...]
    promoted_blocks: int
    promotion_bytes: int
    promotion_s: float | None
    evicted_before_reuse_blocks: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that are encoded already."""

    version: int = REPORT_VERSION
    engine: str
    block_tokens: int
    reports: list[msgspec.Raw]
    dropped: int


_encode = msgspec.json.Encoder().encode


def encode_report(report: Report) -> bytes:
    """One report, to be put into batches for several routers."""
    return _encode(report)


def encode_batch(engine: str, block_tokens: int, reports: list[bytes], dropped: int) -> bytes:
    """The body of one call."""
    raw = [msgspec.Raw(one) for one in reports]
    return _encode(Batch(engine=engine, block_tokens=block_tokens, reports=raw, dropped=dropped))
