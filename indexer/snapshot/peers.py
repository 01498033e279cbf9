# SPDX-License-Identifier: Apache-2.0
"""Snapshots of other replicas over HTTP: of ``pointsman indexer`` at ``/snapshot``, of a gateway at ``/admin/api/snapshot``."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from indexer.snapshot.format import Refused, SnapshotError, WorkerSection, read
from indexer.snapshot.sections import Recalled

log = logging.getLogger(__name__)

CONTENT_TYPE = "application/vnd.pointsman.index"
_CONNECT_S = 5.0
_IDLE_S = 10.0
_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class PeerTerms:
    """What a peer's snapshot must be, and how it is asked for."""

    key_id: str
    records: str
    max_bytes: int
    headers: Mapping[str, str]


async def recall_from_peers(urls: Sequence[str], terms: PeerTerms, recalled: Recalled) -> str | None:
    """Take the snapshot of the first peer that has one we can use; its address, or None."""
    for url in urls:
        try:
            sections = await _fetch(url, terms)
        except SnapshotError as error:
            log.warning("peer %s: its snapshot is not used: %s", url, error)
            continue
        log.info("peer %s: %d workers in its snapshot", url, len(sections))
        recalled.add(sections, "peer")
        return url
    return None


async def _fetch(url: str, terms: PeerTerms) -> list[WorkerSection]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_IDLE_S)
    body = io.BytesIO()
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=terms.headers) as session,
            session.get(url.rstrip("/") + "/snapshot") as got,
        ):
            if got.status != 200 or got.content_type != CONTENT_TYPE:
                raise SnapshotError(Refused.UNREACHABLE, f"status {got.status}, {got.content_type}")
            async for piece in got.content.iter_chunked(_PIECE_BYTES):
                if body.tell() + len(piece) > terms.max_bytes:
                    raise SnapshotError(Refused.TOO_LARGE, f"it has more than {terms.max_bytes} bytes")
                body.write(piece)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SnapshotError(Refused.UNREACHABLE, str(error) or type(error).__name__) from error
    body.seek(0)
    return await asyncio.to_thread(read, body, terms.key_id, terms.records, terms.max_bytes)
