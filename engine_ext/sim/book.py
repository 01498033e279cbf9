# SPDX-License-Identifier: Apache-2.0
"""What each held block stands for. Kept while any tier holds the block."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine_ext.sim.hashing import ExtraKeys
from engine_ext.sim.request import Live


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """A block's place in its chain. ``parent`` is None for the first block of a prompt."""

    parent: bytes | None
    token_ids: array[int]
    extra_keys: ExtraKeys | None
    lora_id: int | None
    lora_name: str | None


class BlockBook:
    """Hash to identity; one entry per block, O(1)."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        """Whether identities are tracked at all."""
        self._entries: dict[bytes, BlockIdentity] = {}

    def get(self, engine_hash: bytes) -> BlockIdentity | None:
        """The identity, if it is tracked."""
        return self._entries.get(engine_hash)

    def note(self, live: Live, start: int, end: int) -> None:
        """Blocks ``start`` to ``end`` of a request are about to be held."""
        if not self.enabled:
            return
        for index in range(start, end):
            engine_hash = live.hashes[index]
            if engine_hash not in self._entries:
                self._entries[engine_hash] = BlockIdentity(
                    parent=live.hashes[index - 1] if index else None,
                    token_ids=live.block_tokens(index, index + 1),
                    extra_keys=live.keys_of(index),
                    lora_id=live.request.lora_id,
                    lora_name=live.request.lora_name,
                )

    def note_keys(self, live: Live, keys: Sequence[bytes]) -> None:
        """The same for some of a request's blocks, in chain order."""
        if not self.enabled:
            return
        index = 0
        for key in keys:
            index = live.hashes.index(key, index)
            self.note(live, index, index + 1)

    def drop(self, engine_hash: bytes) -> None:
        """No tier holds it any more."""
        self._entries.pop(engine_hash, None)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
