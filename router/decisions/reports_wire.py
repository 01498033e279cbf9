# SPDX-License-Identifier: Apache-2.0
"""The batch that an engine extension posts to ``/admin/api/reports``: JSON, decoded strictly and within bounds. Pure.

    {"version": 1, "engine": BOOT_ID, "block_tokens": N, "dropped": N, "reports": [{
       "plan_id", "revision", "request_id", "ended_unix_s",
       "sources": [{"source", "kind", "asked_blocks", "hit_blocks", "missed_blocks", "stale_blocks", "moved_blocks",
                    "bytes", "lookup_s", "transfer_s", "outcome"}],
       "promoted_blocks", "promotion_bytes", "promotion_s", "evicted_before_reuse_blocks"}]}

What each means is said where it is written, in ``engine_ext/vllm/reports/messages.py``. Keys that are not known are
ignored, so that a newer engine may say more; a change of meaning raises the version.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.errors import RequestError

MOST_BYTES = 2**20
REPORT_VERSION = 1

Text = Annotated[str, Meta(min_length=1, max_length=256)]
Blocks = Annotated[int, Meta(ge=0, le=2**40)]
Bytes = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]


class MalformedReportsError(RequestError):
    """A body that is not a batch of reports of this version."""


class SourceMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What came from one place."""

    source: Text
    kind: Literal["pointsman", "p2p", "ram", "storage"]
    asked_blocks: Blocks
    hit_blocks: Blocks
    missed_blocks: Blocks
    stale_blocks: Blocks
    moved_blocks: Blocks
    bytes: Bytes
    lookup_s: Seconds | None
    transfer_s: Seconds | None
    outcome: Text

    @property
    def is_peer(self) -> bool:
        return self.kind in {"pointsman", "p2p"}


class ReportMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one plan."""

    plan_id: Text
    revision: Annotated[int, Meta(ge=0, le=2**31)]
    request_id: Text
    ended_unix_s: Annotated[float, Meta(ge=0.0, le=1e11)]
    sources: Annotated[tuple[SourceMessage, ...], Meta(max_length=64)]
    promoted_blocks: Blocks
    promotion_bytes: Bytes
    promotion_s: Seconds | None
    evicted_before_reuse_blocks: Blocks


class BatchMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One call of one engine."""

    version: int
    engine: Text
    block_tokens: Annotated[int, Meta(ge=1, le=2**20)]
    reports: Annotated[tuple[ReportMessage, ...], Meta(max_length=1024)]
    dropped: Annotated[int, Meta(ge=0, le=2**53)]
    """Reports that were lost on their way to this router since the engine began."""


class _Version(msgspec.Struct):
    version: int


_batches = msgspec.json.Decoder(BatchMessage)
_versions = msgspec.json.Decoder(_Version)


def read_batch(body: bytes) -> BatchMessage:
    """Some milliseconds for the largest body.

    Raises:
        MalformedReportsError: not JSON, not of this form or version, beyond a bound.
    """
    try:
        version = _versions.decode(body).version
        if version != REPORT_VERSION:
            raise MalformedReportsError(f"version {version}; this router reads {REPORT_VERSION}")
        return _batches.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReportsError(f"not a batch of reports: {error}") from error
