# SPDX-License-Identifier: Apache-2.0
"""An index that another process writes, as decisions read it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from indexer import _core
from indexer.index import Run


class SharedReader:
    """Implements ``router.plan.holders.ReadIndex``. Slots are those of the file that was open at first."""

    def __init__(self, core: _core.IndexReader) -> None:
        self.core = core
        self.stamps = _core.SlotStamps()
        """When each slot last had a batch applied, as far as it was told."""
        self._generation = core.generation

    def hash_blocks(
        self, tokens: array[int], block_size: int, model: str, lora: str, first_block_keys: Sequence[str]
    ) -> bytes:
        return self.core.hash_blocks(tokens, block_size, model, lora, first_block_keys)

    def match(self, hashes: bytes) -> list[Run]:
        generation, runs = self.core.match(hashes)
        return runs if generation == self._generation else []

    @property
    def version(self) -> int:
        return self.core.version
