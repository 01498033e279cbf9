# SPDX-License-Identifier: Apache-2.0
"""KV events as values, and their bytes on the wire as vLLM writes them.

Payload of one batch (``vllm/distributed/kv_events.py``, 0.32): msgpack array ``[ts, [event, ...], dp_rank]``.
An event is a map whose first key is ``type`` (current), or an array whose first item is the tag (vLLM before
its map encoding). Fields equal to their default are left out of a map; an array has every field, because
msgspec's ``omit_defaults`` does nothing to arrays. Old arrays ended earlier: readers go by position.
A hash is the low 64 bits of the engine hash as an unsigned int, or its 32 bytes.
"""

from __future__ import annotations

import enum
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine_ext.sim.hashing import ExtraKeys, as_int


class Medium(enum.StrEnum):
    """Where a block is, in vLLM's spelling."""

    GPU = "GPU"
    CPU = "CPU"
    STORAGE = "STORAGE"


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks of one chain became available on one medium.

    A store without tokens (``block_size_tokens`` 0) is vLLM's placeholder for offloaded blocks.
    """

    block_hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: array[int]
    block_size_tokens: int
    medium: Medium
    extra_keys: tuple[ExtraKeys | None, ...] | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    spec_kind: str | None = None
    locality: str | None = None
    session_id: str | None = None

    @property
    def is_placeholder(self) -> bool:
        """Whether it says nothing but where the blocks are."""
        said = (
            self.parent,
            self.extra_keys,
            self.lora_id,
            self.lora_name,
            self.spec_kind,
            self.session_id,
        )
        return self.block_size_tokens == 0 and said == _NOTHING_SAID


_NOTHING_SAID = (None,) * 6


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks left one medium."""

    block_hashes: tuple[bytes, ...]
    medium: Medium


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """HBM was cleared; lower tiers may or may not have been."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

FULL_ATTENTION = "full_attention"


class EventEncoding(enum.StrEnum):
    """Shape of one event on the wire."""

    MAP = "map"
    ARRAY = "array"


class HashKind(enum.StrEnum):
    """Shape of one hash on the wire."""

    INT = "int"
    BYTES = "bytes"


_WireHash = int | bytes


class _MapStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[_WireHash]
    parent_block_hash: _WireHash | None
    token_ids: list[int] | msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Sequence[ExtraKeys | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class _MapRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[_WireHash]
    medium: str | None
    group_idx: int | None = None


class _MapCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _ArrayStored(_MapStored, tag="BlockStored", omit_defaults=True, array_like=True):
    pass


class _ArrayRemoved(_MapRemoved, tag="BlockRemoved", omit_defaults=True, array_like=True):
    pass


class _ArrayCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class BatchEncoder:
    """Encodes batches in one dialect. Stateless between calls."""

    def __init__(
        self,
        encoding: EventEncoding = EventEncoding.MAP,
        hash_kind: HashKind = HashKind.INT,
        *,
        wide_tokens: bool = False,
    ) -> None:
        """``wide_tokens``: every token id in four bytes, where vLLM takes as few as it can.

        It means the same to every reader and is written ten times faster.
        """
        self._wide_tokens = wide_tokens
        self._as_map = encoding is EventEncoding.MAP
        self._as_int = hash_kind is HashKind.INT
        self._encoder = msgspec.msgpack.Encoder()
        self._around_hash: dict[tuple[type[KvEvent], Medium, str | None], tuple[bytes, bytes]] = {}

    def encode(self, ts_s: float, events: Sequence[KvEvent], dp_rank: int = 0) -> bytes:
        """Payload of one batch published at ``ts_s`` (Unix time)."""
        return self._encoder.encode((ts_s, [self._wire(event) for event in events], dp_rank))

    def hash(self, engine_hash: bytes) -> _WireHash:
        """One hash in this dialect."""
        return as_int(engine_hash) if self._as_int else engine_hash

    def _hashes(self, engine_hashes: Sequence[bytes]) -> list[_WireHash]:
        if not self._as_int:
            return list(engine_hashes)
        tails = b"".join([engine_hash[-8:] for engine_hash in engine_hashes])
        return list(struct.unpack(f">{len(engine_hashes)}Q", tails))

    def _wire(self, event: KvEvent) -> msgspec.Struct | msgspec.Raw:
        if isinstance(event, AllBlocksCleared):
            return _MapCleared() if self._as_map else _ArrayCleared()
        # Nearly all events tell of one block without its tokens: only the hash differs between them.
        if self._as_int and len(event.block_hashes) == 1:
            if isinstance(event, BlockRemoved):
                return self._around(event, None)
            if event.is_placeholder:
                return self._around(event, event.locality)
        return self._stored(event) if isinstance(event, BlockStored) else self._removed(event)

    def _around(
        self, event: BlockStored | BlockRemoved, locality: str | None
    ) -> msgspec.Struct | msgspec.Raw:
        """The event from bytes kept of its like, where the hash takes eight bytes."""
        tail = event.block_hashes[0][-8:]
        if not any(tail[:4]):
            return self._stored(event) if isinstance(event, BlockStored) else self._removed(event)
        like = type(event), event.medium, locality
        kept = self._around_hash.get(like)
        if kept is None:
            largest = msgspec.structs.replace(event, block_hashes=(b"\xff" * 8,))
            wire = self._stored(largest) if isinstance(largest, BlockStored) else self._removed(largest)
            before, _, behind = self._encoder.encode(wire).partition(b"\xff" * 8)
            kept = self._around_hash[like] = before, behind
        return msgspec.Raw(kept[0] + tail + kept[1])

    def _removed(self, event: BlockRemoved) -> msgspec.Struct:
        removed = _MapRemoved if self._as_map else _ArrayRemoved
        return removed(self._hashes(event.block_hashes), event.medium.value, 0)

    def _stored(self, event: BlockStored) -> msgspec.Struct:
        stored = _MapStored if self._as_map else _ArrayStored
        return stored(
            block_hashes=self._hashes(event.block_hashes),
            parent_block_hash=None if event.parent is None else self.hash(event.parent),
            token_ids=_wide(event.token_ids) if self._wide_tokens else event.token_ids.tolist(),
            block_size=event.block_size_tokens,
            lora_id=event.lora_id,
            medium=event.medium.value,
            lora_name=event.lora_name,
            extra_keys=event.extra_keys,
            group_idx=0,
            kv_cache_spec_kind=event.spec_kind,
            locality=event.locality,
            session_id=event.session_id,
        )


def _wide(tokens: array[int]) -> msgspec.Raw:
    """A msgpack array of unsigned 32-bit integers: ``dd`` and the length, then ``ce`` and four bytes for each."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    data = tokens.tobytes()
    wide = bytearray(5 * len(tokens))
    wide[0::5] = b"\xce" * len(tokens)
    for place in range(4):
        wide[1 + place :: 5] = data[3 - place :: 4]
    return msgspec.Raw(b"\xdd" + len(tokens).to_bytes(4, "big") + wide)
