# SPDX-License-Identifier: Apache-2.0
"""A block that left HBM of an engine that offloads: on its way to RAM for a while, then gone."""

from __future__ import annotations

import kv_batches as kv
import pytest

from indexer.hashing import HashKey
from indexer.index import Backend, IndexLimits, PrefixIndex, Run, open_index

HBM, RAM = 0, 1
DEMOTING = 2
GRACE_S = 2.0


class Engine:
    def __init__(self, backend: Backend, grace_s: float) -> None:
        self.index: PrefixIndex = open_index(HashKey(kv.KEY_BYTES), IndexLimits(), backend)
        self.store = self.index.open("m", False)
        self.slot = self.index.open("m", False, grace_s=grace_s)
        self.apply(0.0, kv.stored([1, 2, 3]))

    def apply(self, now_s: float, *events: object) -> None:
        self.index.apply([self.slot], 0, self.store, kv.batch(*events), now_s)

    def runs(self, now_s: float) -> list[Run]:
        hashes = self.index.hash_blocks(kv.prompt([1, 2, 3]), kv.BLOCK, "m", "", [])
        return [run for run in self.index.match(hashes, now_s) if run[0] == self.slot]


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Backend:
    name: Backend = request.param
    return name


def test_a_block_is_demoting_until_it_is_stored_in_ram(backend: Backend) -> None:
    engine = Engine(backend, GRACE_S)
    engine.apply(10.0, kv.removed([3]))
    slot = engine.slot
    assert engine.runs(10.0) == [(slot, HBM, 0, 2, 0), (slot, RAM, 2, 3, DEMOTING)]
    assert engine.index.counts(slot).demoting == 1
    assert engine.index.counts(slot).hbm == 2
    engine.apply(10.5, kv.placeholder([3]))
    assert engine.runs(10.5) == [(slot, HBM, 0, 2, 0), (slot, RAM, 2, 3, 0)]
    assert engine.runs(100.0) == [(slot, HBM, 0, 2, 0), (slot, RAM, 2, 3, 0)]
    assert engine.index.counts(slot).demoting == 0


def test_a_block_that_never_comes_to_ram_is_gone_when_its_grace_is_over(backend: Backend) -> None:
    engine = Engine(backend, GRACE_S)
    engine.apply(10.0, kv.removed([3]))
    assert engine.runs(10.0 + GRACE_S)[-1][4] == DEMOTING
    assert engine.runs(10.2 + GRACE_S) == [(engine.slot, HBM, 0, 2, 0)]
    assert engine.index.counts(engine.slot).remembered == 1
    engine.apply(20.0, kv.placeholder([3]))
    assert engine.runs(20.0)[-1] == (engine.slot, RAM, 2, 3, 0)


def test_a_block_that_is_in_hbm_again_is_not_demoting_and_gets_a_whole_grace_the_next_time(
    backend: Backend,
) -> None:
    engine = Engine(backend, GRACE_S)
    engine.apply(10.0, kv.removed([3]))
    engine.apply(11.0, kv.stored([3], parent=2))
    assert engine.runs(11.0) == [(engine.slot, HBM, 0, 3, 0)]
    engine.apply(11.5, kv.removed([3]))
    assert engine.runs(10.2 + GRACE_S)[-1] == (engine.slot, RAM, 2, 3, DEMOTING)
    assert engine.runs(11.7 + GRACE_S) == [(engine.slot, HBM, 0, 2, 0)]


def test_a_clear_ends_what_is_demoting(backend: Backend) -> None:
    engine = Engine(backend, GRACE_S)
    engine.apply(10.0, kv.removed([2, 3]), kv.cleared())
    assert engine.runs(10.0) == []
    assert engine.index.check() == ""


def test_a_block_that_is_in_ram_already_is_not_demoting(backend: Backend) -> None:
    engine = Engine(backend, GRACE_S)
    engine.apply(10.0, kv.placeholder([3]), kv.removed([3]))
    assert engine.runs(10.0)[-1] == (engine.slot, RAM, 2, 3, 0)
    assert engine.index.counts(engine.slot).demoting == 0


def test_nothing_is_demoting_where_the_engine_does_not_offload(backend: Backend) -> None:
    engine = Engine(backend, 0.0)
    engine.apply(10.0, kv.removed([3]))
    assert engine.runs(10.0) == [(engine.slot, HBM, 0, 2, 0)]
