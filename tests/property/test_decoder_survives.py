# SPDX-License-Identifier: Apache-2.0
"""Bytes from the network: whatever they are, the core counts them, keeps its invariants and what it held before."""

from __future__ import annotations

import kv_batches as kv
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexer.hashing import HashKey
from indexer.index import IndexLimits, PrefixIndex, open_index

KEPT = list(range(10**9, 10**9 + 50))
"""Names of five bytes: more than are damaged, so no damaged removal can name one."""


def warm() -> tuple[PrefixIndex, int, int]:
    index = open_index(HashKey(kv.KEY_BYTES), IndexLimits(50, 50, 50))
    slot, store = index.open("m", False), index.open("m", False)
    index.apply([slot], 0, store, kv.batch(kv.stored(KEPT)))
    return index, slot, store


VALID = [
    kv.batch(
        kv.stored([1, 2, 3], extra_keys=[["salt"], None, [["image", 7], b"digest"]]), kv.removed([2]), rank=0
    ),
    kv.batch(kv.as_array(kv.stored([b"\x01" * 32, b"\x02" * 32], lora_name="a")), kv.placeholder([1])),
]


@given(st.binary(max_size=200))
@example(b"\x93\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xdd\xff\xff\xff\xff\x00")  # four billion events declared
@example(b"\x92\x00\xdc\xff\xff" + b"\x91" * 60_000)  # nested sixty thousand deep
@example(b"\x92\x00\x91\x82\xa4type\xabBlockStored\xacblock_hashes\xdd\xff\xff\xff\xff")
def test_rubbish_changes_nothing(payload: bytes) -> None:
    index, slot, store = warm()
    index.apply([slot], 0, store, payload)
    assert index.check() == ""
    assert index.counts(slot).hbm >= len(KEPT)


@settings(max_examples=400)
@given(
    payload=st.sampled_from(VALID),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 10_000),
)
def test_damaged_batches_keep_the_invariants(
    payload: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    index, slot, store = warm()
    damaged = bytearray(payload)
    for position, value in changes:
        damaged[position % len(damaged)] = value
    index.apply([slot], 0, store, bytes(damaged[: cut % (2 * len(damaged)) or None]))
    assert index.check() == ""
    assert index.counts(slot).hbm >= len(KEPT)


def test_truncated_batch_is_refused_whole() -> None:
    for payload in VALID:
        for end in range(len(payload)):
            index, slot, store = warm()
            assert index.apply([slot], 0, store, payload[:end]).malformed_batch
            assert index.counts(slot).hbm == len(KEPT)
