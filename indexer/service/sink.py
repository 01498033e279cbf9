# SPDX-License-Identifier: Apache-2.0
"""Batches of ranks that nobody registered: a batch's own rank overrides that of its registration."""

from __future__ import annotations

from collections.abc import Sequence

from indexer.holders import HolderTable
from indexer.identity import WorkerRank

_ARRAY_OF_THREE = 0x93
_FIXINT_END = 0x80


class WideningHolders(HolderTable):
    """A table that opens a rank when a batch names it."""

    def apply_many(self, rank: WorkerRank, last_seq: int, payloads: Sequence[bytes]) -> None:
        named = max(map(named_rank, payloads))
        holders = self.workers().get(rank.worker)
        if holders is not None and named >= len(holders.ranks):
            try:
                self.widen(rank.worker, named + 1)
            except MemoryError:
                self.refused(rank, last_seq, len(payloads))
                return
        super().apply_many(rank, last_seq, payloads)


def named_rank(payload: bytes) -> int:
    """The rank below 128 that a batch ``[ts, events, rank]`` names, without decoding it; -1: none.

    A rank of that size is msgpack's positive fixint, the last byte of the payload.
    """
    if len(payload) > 1 and payload[0] == _ARRAY_OF_THREE and payload[-1] < _FIXINT_END:
        return payload[-1]
    return -1
