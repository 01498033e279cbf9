# SPDX-License-Identifier: Apache-2.0
"""Malformed event payloads, each of a different kind. None of them names a block the engine holds."""

from __future__ import annotations

import msgspec

from engine_ext.sim.events import HashKind


def rubbish_payloads(hash_kind: HashKind, ts_s: float) -> list[bytes]:
    """One payload of every kind; a consumer has to survive each and lose nothing else."""
    if hash_kind is HashKind.INT:
        first: int | bytes = 0xDEAD_BEEF_0000_0001
        second: int | bytes = 0xDEAD_BEEF_0000_0002
    else:
        first, second = b"\xde" * 31 + b"\x01", b"\xde" * 31 + b"\x02"
    good = _stored([first, second], None)

    def batch(*events: object) -> bytes:
        return msgspec.msgpack.encode([ts_s, list(events), 0])

    return [
        batch(good)[:-7],  # truncated
        b"",  # nothing at all
        b"\xc1",  # the one byte msgpack never uses
        b"\xdd\xff\xff\xff\xff",  # an array that claims 4 Gi items
        b"\x93\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xdd\x7f\xff\xff\xff",  # a batch that claims 2 Gi events
        msgspec.msgpack.encode("a string"),  # not a batch
        msgspec.msgpack.encode(["when", "events", "rank"]),  # wrong types throughout
        batch({"type": "BlockMoved", "block_hashes": [first]}),  # unknown tag, map
        batch(["BlockMoved", [first], "CPU"]),  # unknown tag, array
        batch({"block_hashes": [first]}),  # no tag
        batch({"type": "BlockStored"}),  # no fields
        batch({**good, "block_hashes": "none"}),  # wrong type of one field
        batch({**good, "block_hashes": [1.5, None]}),
        batch({**good, "block_size": -16}),
        batch({**good, "block_size": 2**62}),
        batch({**good, "token_ids": [-1, 2**40, "x"]}),
        batch({**good, "token_ids": list(range(5))}),  # tokens do not match blocks
        batch(_stored([first], first)),  # its own parent
        batch(_stored([first, first], None)),  # the same block twice
        batch({"type": "BlockRemoved", "block_hashes": [first], "medium": 7}),
        batch(None, 3, [], {}),
    ]


def _stored(hashes: list[int | bytes], parent: int | bytes | None) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(16 * len(hashes))),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
