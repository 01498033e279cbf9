# SPDX-License-Identifier: Apache-2.0
"""What events mean, on both backends. Each test is a way in which such an index has been wrong for somebody."""

from __future__ import annotations

from collections.abc import Sequence

import kv_batches as kv
import pytest

from indexer.hashing import HashKey
from indexer.identity import Tier
from indexer.index import Backend, IndexLimits, open_index


class World:
    """An index with one worker of two ranks and its store; queries by names of blocks."""

    def __init__(self, backend: Backend, limits: IndexLimits) -> None:
        self.index = open_index(HashKey(kv.KEY_BYTES), limits, backend)
        self.ranks = [self.index.open("m", False), self.index.open("m", False)]
        self.store = self.index.open("m", False)

    def apply(self, *events: object, rank: int | None = None, default_rank: int = 0):
        counts = self.index.apply(self.ranks, default_rank, self.store, kv.batch(*events, rank=rank))
        assert self.index.check() == ""
        return counts

    def held(
        self,
        names: Sequence[int | bytes],
        tier: Tier = Tier.HBM,
        *,
        rank: int = 0,
        lora: str = "",
        salt: str | None = None,
    ) -> int:
        """Blocks from the start of the prompt on that tier, doubtful ones left out."""
        hashes = self.index.hash_blocks(kv.prompt(names), kv.BLOCK, "m", lora, [salt] if salt else [])
        slot = self.store if tier is Tier.STORAGE else self.ranks[rank]
        runs = [run for run in self.index.match(hashes) if run[:2] == (slot, tier) and not run[4]]
        return runs[0][3] if runs and runs[0][2] == 0 else 0


@pytest.fixture(params=["native", "reference"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param, IndexLimits(detached_blocks=8, unidentified_blocks=4, remembered_blocks=4))


def test_prefix_is_anchored_at_the_start(world: World) -> None:
    world.apply(kv.stored([1, 2]))
    assert world.held([1, 2, 3]) == 2
    assert world.held([2, 1]) == 0
    assert world.held([3, 1, 2]) == 0


def test_two_copies_need_two_removals(world: World) -> None:
    world.apply(kv.stored([1, 2, 3]), kv.stored([3], parent=2))
    world.apply(kv.removed([3]))
    assert world.held([1, 2, 3]) == 3
    world.apply(kv.removed([3]))
    assert world.held([1, 2, 3]) == 2


def test_clear_forgets_copies_too(world: World) -> None:
    world.apply(kv.stored([1]), kv.stored([1]), kv.cleared(), kv.stored([1]), kv.removed([1]))
    assert world.held([1]) == 0


def test_clear_is_of_one_rank_keeps_storage_and_doubts_ram(world: World) -> None:
    world.apply(kv.stored([1, 2]), kv.placeholder([1, 2]), kv.placeholder([1], "STORAGE"), rank=0)
    world.apply(kv.stored([1, 2]), rank=1)
    world.apply(kv.cleared(), rank=0)
    assert (world.held([1, 2]), world.held([1, 2], rank=1)) == (0, 2)
    assert world.held([1, 2], Tier.STORAGE) == 1
    assert world.held([1, 2], Tier.RAM) == 0
    assert world.index.counts(world.ranks[0]).doubtful_ram == 2
    world.apply(kv.placeholder([1]), rank=0)
    assert world.held([1, 2], Tier.RAM) == 1


def test_batch_without_rank_is_of_the_socket_it_came_from(world: World) -> None:
    world.apply(kv.stored([1]), rank=None, default_rank=1)
    assert (world.held([1]), world.held([1], rank=1)) == (0, 1)
    world.apply(kv.stored([1]), rank=7, default_rank=0)
    assert world.held([1]) == 1


@pytest.mark.parametrize("medium", ["CPU", "cpu", "CPU_PINNED"])
def test_ram_copy_outlives_the_gpu_copy(world: World, medium: str) -> None:
    world.apply(kv.stored([1, 2]), kv.placeholder([1, 2], medium), kv.removed([1, 2]))
    assert (world.held([1, 2]), world.held([1, 2], Tier.RAM)) == (0, 2)


def test_ram_copy_announced_after_the_removal_is_still_known(world: World) -> None:
    world.apply(kv.stored([1, 2]), kv.removed([1, 2]), kv.placeholder([1, 2]))
    assert world.held([1, 2], Tier.RAM) == 2


def test_ram_copy_announced_first_waits_and_never_becomes_a_root(world: World) -> None:
    world.apply(kv.placeholder([2]))
    assert world.held([2], Tier.RAM) == 0
    world.apply(kv.stored([1, 2]))
    assert world.held([1, 2], Tier.RAM) == 0
    world.apply(kv.placeholder([1]))
    assert world.held([1, 2], Tier.RAM) == 2


def test_offloaded_tokens_without_their_extra_keys_identify_nothing(world: World) -> None:
    world.apply(kv.stored([1], medium="CPU"))
    assert world.held([1], Tier.RAM) == 0


def test_unknown_medium_is_not_hbm_and_no_medium_is(world: World) -> None:
    counts = world.apply(kv.stored([1], medium="TAPE"), kv.stored([2], medium=None))
    assert counts.unknown_medium_events == 1
    assert (world.held([1]), world.held([2])) == (0, 1)


def test_child_before_its_parent_joins_when_the_parent_comes(world: World) -> None:
    world.apply(kv.stored([3], parent=2))
    world.apply(kv.stored([2], parent=1))
    assert world.held([3]) == 0
    assert world.index.counts(world.ranks[0]).detached == 2
    assert world.apply(kv.stored([1])).joined == 2
    assert world.held([1, 2, 3]) == 3


def test_what_waits_is_bounded(world: World) -> None:
    for name in range(100, 300, 2):
        world.apply(kv.stored([name], parent=name + 1), kv.placeholder([name + 10_000]))
    counts = world.index.counts(world.ranks[0])
    assert counts.detached <= 8
    assert counts.unidentified <= 8 + 4


@pytest.mark.parametrize(
    "bad",
    [
        kv.stored([1, 1], [0] * 8),
        kv.stored([1], parent=1),
        kv.stored([1], [0, 1]),
        kv.stored([1], [1, 2, 3, 4], block_size=0),
        {"type": "BlockStored", "block_hashes": [1.5]},
        {"type": "BlockRemoved"},
    ],
)
def test_malformed_event_is_dropped_and_the_rest_of_its_batch_applied(
    world: World, bad: dict[str, object]
) -> None:
    world.apply(kv.stored(list(range(50, 100))))
    counts = world.apply(bad, kv.stored([1]))
    assert counts.malformed_events == 1
    assert world.held([1]) == 1
    assert world.held(list(range(50, 100))) == 50


def test_unknown_event_in_the_middle_is_skipped(world: World) -> None:
    counts = world.apply(
        kv.stored([1]), ["NewKind", 1, {"a": [2]}], {"type": "Other"}, kv.stored([2], parent=1)
    )
    assert counts.unknown_events == 2
    assert world.held([1, 2]) == 2


def test_array_form_with_fewer_and_with_more_fields_is_read(world: World) -> None:
    full = kv.as_array(kv.stored([1], extra_keys=[None], group=0, kind="full_attention"))
    world.apply([*full, 0, "LOCAL", "something new"])
    world.apply(["BlockStored", [2], 1, kv.tokens_of([2]), kv.BLOCK])
    assert world.held([1, 2]) == 2
    world.apply(["BlockRemoved", [2]], ["AllBlocksCleared"])
    assert world.held([1, 2]) == 0


def test_hashes_of_both_kinds_are_kept_apart_and_exact(world: World) -> None:
    big, negative, raw = 2**64 - 3, -3, b"\x00" * 31 + b"\x05"
    for name in (big, negative, raw, 5):
        world.apply(kv.stored([name], [1, 2, 3, 4]))
    assert world.index.counts(world.ranks[0]).hbm == 4
    world.apply(kv.removed([big]), kv.removed([negative]), kv.removed([5]))
    assert world.index.counts(world.ranks[0]).hbm == 1
    world.apply(kv.removed([raw]))
    assert world.index.counts(world.ranks[0]).hbm == 0


@pytest.mark.parametrize("first", ["dense", "sparse"])
def test_sparse_group_neither_hides_nor_removes_the_dense_one(world: World, first: str) -> None:
    dense = kv.stored([1, 2, 3, 4], group=0, kind="full_attention")
    window = kv.stored([3, 4], kv.tokens_of([1, 2, 3, 4]), 2, group=1, kind="sliding_window")
    unnamed = kv.stored([4], kv.tokens_of([1, 2, 3, 4]), group=2)
    events = [dense, window, unnamed] if first == "dense" else [window, unnamed, dense]
    assert world.apply(*events).sparse_events == 2
    assert world.held([1, 2, 3, 4]) == 4
    world.apply(kv.removed([3, 4], group=1), kv.removed([4], group=2))
    assert world.held([1, 2, 3, 4]) == 4


def test_adapter_and_base_model_are_worlds_of_their_own(world: World) -> None:
    world.apply(kv.stored([1]), kv.stored([11], kv.tokens_of([1]), lora_name="a1", extra_keys=[["a1"]]))
    assert (world.held([1]), world.held([1], lora="a1"), world.held([1], lora="a2")) == (1, 1, 0)
    world.apply(kv.removed([1]))
    assert (world.held([1]), world.held([1], lora="a1")) == (0, 1)


def test_adapter_known_by_number_only_is_never_the_base_model(world: World) -> None:
    world.apply(kv.stored([1], lora_id=3))
    assert world.held([1]) == 0


def test_salt_is_part_of_the_identity_also_beside_an_adapter(world: World) -> None:
    world.apply(kv.stored([1, 2], extra_keys=[["s1"], None]))
    assert (world.held([1, 2], salt="s1"), world.held([1, 2]), world.held([1, 2], salt="s2")) == (2, 0, 0)
    world.apply(kv.stored([21], kv.tokens_of([1]), lora_name="a1", extra_keys=[["a1", "s1"]]))
    assert (world.held([1], lora="a1", salt="s1"), world.held([1], lora="a1")) == (1, 0)


def test_image_is_part_of_the_identity(world: World) -> None:
    world.apply(kv.stored([1, 2], extra_keys=[None, [["image-a", 2]]]))
    assert world.held([1, 2]) == 1


def test_stored_elsewhere_does_not_count_here(world: World) -> None:
    other = world.index.open("m", False)
    world.index.apply([other], 0, world.store, kv.batch(kv.stored([1])))
    assert world.held([1]) == 0


def test_retired_slot_holds_nothing_at_once(world: World) -> None:
    world.apply(kv.stored([1, 2, 3]))
    world.index.retire(world.ranks[0])
    assert world.held([1, 2, 3]) == 0
    assert world.index.blocks(world.ranks[0]) == []
    while not world.index.sweep(1):
        assert world.index.check() == "", "what is told is right between the steps too"
    assert world.index.distinct_blocks == 0


def test_storage_is_the_stores_and_outlives_the_worker(world: World) -> None:
    world.apply(kv.stored([1, 2]), kv.placeholder([1, 2], "STORAGE"))
    world.index.retire(world.ranks[0])
    assert world.held([1, 2], Tier.STORAGE) == 2
    world.apply(kv.removed([2], "STORAGE"), rank=1)
    assert world.held([1, 2], Tier.STORAGE) == 1
