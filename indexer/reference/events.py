# SPDX-License-Identifier: Apache-2.0
"""What an event does to a slot and to its store."""

from __future__ import annotations

from indexer.hashing import HashKey, namespace_root, next_hash
from indexer.identity import Tier
from indexer.reference.bounds import Bounds
from indexer.reference.graces import Graces
from indexer.reference.state import Block, Counts, Slot
from indexer.wire.vllm import Cleared, EngineKey, Event, Removed, Skipped, Stored


class EventRules:
    """Applies events. O(blocks of the event), but for joins: O(blocks that wait)."""

    def __init__(self, key: HashKey, bounds: Bounds, graces: Graces) -> None:
        self._key = key
        self._bounds = bounds
        self._graces = graces

    def apply(self, slot: Slot, store: Slot | None, event: Event, counts: Counts) -> None:
        """``store`` None: of a worker whose store is gone."""
        match event:
            case Skipped.MALFORMED:
                counts.malformed_events += 1
            case Skipped.UNKNOWN:
                counts.unknown_events += 1
            case Cleared():
                slot.clear()
                counts.clears += 1
            case Stored():
                self._stored(slot, store, event, counts)
            case Removed():
                self._removed(slot, store, event, counts)

    def _stored(self, slot: Slot, store: Slot | None, event: Stored, counts: Counts) -> None:
        if event.tier is None:
            counts.unknown_medium_events += 1
            return
        by_content = bool(event.tokens) and (event.tier is Tier.HBM or slot.plain)
        span_tokens = event.block_size * len(event.keys)
        too_long = event.block_size > 0 and len(event.tokens) > span_tokens
        if not event.full_attention or (by_content and too_long):
            counts.sparse_events += 1
            return
        if by_content and (event.block_size == 0 or len(event.tokens) < span_tokens):
            counts.malformed_events += 1
            return
        counts.stored += len(event.keys)
        for key in event.keys:
            self._reference(slot, store, key, event.tier, counts, waits=not by_content)
        if by_content:
            slot.block_size = event.block_size
            parent = self._parent_hash(slot, event)
            if parent is None:
                slot.detached[slot.next_detached] = event
                slot.next_detached += 1
                counts.detached += len(event.keys)
            else:
                self._chain(slot, store, event, parent, counts)
        self._bounds.bound(slot, counts)

    def _parent_hash(self, slot: Slot, event: Stored) -> int | None:
        if event.parent is None:
            return namespace_root(self._key, slot.model, event.lora)
        parent = slot.blocks.get(event.parent)
        return None if parent is None else parent.request_hash

    def _chain(self, slot: Slot, store: Slot | None, event: Stored, parent: int, counts: Counts) -> None:
        """Identify the blocks of an event, and what waits for them: last block first, oldest event first."""
        arrived = self._identify_all(slot, store, event, parent, counts)
        while arrived and slot.detached:
            key, value = arrived.pop()
            for number, waiting in list(slot.detached.items()):
                if waiting.parent == key:
                    del slot.detached[number]
                    counts.joined += len(waiting.keys)
                    arrived += self._identify_all(slot, store, waiting, value, counts)

    def _identify_all(
        self, slot: Slot, store: Slot | None, event: Stored, value: int, counts: Counts
    ) -> list[tuple[EngineKey, int]]:
        found = []
        for i, key in enumerate(event.keys):
            tokens = event.tokens[i * event.block_size : (i + 1) * event.block_size]
            value = next_hash(self._key, value, tokens, event.extra_keys[i] if event.extra_keys else b"")
            self._identify(slot, store, key, value, counts)
            found.append((key, value))
        return found

    def _identify(self, slot: Slot, store: Slot | None, key: EngineKey, value: int, counts: Counts) -> None:
        block = slot.blocks.get(key)
        if block is None or block.request_hash == value:
            return
        counts.conflicts += block.request_hash is not None
        block.request_hash = value
        released = block.demoting_until is not None
        block.demoting_until = None
        if block.references[Tier.STORAGE]:
            block.references[Tier.STORAGE] = 0
            self._store_reference(store, key, value)
            released = True
        if released and not block.held():
            self._bounds.remember(slot, key)

    def _reference(
        self, slot: Slot, store: Slot | None, key: EngineKey, tier: Tier, counts: Counts, *, waits: bool
    ) -> None:
        block = slot.blocks.get(key)
        if tier is Tier.STORAGE and block is not None and block.request_hash is not None:
            self._store_reference(store, key, block.request_hash)
            return
        block = slot.blocks.setdefault(key, Block())
        if waits and block.request_hash is None and not block.held():
            slot.unidentified_order.append(key)
            counts.unidentified += 1
        if tier is Tier.STORAGE:
            block.references[tier] = 1
        else:
            block.references[tier] += 1
            block.demoting_until = None
        if tier is Tier.RAM:
            block.doubtful_ram = False

    def _store_reference(self, store: Slot | None, key: EngineKey, value: int) -> None:
        if store is not None:
            block = store.blocks.setdefault(key, Block())
            block.request_hash = value
            block.references[Tier.STORAGE] = 1

    def _removed(self, slot: Slot, store: Slot | None, event: Removed, counts: Counts) -> None:
        if event.tier is None:
            counts.unknown_medium_events += 1
            return
        for key in event.keys:
            if event.tier is Tier.STORAGE and store is not None and key in store.blocks:
                del store.blocks[key]
                counts.removed += 1
                continue
            block = slot.blocks.get(key)
            if block is None or block.references[event.tier] == 0:
                counts.unknown_removals += 1
                continue
            counts.removed += 1
            block.references[event.tier] -= 1
            if event.tier is Tier.RAM and block.references[Tier.RAM] == 0:
                block.doubtful_ram = False
            if not block.held():
                if event.tier is Tier.HBM and slot.grace and block.request_hash is not None:
                    self._graces.begin(slot, key, block)
                else:
                    self._bounds.release(slot, key, block)
