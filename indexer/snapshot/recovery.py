# SPDX-License-Identifier: Apache-2.0
"""How a process comes to a full index without waiting for its workers to compute everything anew.

    start:  the first peer with a usable snapshot, then the local file
            ─▶ wait for their workers to be registered ─▶ fill ─▶ replay from the recorded sequence
    run:    write the local file, answer peers

What both have counts from the peer, which is the fresher one. Either may be stale, of another process or damaged:
streams prove themselves by their replays, bytes by their checksum, and whatever is left over is dropped in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from indexer.snapshot.keeping import SnapshotFile
from indexer.snapshot.making import Made, SnapshotMaker
from indexer.snapshot.peers import PeerTerms, recall_from_peers
from indexer.snapshot.sections import Recalled

_EXPECTED_FOR_S = 600.0
"""Workers that are not registered by then are not coming back, and their sections take memory."""


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """Where to recover from. ``path`` None: no file is kept."""

    peers: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent to peers."""
    path: Path | None = None
    interval_s: float = 60.0


class IndexRecovery:
    """``start`` before the first worker is registered, ``stop`` before the subscriber ends; once each."""

    def __init__(self, maker: SnapshotMaker, plan: RecoveryPlan) -> None:
        self.recalled = Recalled()
        self._maker = maker
        self._plan = plan
        self._file = SnapshotFile(plan.path, maker, plan.interval_s) if plan.path is not None else None
        self._peer: str | None = None
        self._dropping: asyncio.TimerHandle | None = None

    def claim(self) -> None:
        """Keep others from writing the same file, until ``stop``; before ``start``.

        Raises:
            WriterLockedError: another process writes it.
        """
        if self._file is not None:
            self._file.claim()

    async def start(self) -> None:
        """Read what there is; peers that do not answer cost seconds, a file as long as it takes to read."""
        maker = self._maker
        terms = PeerTerms(
            maker.key_id, maker.holders.index.export_format, maker.max_bytes, self._plan.headers
        )
        self._peer = await recall_from_peers(self._plan.peers, terms, self.recalled)
        if self._file is not None:
            await asyncio.to_thread(self._file.load, self.recalled)
            self._file.start()
        loop = asyncio.get_running_loop()
        self._dropping = loop.call_later(_EXPECTED_FOR_S, self.recalled.drop)

    async def stop(self) -> None:
        """Write the file a last time."""
        if self._dropping is not None:
            self._dropping.cancel()
        if self._file is not None:
            await self._file.stop()

    def pieces(self) -> Iterator[bytes]:
        """A snapshot for a peer. Blocks between pieces: not for the event loop."""
        return self._maker.pieces(Made())

    def view(self) -> dict[str, Any]:
        """What was recovered from where, and how the file is."""
        return {
            "file": self._file.view() if self._file is not None else None,
            "peer": self._peer,
            "restored_workers": dict(self.recalled.restored),
            "awaited_workers": len(self.recalled),
        }
