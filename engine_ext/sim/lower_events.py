# SPDX-License-Identifier: Apache-2.0
"""KV events of the tiers below HBM, as vLLM's offloading connector makes them: one store per block, no extra keys."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from engine_ext.sim.book import BlockBook
from engine_ext.sim.config import SimConfig
from engine_ext.sim.events import FULL_ATTENTION, BlockRemoved, BlockStored, KvEvent, Medium

_NO_TOKENS: array[int] = array("I")


class LowerTierEvents:
    """What happened since the last message."""

    def __init__(self, config: SimConfig, book: BlockBook) -> None:
        self._config = config
        self._book = book
        self._events: list[KvEvent] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def take(self) -> list[KvEvent]:
        """Everything since the last call."""
        events, self._events = self._events, []
        return events

    def stored(self, keys: Iterable[bytes], medium: Medium) -> None:
        """Blocks can be read there now."""
        locality = self._config.storage_locality if medium is Medium.STORAGE else None
        self._events.extend(self._stored(key, medium, locality) for key in keys)

    def removed(self, keys: Sequence[bytes]) -> None:
        """RAM gave them up, for one store."""
        self._events.append(BlockRemoved(tuple(keys), Medium.CPU))

    def _stored(self, key: bytes, medium: Medium, locality: str | None) -> BlockStored:
        identity = self._book.get(key) if self._config.self_describing_events else None
        if identity is None:
            return BlockStored((key,), None, _NO_TOKENS, 0, medium, locality=locality)
        return BlockStored(
            block_hashes=(key,),
            parent=identity.parent,
            token_ids=identity.token_ids,
            block_size_tokens=self._config.block_size_tokens,
            medium=medium,
            lora_id=identity.lora_id,
            lora_name=identity.lora_name,
            spec_kind=FULL_ATTENTION,
            locality=locality,
        )
