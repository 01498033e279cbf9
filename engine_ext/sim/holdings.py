# SPDX-License-Identifier: Apache-2.0
"""What an engine holds, over all of its tiers."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from engine_ext.sim.book import BlockBook
from engine_ext.sim.output import BlockTruth
from engine_ext.sim.pool import HbmPool
from engine_ext.sim.tiers import RamTier, StorageTier


class Holdings:
    """Told of each block that one tier let go; knows whether another still has it."""

    def __init__(
        self,
        pool: HbmPool,
        ram: RamTier,
        storage: StorageTier | None,
        book: BlockBook,
        gone: Callable[[bytes], None] | None,
    ) -> None:
        """``gone`` is told of each block that no tier has any more because others took its place."""
        self._pool = pool
        self._ram = ram
        self._storage = storage
        self._book = book
        self._gone = gone

    def forget(self, engine_hash: bytes) -> None:
        """A tier has the block no more, or never got it."""
        if self._book.enabled and not self._holds(engine_hash):
            self._book.drop(engine_hash)

    def evicted(self, engine_hash: bytes) -> None:
        """A tier gave the block up for another one."""
        self.forget(engine_hash)
        if self._gone is not None and not self._holds(engine_hash):
            self._gone(engine_hash)

    def _holds(self, engine_hash: bytes) -> bool:
        return (
            self._pool.holds(engine_hash)
            or self._ram.known(engine_hash)
            or (self._storage is not None and engine_hash in self._storage)
        )

    def blocks(self) -> list[BlockTruth]:
        """Every block held, and what it stands for (unknown without identity tracking)."""
        hbm = self._pool.hashes()
        ram = set(self._ram.ready_hashes())
        storage = set(self._storage.hashes()) if self._storage is not None else set()
        return [self._truth(h, hbm.get(h, 0), h in ram, h in storage) for h in sorted({*hbm, *ram, *storage})]

    def _truth(self, engine_hash: bytes, hbm_copies: int, in_ram: bool, in_storage: bool) -> BlockTruth:
        identity = self._book.get(engine_hash)
        return BlockTruth(
            block_hash=engine_hash,
            parent=identity.parent if identity else None,
            token_ids=identity.token_ids if identity else array("I"),
            extra_keys=identity.extra_keys if identity else None,
            lora_name=identity.lora_name if identity else None,
            hbm_copies=hbm_copies,
            in_ram=in_ram,
            in_storage=in_storage,
        )
