# SPDX-License-Identifier: Apache-2.0
"""vLLM KV event batches in plain Python: what the native decoder reads, as values.

Used by the reference index and by tests; the service decodes in the native core. The format is that of
``vllm/distributed/kv_events.py``, 0.9 to 0.33: ``[ts, [event, ...], data_parallel_rank?]`` in msgpack, an event
being a map with a ``type`` or, in older engines, an array with the tag first.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import msgspec

from indexer.errors import WireError
from indexer.hashing import canonical_extra_keys
from indexer.identity import Tier, tier_of_medium

# An engine block hash as the engine wrote it, with its cache group. Bytes and integers never compare equal.
EngineKey = tuple[int, int | bytes]

FULL_ATTENTION_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_MAX_U32 = 0xFFFF_FFFF
_MAX_GROUP = 0xFFFF


class Skipped(enum.Enum):
    """An entry of a batch that is not applied."""

    MALFORMED = "malformed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that became resident. ``tier`` is None for a medium we do not know."""

    tier: Tier | None
    keys: tuple[EngineKey, ...]
    parent: EngineKey | None
    tokens: tuple[int, ...]
    block_size: int
    lora: str
    full_attention: bool
    extra_keys: tuple[bytes, ...]
    """Canonical extra keys of each block, the adapter's name left out; empty when the event has none."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that left a tier."""

    tier: Tier | None
    keys: tuple[EngineKey, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything left the GPU of one rank."""


Event = Stored | Removed | Cleared | Skipped


@dataclass(frozen=True, slots=True)
class Batch:
    """A decoded batch; ``rank`` is None where the batch does not say."""

    events: tuple[Event, ...]
    rank: int | None


def decode_batch(payload: bytes) -> Batch:
    """Decode a whole batch.

    Raises:
        WireError: the payload is not msgpack, or not a batch.
    """
    try:
        raw = msgspec.msgpack.decode(payload, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(str(error)) from error
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[1], list):
        raise WireError("not an array of a time and a list of events")
    rank = raw[2] if len(raw) > 2 and _is_unsigned(raw[2], _MAX_GROUP) else None
    return Batch(tuple(_events(raw[1])), rank)


def _events(entries: Sequence[object]) -> Iterator[Event]:
    for entry in entries:
        try:
            yield _event(entry)
        except (WireError, ValueError):
            yield Skipped.MALFORMED


def _event(entry: object) -> Event:
    if isinstance(entry, dict):
        tag, fields = entry.get("type"), entry
    elif isinstance(entry, list) and entry:
        tag = entry[0]
        names = {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS}.get(str(tag), ())
        fields = dict(zip(names, entry[1:], strict=False))
    else:
        raise WireError("an event is a map or an array")
    if not isinstance(tag, str):
        raise WireError("an event needs a type")
    match tag:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            return Removed(_tier(fields), _keys(fields))
        case "AllBlocksCleared":
            return Cleared()
        case _:
            return Skipped.UNKNOWN


def _stored(fields: Mapping[str, object]) -> Stored:
    keys = _keys(fields)
    parent_hash = fields.get("parent_block_hash")
    parent = None if parent_hash is None else (_group(fields), _hash(parent_hash))
    if parent in keys:
        raise WireError("a block is its own parent")
    kind = fields.get("kv_cache_spec_kind")
    if kind is not None and not isinstance(kind, str):
        raise WireError("kv_cache_spec_kind is a string")
    lora = _lora(fields)
    return Stored(
        tier=_tier(fields),
        keys=keys,
        parent=parent,
        tokens=_tokens(fields.get("token_ids", [])),
        block_size=_unsigned(fields.get("block_size", 0), _MAX_U32),
        lora=lora,
        full_attention=kind is None or kind in FULL_ATTENTION_KINDS,
        extra_keys=_extra_keys(fields.get("extra_keys"), len(keys), lora),
    )


def _lora(fields: Mapping[str, object]) -> str:
    name, number = fields.get("lora_name"), fields.get("lora_id")
    if name is not None and not isinstance(name, str):
        raise WireError("lora_name is a string")
    if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
        raise WireError("lora_id is an integer")
    if name:
        return name
    return f"#{number & 0xFFFF_FFFF_FFFF_FFFF}" if number else ""


def _extra_keys(value: object, blocks: int, lora: str) -> tuple[bytes, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise WireError("extra_keys is a list")
    if value and len(value) != blocks:
        raise WireError("extra_keys has one entry per block")
    if any(keys is not None and not isinstance(keys, list) for keys in value):
        raise WireError("the extra keys of a block are a list")
    # The adapter is part of the namespace; as the first extra key of a block it would count twice.
    return tuple(
        canonical_extra_keys(keys[1:] if keys and lora and keys[0] == lora else keys) for keys in value
    )


def _tier(fields: Mapping[str, object]) -> Tier | None:
    medium = fields.get("medium")
    if medium is not None and not isinstance(medium, str):
        raise WireError("medium is a string")
    return tier_of_medium(medium)


def _group(fields: Mapping[str, object]) -> int:
    group = fields.get("group_idx")
    return 0 if group is None else _unsigned(group, _MAX_GROUP)


def _keys(fields: Mapping[str, object]) -> tuple[EngineKey, ...]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise WireError("block_hashes is a list")
    group = _group(fields)
    keys = tuple((group, _hash(value)) for value in hashes)
    if len(set(keys)) != len(keys):
        raise WireError("a block hash stands twice in one event")
    return keys


def _hash(value: object) -> int | bytes:
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise WireError("a block hash is an integer or bytes")


def _tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_unsigned(token, _MAX_U32) for token in value):
        raise WireError("token_ids is a list of unsigned 32-bit integers")
    return tuple(value)


def _unsigned(value: object, limit: int) -> int:
    if not _is_unsigned(value, limit):
        raise WireError(f"an integer from 0 to {limit} is expected")
    return value


def _is_unsigned(value: object, limit: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit
