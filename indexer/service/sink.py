# SPDX-License-Identifier: Apache-2.0
"""Batches of ranks that nobody registered: a batch's own rank overrides that of its registration."""

from __future__ import annotations

from indexer.holders import HolderTable
from indexer.identity import WorkerRank

_ARRAY_OF_THREE = 0x93
_FIXINT_END = 0x80


class WideningHolders(HolderTable):
    """A table that opens a rank when a batch names it."""

    def apply(self, rank: WorkerRank, seq: int, payload: bytes) -> None:
        named = named_rank(payload)
        holders = self.workers().get(rank.worker)
        if holders is not None and named is not None and named >= len(holders.ranks):
            self.widen(rank.worker, named + 1)
        super().apply(rank, seq, payload)


def named_rank(payload: bytes) -> int | None:
    """The rank below 128 that a batch ``[ts, events, rank]`` names, without decoding it.

    A rank of that size is msgpack's positive fixint, the last byte of the payload.
    """
    if len(payload) > 1 and payload[0] == _ARRAY_OF_THREE and payload[-1] < _FIXINT_END:
        return payload[-1]
    return None
