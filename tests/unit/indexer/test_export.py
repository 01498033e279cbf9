# SPDX-License-Identifier: Apache-2.0
"""A slot as bytes and back: what is imported answers, and goes on, as what was exported would have."""

from __future__ import annotations

import kv_batches as kv
import pytest

from indexer.hashing import HashKey
from indexer.identity import Tier
from indexer.index import IndexLimits, PrefixIndex, open_index

BYTES = [b"a" * 32, b"b" * 32]


class Holder:
    """An index with one rank and its store."""

    def __init__(self, backend: str, limits: IndexLimits | None = None) -> None:
        self.index: PrefixIndex = open_index(HashKey(kv.KEY_BYTES), limits or IndexLimits(), backend)  # type: ignore[arg-type]
        self.slot, self.store = self.index.open("m", False), self.index.open("m", False)

    def apply(self, *events: object) -> None:
        self.index.apply([self.slot], 0, self.store, kv.batch(*events))
        assert self.index.check() == ""

    def copied(self, limits: IndexLimits | None = None) -> Holder:
        """Another process with what was exported here."""
        other = Holder("native" if self.index.export_format.startswith("native") else "reference", limits)
        for slot in (self.slot, self.store):
            size = self.index.counts(slot).block_size
            other.index.import_slot(slot, self.index.export_slot(slot), size)
        assert other.index.check() == ""
        return other

    def state(self) -> list[object]:
        counts = self.index.counts(self.slot)
        return [
            sorted(self.index.blocks(self.slot)),
            sorted(self.index.blocks(self.store)),
            (counts.hbm, counts.ram, counts.doubtful_ram, counts.unidentified, counts.remembered),
            counts.block_size,
            self.index.distinct_blocks,
        ]

    def held(self, names: list[int | bytes], tier: Tier = Tier.HBM) -> int:
        hashes = self.index.hash_blocks(kv.prompt(names), kv.BLOCK, "m", "", [])
        slot = self.store if tier is Tier.STORAGE else self.slot
        runs = [run for run in self.index.match(hashes) if run[:3] == (slot, tier, 0)]
        return runs[0][3] if runs else 0


@pytest.fixture(params=["native", "reference"])
def holder(request: pytest.FixtureRequest) -> Holder:
    return Holder(request.param)


def fill(holder: Holder) -> None:
    holder.apply(kv.stored([1, 2, 3]), kv.stored([1, 2]), kv.stored([2**63 + 5, 2**64 - 1]), kv.stored(BYTES))
    holder.apply(kv.placeholder([1, 2]), kv.placeholder([3], "STORAGE"), kv.placeholder([77]))
    holder.apply(kv.removed([3]))


def test_a_copy_holds_what_its_original_held(holder: Holder) -> None:
    fill(holder)
    copy = holder.copied()
    assert copy.state() == holder.state()
    assert (copy.held([1, 2, 3]), copy.held([1, 2], Tier.RAM), copy.held([*BYTES])) == (2, 2, 2)


def test_later_events_mean_the_same_to_a_copy(holder: Holder) -> None:
    fill(holder)
    copy = holder.copied()
    for one in (holder, copy):
        one.apply(kv.removed([1, 2]), kv.removed(BYTES[1:]), kv.removed([2**63 + 5]))
        assert one.held([1, 2]) == 2  # stored twice, removed once
        one.apply(kv.removed([1]), kv.placeholder([3]), kv.stored([4], parent=2))
        one.apply(kv.removed([3], "STORAGE"), kv.stored([77]), kv.cleared())
    assert copy.state() == holder.state()


def test_a_copy_of_a_copy_has_the_same_blocks(holder: Holder) -> None:
    fill(holder)
    assert holder.copied().copied().state() == holder.state()


def test_the_limits_of_the_importing_index_hold(holder: Holder) -> None:
    holder.apply(*[kv.stored([i]) for i in range(1, 9)])
    holder.apply(kv.removed(list(range(1, 9))), kv.placeholder(list(range(100, 108))))
    counts = holder.copied(IndexLimits(unidentified_blocks=3, remembered_blocks=2)).index.counts(0)
    assert (counts.unidentified, counts.remembered) == (3, 2)


def test_a_slot_that_is_gone_exports_nothing_that_counts(holder: Holder) -> None:
    fill(holder)
    holder.index.retire(holder.slot)
    exported = holder.index.export_slot(holder.slot)
    fresh = holder.index.open("m", False)
    assert holder.index.import_slot(fresh, exported, 4) == 0 if exported else True


def test_bytes_that_are_no_export_are_refused_whole(holder: Holder) -> None:
    fill(holder)
    good = holder.index.export_slot(holder.slot)
    index = Holder("native" if holder.index.export_format.startswith("native") else "reference").index
    slot = index.open("m", False)
    # Half of it, a byte more, a byte less, a record twice.
    for bad in (good[: len(good) // 2 + 1], good + b"\x01", good[:-1], good + good):
        with pytest.raises(ValueError, match=r"record|truncated|malformed|trailing"):
            index.import_slot(slot, bad, 4)
        assert (index.blocks(slot), index.distinct_blocks, index.check()) == ([], 0, "")
    assert index.import_slot(slot, good, 4) > 0


def test_a_slot_that_holds_something_or_is_retired_takes_nothing(holder: Holder) -> None:
    fill(holder)
    exported = holder.index.export_slot(holder.slot)
    with pytest.raises(ValueError, match="holds nothing"):
        holder.index.import_slot(holder.slot, exported, 4)
    gone = holder.index.open("m", False)
    holder.index.retire(gone)
    with pytest.raises(ValueError, match="holds nothing"):
        holder.index.import_slot(gone, exported, 4)
