# SPDX-License-Identifier: Apache-2.0
"""The prefix index in plain dicts: the oracle of the native core, and a backend when asked for by name.

Semantics and names are those of ``native/index.hpp``; nothing here is fast.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import msgspec

from indexer.errors import WireError
from indexer.hashing import HashKey, canonical_extra_keys, namespace_root, next_hash
from indexer.identity import Tier
from indexer.wire.vllm import Cleared, EngineKey, Event, Removed, Skipped, Stored, decode_batch

_DOUBTFUL_BIT = 1 << 3
_DEMOTING_BIT = 1 << 4
_TICKS_PER_S = 16
_LONGEST_GRACE = 1 << 14  # ticks


@dataclass(slots=True)
class Counts:
    """What one batch did (``indexer.index.ApplyCounts``)."""

    stored: int = 0
    removed: int = 0
    clears: int = 0
    detached: int = 0
    joined: int = 0
    unidentified: int = 0
    unknown_removals: int = 0
    dropped_waiting: int = 0
    conflicts: int = 0
    malformed_events: int = 0
    unknown_events: int = 0
    unknown_medium_events: int = 0
    sparse_events: int = 0
    evicted: int = 0
    """Always 0: this index has no bound of its own."""
    malformed_batch: bool = False


_SUMMED = [field.name for field in fields(Counts) if field.name != "malformed_batch"]


@dataclass(frozen=True, slots=True)
class Totals:
    """What a slot holds (``indexer.index.SlotCounts``)."""

    hbm: int = 0
    ram: int = 0
    storage: int = 0
    doubtful_ram: int = 0
    unidentified: int = 0
    detached: int = 0
    remembered: int = 0
    demoting: int = 0
    block_size: int = 0


@dataclass(slots=True)
class _Block:
    request_hash: int | None = None
    references: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    doubtful_ram: bool = False
    demoting_until: int | None = None

    def held(self) -> bool:
        return any(self.references.values())


@dataclass(slots=True)
class _Slot:
    model: str
    plain: bool
    grace: int = 0
    alive: bool = True
    block_size: int = 0
    blocks: dict[EngineKey, _Block] = field(default_factory=dict)
    detached: OrderedDict[int, Stored] = field(default_factory=OrderedDict)
    next_detached: int = 0
    unidentified_order: deque[EngineKey] = field(default_factory=deque)
    remembered_order: deque[EngineKey] = field(default_factory=deque)

    def detached_blocks(self) -> int:
        return sum(len(event.keys) for event in self.detached.values())


class ReferenceIndex:
    """A ``PrefixIndex`` whose queries recompute everything from the slots."""

    def __init__(
        self, key: HashKey, detached_blocks: int, unidentified_blocks: int, remembered_blocks: int
    ) -> None:
        self._key = key
        self._detached_limit = detached_blocks
        self._unidentified_limit = unidentified_blocks
        self._remembered_limit = remembered_blocks
        self._slots: list[_Slot] = []
        self._version = 0
        self._now = 0
        """Ticks, of the batch that is being applied."""
        self._graces: list[tuple[int, _Slot, EngineKey]] = []
        self._lock = threading.RLock()

    def open(self, model: str, plain: bool, name: str = "", grace_s: float = 0.0) -> int:
        with self._lock:
            grace = min(int(grace_s * _TICKS_PER_S + 1), _LONGEST_GRACE) if grace_s > 0 else 0
            self._slots.append(_Slot(model, plain, grace))
            return len(self._slots) - 1

    def retire(self, slot: int) -> None:
        with self._lock:
            if self.alive(slot):
                self._slots[slot] = _Slot("", plain=False, alive=False)
                self._version += 1

    def alive(self, slot: int) -> bool:
        return 0 <= slot < len(self._slots) and self._slots[slot].alive

    def suspect(self, slot: int, on: bool) -> None:
        """Nobody reads this index from another process."""

    def publish(self) -> None:
        """As ``suspect``."""

    def clear(self, slot: int) -> None:
        with self._lock:
            if self.alive(slot):
                self._clear(self._slots[slot])

    def apply(
        self, ranks: Sequence[int], default_rank: int, store: int, payload: bytes, now_s: float = 0.0
    ) -> Counts:
        with self._lock:
            self._expire(now_s)
            counts = Counts()
            try:
                batch = decode_batch(payload)
            except WireError:
                counts.malformed_batch = True
                return counts
            rank = batch.rank if batch.rank is not None and batch.rank < len(ranks) else default_rank
            if rank < len(ranks) and self.alive(ranks[rank]):
                self._now = int(now_s * _TICKS_PER_S)
                for event in batch.events:
                    self._apply_event(self._slots[ranks[rank]], store, event, counts)
                self._version += 1
            return counts

    def apply_many(
        self,
        ranks: Sequence[int],
        default_rank: int,
        store: int,
        payloads: Sequence[bytes],
        now_s: float = 0.0,
    ) -> tuple[Counts, int]:
        total, malformed = Counts(), 0
        for payload in payloads:
            counts = self.apply(ranks, default_rank, store, payload, now_s)
            malformed += counts.malformed_batch
            for name in _SUMMED:
                setattr(total, name, getattr(total, name) + getattr(counts, name))
        total.malformed_batch = malformed != 0
        return total, malformed

    def hash_blocks(
        self, tokens: array[int], block_size: int, model: str, lora: str, first_block_keys: Sequence[str]
    ) -> bytes:
        if block_size < 1:
            raise ValueError("block_size must be at least 1")
        parent = namespace_root(self._key, model, lora)
        extra = canonical_extra_keys(first_block_keys)
        hashes = []
        for start in range(0, len(tokens) - block_size + 1, block_size):
            parent = next_hash(self._key, parent, tokens[start : start + block_size], extra)
            hashes.append(parent)
            extra = b""
        return struct.pack(f"<{len(hashes)}Q", *hashes)

    def match(self, hashes: bytes, now_s: float = 0.0) -> list[tuple[int, int, int, int, int]]:
        wanted = struct.unpack(f"<{len(hashes) // 8}Q", hashes)
        with self._lock:
            self._expire(now_s)
            held = [_merged(self.blocks(slot)) for slot in range(len(self._slots))]
        reach = next(
            (i for i, value in enumerate(wanted) if not any(value in blocks for blocks in held)), len(wanted)
        )
        runs = []
        for slot, blocks in enumerate(held):
            for tier, doubt in (*((tier, 0) for tier in Tier), (Tier.RAM, 1), (Tier.RAM, 2)):
                present = [_holds(blocks.get(value, 0), tier, doubt) for value in wanted[:reach]]
                runs += [(slot, int(tier), start, end, doubt) for start, end in _spans(present)]
        return sorted(runs, key=lambda run: (run[:3], run[4] == 2))

    def counts(self, slot: int) -> Totals:
        with self._lock:
            if not self.alive(slot):
                return Totals()
            state = self._slots[slot]
            named = [block for block in state.blocks.values() if block.request_hash is not None]
            return Totals(
                hbm=sum(block.references[Tier.HBM] > 0 for block in named),
                ram=sum(block.references[Tier.RAM] > 0 for block in named),
                storage=sum(block.references[Tier.STORAGE] > 0 for block in named),
                doubtful_ram=sum(block.doubtful_ram for block in named),
                unidentified=len(state.blocks) - len(named),
                detached=state.detached_blocks(),
                remembered=sum(not block.held() and block.demoting_until is None for block in named),
                demoting=sum(block.demoting_until is not None for block in named),
                block_size=state.block_size,
            )

    @property
    def export_format(self) -> str:
        return "reference-1"

    def export_slot(self, slot: int) -> bytes:
        with self._lock:
            held = self._slots[slot].blocks if self.alive(slot) else {}
            return msgspec.msgpack.encode(
                [
                    (*key, block.request_hash, [*block.references.values()], block.doubtful_ram)
                    for key, block in held.items()
                ]
            )

    def import_slot(self, slot: int, records: bytes, block_size: int) -> int:
        try:
            rows = msgspec.msgpack.decode(
                records, type=list[tuple[int, int | bytes, int | None, tuple[int, int, int], bool]]
            )
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ValueError(str(error)) from error
        with self._lock:
            if not self.alive(slot) or self._slots[slot].blocks:
                raise ValueError("records go into a live slot that holds nothing")
            imported: dict[EngineKey, _Block] = {}
            for group, name, value, counts, doubtful in rows:
                block = _Block(value, dict(zip(Tier, counts, strict=True)), doubtful)
                possible = (value is not None or block.held()) and (not doubtful or counts[Tier.RAM] > 0)
                if (group, name) in imported or not possible:
                    raise ValueError("a record is none that a slot could have")
                imported[group, name] = block
            state = self._slots[slot]
            state.blocks, state.block_size = imported, block_size
            for key, block in list(imported.items()):
                if block.request_hash is None:
                    state.unidentified_order.append(key)
                elif not block.held():
                    self._remember(state, key)
            self._bound_waiting(state, Counts())
            self._version += 1
            return len(state.blocks)

    def blocks(self, slot: int) -> list[tuple[int, int]]:
        with self._lock:
            if not self.alive(slot):
                return []
            return [
                (block.request_hash, _tier_bits(block))
                for block in self._slots[slot].blocks.values()
                if block.request_hash is not None and (block.held() or block.demoting_until is not None)
            ]

    def sweep(self, steps: int, now_s: float = 0.0) -> bool:
        with self._lock:
            self._expire(now_s)
        return True

    def check(self) -> str:
        return ""

    @property
    def version(self) -> int:
        return self._version

    @property
    def distinct_blocks(self) -> int:
        return len({value for slot in range(len(self._slots)) for value, _ in self.blocks(slot)})

    @property
    def memory_bytes(self) -> int:
        return 0

    def _expire(self, now_s: float) -> None:
        """End the graces that are over, in the order in which they end."""
        now = int(now_s * _TICKS_PER_S)
        over = sorted((grace for grace in self._graces if grace[0] <= now), key=lambda grace: grace[0])
        self._graces = [grace for grace in self._graces if grace[0] > now]
        for until, slot, key in over:
            block = slot.blocks.get(key)
            if slot.alive and block is not None and block.demoting_until == until:
                block.demoting_until = None
                self._remember(slot, key)

    def _apply_event(self, slot: _Slot, store: int, event: Event, counts: Counts) -> None:
        match event:
            case Skipped.MALFORMED:
                counts.malformed_events += 1
            case Skipped.UNKNOWN:
                counts.unknown_events += 1
            case Cleared():
                self._clear(slot)
                counts.clears += 1
            case Stored():
                self._stored(slot, store, event, counts)
            case Removed():
                self._removed(slot, store, event, counts)

    def _stored(self, slot: _Slot, store: int, event: Stored, counts: Counts) -> None:
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
        self._bound_waiting(slot, counts)

    def _parent_hash(self, slot: _Slot, event: Stored) -> int | None:
        if event.parent is None:
            return namespace_root(self._key, slot.model, event.lora)
        parent = slot.blocks.get(event.parent)
        return None if parent is None else parent.request_hash

    def _chain(self, slot: _Slot, store: int, event: Stored, parent: int, counts: Counts) -> None:
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
        self, slot: _Slot, store: int, event: Stored, value: int, counts: Counts
    ) -> list[tuple[EngineKey, int]]:
        found = []
        for i, key in enumerate(event.keys):
            tokens = event.tokens[i * event.block_size : (i + 1) * event.block_size]
            value = next_hash(self._key, value, tokens, event.extra_keys[i] if event.extra_keys else b"")
            self._identify(slot, store, key, value, counts)
            found.append((key, value))
        return found

    def _identify(self, slot: _Slot, store: int, key: EngineKey, value: int, counts: Counts) -> None:
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
            self._remember(slot, key)

    def _reference(
        self, slot: _Slot, store: int, key: EngineKey, tier: Tier, counts: Counts, *, waits: bool
    ) -> None:
        block = slot.blocks.get(key)
        if tier is Tier.STORAGE and block is not None and block.request_hash is not None:
            self._store_reference(store, key, block.request_hash)
            return
        block = slot.blocks.setdefault(key, _Block())
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

    def _store_reference(self, store: int, key: EngineKey, value: int) -> None:
        if self.alive(store):
            block = self._slots[store].blocks.setdefault(key, _Block())
            block.request_hash = value
            block.references[Tier.STORAGE] = 1

    def _removed(self, slot: _Slot, store: int, event: Removed, counts: Counts) -> None:
        if event.tier is None:
            counts.unknown_medium_events += 1
            return
        for key in event.keys:
            if event.tier is Tier.STORAGE and self.alive(store) and key in self._slots[store].blocks:
                del self._slots[store].blocks[key]
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
                    block.demoting_until = self._now + slot.grace
                    self._graces.append((block.demoting_until, slot, key))
                else:
                    self._release(slot, key, block)

    def _release(self, slot: _Slot, key: EngineKey, block: _Block) -> None:
        if block.request_hash is None:
            del slot.blocks[key]
        else:
            self._remember(slot, key)

    def _remember(self, slot: _Slot, key: EngineKey) -> None:
        slot.remembered_order.append(key)
        while len(slot.remembered_order) > self._remembered_limit:
            oldest = slot.remembered_order.popleft()
            block = slot.blocks.get(oldest)
            if block is None or block.request_hash is None or block.demoting_until is not None:
                continue
            if not block.held():
                del slot.blocks[oldest]

    def _bound_waiting(self, slot: _Slot, counts: Counts) -> None:
        while slot.detached_blocks() > self._detached_limit:
            _, oldest = slot.detached.popitem(last=False)
            counts.dropped_waiting += len(oldest.keys)
            for key in oldest.keys:
                block = slot.blocks.get(key)
                if block is not None and block.request_hash is None:
                    block.references[Tier.HBM] = 0
                    if not block.held():
                        del slot.blocks[key]
        while len(slot.unidentified_order) > self._unidentified_limit:
            key = slot.unidentified_order.popleft()
            block = slot.blocks.get(key)
            if block is not None and block.request_hash is None and not block.references[Tier.HBM]:
                del slot.blocks[key]
                counts.dropped_waiting += 1

    def _clear(self, slot: _Slot) -> None:
        released = []
        for key, block in slot.blocks.items():
            if block.references[Tier.HBM] or block.demoting_until is not None:
                block.references[Tier.HBM] = 0
                block.demoting_until = None
                if not block.held():
                    released.append(key)
            block.doubtful_ram = block.references[Tier.RAM] > 0
        for key in released:
            del slot.blocks[key]
        slot.detached.clear()


def _tier_bits(block: _Block) -> int:
    bits = sum(1 << tier for tier in Tier if block.references[tier])
    bits |= _DOUBTFUL_BIT if block.doubtful_ram else 0
    return bits | _DEMOTING_BIT if block.demoting_until is not None else bits


def _merged(blocks: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Tier bits by request hash: a block that several groups hold is doubtful only where all of them are."""
    merged: dict[int, int] = {}
    certain: set[int] = set()
    for value, bits in blocks:
        merged[value] = merged.get(value, 0) | bits
        if bits & 1 << Tier.RAM and not bits & _DOUBTFUL_BIT:
            certain.add(value)
    return {value: bits & ~_DOUBTFUL_BIT if value in certain else bits for value, bits in merged.items()}


def _holds(bits: int, tier: Tier, doubt: int) -> bool:
    if doubt == 2:
        return bits & _DEMOTING_BIT > 0
    if not bits & 1 << tier:
        return False
    return (bits & _DOUBTFUL_BIT > 0) == (doubt == 1) if tier is Tier.RAM else doubt == 0


def _spans(present: Iterable[bool]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for i, here in enumerate(present):
        if here and spans and spans[-1][1] == i:
            spans[-1] = (spans[-1][0], i + 1)
        elif here:
            spans.append((i, i + 1))
    return spans
