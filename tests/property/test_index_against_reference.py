# SPDX-License-Identifier: Apache-2.0
"""One machine drives the native index and the plain-dict one with the same batches; they must never differ."""

from __future__ import annotations

from typing import Any

import kv_batches as kv
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from indexer.hashing import HashKey
from indexer.holders import APPLY_COUNTS
from indexer.index import IndexLimits, open_index

KEY = HashKey(kv.KEY_BYTES)
LIMITS = IndexLimits(detached_blocks=6, unidentified_blocks=5, remembered_blocks=4)
COUNTS = [*APPLY_COUNTS[:-1], "malformed_batch"]
TOTALS = [
    "hbm",
    "ram",
    "storage",
    "doubtful_ram",
    "unidentified",
    "detached",
    "remembered",
    "demoting",
    "block_size",
]

# Few names, so that events meet; the two kinds of hash with equal low bits must stay apart.
hashes = st.one_of(
    st.integers(0, 7),
    st.sampled_from([-3, 2**63 + 5, 2**64 - 3]),
    st.integers(0, 3).map(lambda i: bytes([0, 0, 0, i]) * 8),
)
hash_lists = st.lists(hashes, max_size=4)
media = st.sampled_from(["GPU", "GPU", "GPU", "CPU", "cpu_pinned", "STORAGE", None, "TAPE"])
groups = st.sampled_from([None, None, 0, 1])


@st.composite
def events(draw: st.DrawFn) -> object:
    kind = draw(st.sampled_from(["stored", "stored", "stored", "placeholder", "removed", "odd"]))
    names = draw(hash_lists)
    if kind == "placeholder":
        event = kv.placeholder(names, draw(st.sampled_from(["CPU", "STORAGE"])))
    elif kind == "removed":
        event = kv.removed(names, draw(media), draw(groups))
    elif kind == "odd":
        return draw(
            st.sampled_from(
                [
                    {"type": "SomethingNew", "field": [1, {"a": 2}]},
                    ["AnotherNew", 1, 2],
                    {"block_hashes": [1]},
                    7,
                    [],
                    {"type": "BlockStored", "block_hashes": [1.5]},
                    kv.cleared(),
                    kv.cleared(),
                ]
            )
        )
    else:
        event = kv.stored(
            names,
            draw(st.sampled_from([None, None, None, [1, 2], list(range(40))])),
            draw(st.one_of(st.none(), hashes)),
            medium=draw(media),
            extra_keys=draw(st.sampled_from([None, None, [["salt"]], [["salt"]] + [None] * 3])),
            lora_name=draw(st.sampled_from([None, None, "salt", "adapter"])),
            lora_id=draw(st.sampled_from([None, None, 3])),
            group=draw(groups),
            kind=draw(st.sampled_from([None, "full_attention", "sliding_window"])),
        )
    return draw(st.sampled_from([event, kv.as_array(event)]))


class IndexMachine(RuleBasedStateMachine):
    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.native = open_index(KEY, LIMITS, "native")
        self.reference = open_index(KEY, LIMITS, "reference")
        self.stores = [self.both("open", "", False)]
        self.opened: list[int] = []
        self.now_s = 100.0

    def both(self, name: str, *args: Any) -> Any:
        left, right = getattr(self.native, name)(*args), getattr(self.reference, name)(*args)
        assert left == right
        return left

    @rule(
        target=slots,
        plain=st.booleans(),
        model=st.sampled_from(["m", "n"]),
        grace_s=st.sampled_from([0.0, 1.0, 2.5]),
    )
    def open(self, plain: bool, model: str, grace_s: float) -> int:
        slot: int = self.both("open", model, plain, "", grace_s)
        self.opened.append(slot)
        return slot

    @rule(slot=slots, batch=st.lists(events(), max_size=5), rank=st.sampled_from([None, 0, 1, 9]))
    def apply(self, slot: int, batch: list[object], rank: int | None) -> None:
        self.apply_payload(slot, kv.batch(*batch, rank=rank))

    @rule(slot=slots, batch=st.lists(events(), max_size=3), cut=st.integers(0, 200))
    def apply_cut_short(self, slot: int, batch: list[object], cut: int) -> None:
        payload = kv.batch(*batch)
        self.apply_payload(slot, payload[: cut % len(payload)])

    def apply_payload(self, slot: int, payload: bytes) -> None:
        ranks = [slot, self.opened[0]]
        left = self.native.apply(ranks, 0, self.stores[0], payload, self.now_s)
        right = self.reference.apply(ranks, 0, self.stores[0], payload, self.now_s)
        for name in COUNTS:
            assert getattr(left, name) == getattr(right, name), name

    @rule(slot=slots)
    def retire(self, slot: int) -> None:
        if slot != self.opened[0]:
            self.both("retire", slot)

    @rule(slot=slots)
    def clear(self, slot: int) -> None:
        self.both("clear", slot)

    @rule(steps=st.integers(1, 40))
    def sweep(self, steps: int) -> None:
        self.native.sweep(steps, self.now_s)
        self.reference.sweep(steps, self.now_s)

    @rule(passed_s=st.sampled_from([0.01, 0.5, 1.0, 3.0]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule(
        names=st.lists(hashes, max_size=5),
        model=st.sampled_from(["m", "n"]),
        lora=st.sampled_from(["", "salt", "adapter"]),
        keys=st.sampled_from([[], ["salt"]]),
    )
    def match(self, names: list[int | bytes], model: str, lora: str, keys: list[str]) -> None:
        tokens = kv.prompt(names)
        query = self.both("hash_blocks", tokens, kv.BLOCK, model, lora, keys)
        self.both("match", query, self.now_s)

    @invariant()
    def holds_the_same(self) -> None:
        assert self.native.check() == ""
        for slot in [*self.opened, *self.stores]:
            assert sorted(self.native.blocks(slot)) == sorted(self.reference.blocks(slot))
            left, right = self.native.counts(slot), self.reference.counts(slot)
            for name in TOTALS:
                assert getattr(left, name) == getattr(right, name), name


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=300, stateful_step_count=30)
