# SPDX-License-Identifier: Apache-2.0
"""Ways in which such indexes were wrong for somebody, over real sockets. The README's table says which is which."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import pytest
from eventually import eventually_now
from kv_batches import BLOCK, as_array, batch, cleared, placeholder, prompt, removed, stored, tokens_of
from kv_publisher import Frames, ScriptedEngine, end, honest

from indexer.identity import Tier, WorkerId, WorkerRank
from indexer.subscriber import RankEndpoints

from .conftest import MODEL, Indexer

DENSE = stored([1, 2, 3, 4, 5], group=3, kind="full_attention")


def held(
    indexer: Indexer,
    names: Sequence[int],
    tier: Tier = Tier.HBM,
    *,
    worker: str = "w",
    rank: int = 0,
    lora: str = "",
    keys: Sequence[str] = (),
) -> int:
    """Leading blocks of this prompt on that tier, those in doubt left out."""
    hashes = indexer.holders.index.hash_blocks(prompt(names), BLOCK, MODEL, lora, keys)
    ends = [
        run.end
        for owner, run in indexer.holders.runs(hashes)
        if (owner.worker, owner.dp_rank, run.tier, run.start, run.doubtful) == (worker, rank, tier, 0, False)
    ]
    return max(ends, default=0)


def publish(indexer: Indexer, engine: ScriptedEngine, *events: object, worker: str = "w") -> None:
    """One batch, and wait until it was applied."""
    seq = engine.batch(batch(*events))
    indexer.wait_seq(worker, seq)


# Order, gaps, restart, clear


def test_a_gap_whose_replay_never_answers_makes_the_holder_partial_and_is_counted(indexer: Indexer) -> None:
    silent: list[int] = []

    def first_only(start: int, engine: ScriptedEngine) -> Sequence[Frames]:
        silent.append(start)
        return list(honest(start, engine)) if len(silent) == 1 else []

    with ScriptedEngine(script=first_only) as engine:
        indexer.follow("w", engine)
        for name in (1, 2, 3):
            engine.batch(batch(stored([name], parent=name - 1 or None)))
        for name in (4, 5):
            engine.batch(batch(stored([name], parent=name - 1)), send=False)
        engine.batch(batch(stored([6], parent=5)))
        indexer.wait_seq("w", 5)
        assert indexer.matched([1, 2, 3, 4, 5, 6]) == {("w", 0): 3}
        counters = indexer.stream("w").counters
        assert (counters.gaps, counters.replay_failures) == (1, 1)
        assert indexer.state("w").partial == "sequences 3 to 4 are lost"


def test_a_new_process_holds_nothing_of_the_old_one_s_ram_and_the_store_outlives_both(
    indexer: Indexer,
) -> None:
    with ScriptedEngine(replay=None) as old:
        indexer.follow("w", old, replay=False)
        publish(indexer, old, stored([1, 2, 3]))
        publish(indexer, old, placeholder([1, 2, 3]), placeholder([1, 2], "STORAGE"))
        assert held(indexer, [1, 2, 3], Tier.RAM) == 3
    with ScriptedEngine(events=old.events, replay=None) as new:
        new.wait_for_subscriber()
        publish(indexer, new, stored([9]))
        assert (held(indexer, [1]), held(indexer, [1], Tier.RAM)) == (0, 0)
        assert held(indexer, [1, 2, 3], Tier.STORAGE) == 2


@pytest.mark.parametrize(
    "bad",
    [
        stored([7, 7], tokens_of([7, 7])),
        stored([7], parent=7),
        stored([101, 101], tokens_of([101, 101]), parent=7),
        stored([101], parent=101),
    ],
)
def test_an_event_that_contradicts_itself_costs_itself_only(indexer: Indexer, bad: object) -> None:
    names = list(range(1, 51))
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        publish(indexer, engine, stored(names))
        publish(indexer, engine, bad)
        assert indexer.state("w").totals["malformed_events"] == 1
        assert indexer.matched([*names, 101]) == {("w", 0): 50}
        publish(indexer, engine, stored([51], parent=50))
        assert indexer.matched([*names, 51]) == {("w", 0): 51}


def test_a_clear_empties_the_hbm_of_its_own_rank_and_of_nobody_else(indexer: Indexer) -> None:
    with ScriptedEngine() as first, ScriptedEngine() as second, ScriptedEngine() as other:
        indexer.follow("w", first, second)
        indexer.follow("other", other)
        first.batch(batch(stored([1, 2]), placeholder([1, 2]), placeholder([1], "STORAGE")))
        second.batch(batch(stored([1, 2])))
        other.batch(batch(stored([1, 2])))
        for worker, rank in (("w", 0), ("w", 1), ("other", 0)):
            indexer.wait_seq(worker, 0, rank)
        first.batch(batch(cleared()))
        indexer.wait_seq("w", 1)
        assert (held(indexer, [1, 2]), held(indexer, [1, 2], rank=1)) == (0, 2)
        assert held(indexer, [1, 2], worker="other") == 2
        assert held(indexer, [1, 2], Tier.STORAGE) == 1
        assert held(indexer, [1, 2], Tier.RAM) == 0  # in doubt: the clear does not say whether it went too
        assert indexer.holders.index.counts(indexer.state("w").slot).doubtful_ram == 2


def test_a_block_with_two_copies_stays_until_the_second_is_removed(indexer: Indexer) -> None:
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        publish(indexer, engine, stored([1, 2, 3]), stored([3], parent=2))
        publish(indexer, engine, removed([3]))
        assert held(indexer, [1, 2, 3]) == 3
        publish(indexer, engine, removed([3]))
        assert held(indexer, [1, 2, 3]) == 2
        publish(indexer, engine, stored([3], parent=2))
        publish(indexer, engine, cleared())
        publish(indexer, engine, stored([1, 2, 3]))
        publish(indexer, engine, removed([3]))
        assert held(indexer, [1, 2, 3]) == 2


def test_nothing_from_before_a_clear_is_found_once_a_recovery_is_over_whoever_asks_meanwhile(
    indexer: Indexer,
) -> None:
    with ScriptedEngine() as engine:
        for first in range(1, 1001, 10):
            engine.batch(batch(stored(list(range(first, first + 10)), parent=first - 1 or None)))
        engine.batch(batch(cleared()))
        last = engine.batch(batch(stored([1001, 1002, 1003])))
        indexer.follow("w", engine)  # returns when the recovery is over
        for start in range(1, 1001, 50):
            assert indexer.matched(list(range(1, start + 50))) == {}
        assert indexer.matched([1001, 1002, 1003]) == {("w", 0): 3}
        # Asked all the time while another connection recovers the same history.
        indexer.subscriber.remove(WorkerId("w"))
        indexer.holders.unregister(WorkerId("w"))
        asked: list[bool] = []

        def recovered() -> bool:
            state = indexer.holders.workers()[WorkerId("w")].ranks[0]
            over = state.seq == last  # before the look, so that a hit after it is one after the recovery
            hit = indexer.matched([1, 2, 3]) != {}
            asked.append(over and hit)
            return over

        indexer.holders.register(WorkerId("w"), MODEL, 1)
        indexer.subscriber.add([RankEndpoints(WorkerRank(WorkerId("w"), 0), engine.events, engine.replay)])
        eventually_now(recovered, "the recovery")
        assert not any(asked)


# Wire format


def test_whole_numbers_of_both_signs_and_bytes_are_names_of_their_own_in_each_worker(
    indexer: Indexer,
) -> None:
    big, raw = 2**64 - 3, b"\x00" * 24 + (2**64 - 3).to_bytes(8, "big")
    with ScriptedEngine() as numbers, ScriptedEngine() as strings:
        indexer.follow("numbers", numbers)
        indexer.follow("strings", strings)
        tokens = tokens_of([1, 2])
        publish(indexer, numbers, stored([big, -3], tokens), worker="numbers")
        publish(indexer, strings, stored([raw, b"\x07" * 32], tokens), worker="strings")
        assert indexer.matched([1, 2]) == {("numbers", 0): 2, ("strings", 0): 2}
        publish(indexer, strings, removed([big, -3]), worker="strings")
        publish(indexer, numbers, removed([raw]), worker="numbers")
        assert indexer.matched([1, 2]) == {("numbers", 0): 2, ("strings", 0): 2}
        publish(indexer, numbers, removed([-3]), worker="numbers")
        publish(indexer, strings, removed([raw, b"\x07" * 32]), worker="strings")
        assert indexer.matched([1, 2]) == {("numbers", 0): 1}
        publish(indexer, numbers, removed([big]), worker="numbers")
        assert indexer.matched([1, 2]) == {}


def test_arrays_of_other_versions_and_torn_messages_cost_nothing_but_themselves(indexer: Indexer) -> None:
    longer = [
        *as_array(stored([1], extra_keys=[None], group=0, kind="full_attention")),
        None,
        "LOCAL",
        {"a": 1},
    ]
    shorter = ["BlockStored", [2], 1, tokens_of([2]), BLOCK]
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        publish(indexer, engine, longer, ["BlockMoved", [1], 3], shorter)
        assert held(indexer, [1, 2]) == 2
        assert indexer.state("w").totals["unknown_events"] == 1
        whole = batch(stored([3], parent=2))
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            seq = engine.batch(whole[:length])
            indexer.wait_seq("w", seq)
        assert indexer.state("w").totals["malformed_batches"] == 4
        assert held(indexer, [1, 2, 3]) == 2
        publish(indexer, engine, stored([3], parent=2))
        assert held(indexer, [1, 2, 3]) == 3


@pytest.mark.parametrize("medium", ["CPU", "cpu", "CPU_PINNED"])
def test_an_offloaded_block_counts_as_ram_by_its_name_alone_and_never_begins_a_prompt(
    indexer: Indexer, medium: str
) -> None:
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        publish(indexer, engine, placeholder([8], medium))
        assert indexer.matched([8]) == {}
        publish(indexer, engine, stored([1, 2]))
        publish(indexer, engine, placeholder([1, 2], medium), stored([1], medium="TAPE"))
        publish(indexer, engine, removed([1, 2]))
        assert (held(indexer, [1, 2]), held(indexer, [1, 2], Tier.RAM)) == (0, 2)
        assert indexer.state("w").totals["unknown_medium_events"] == 1
        publish(indexer, engine, stored([3], medium=None), stored([8], parent=3))
        assert (held(indexer, [3, 8]), held(indexer, [3, 8], Tier.RAM)) == (2, 0)


WINDOW = stored([3, 4, 5], tokens_of([1, 2, 3, 4, 5]), group=1, kind="sliding_window")
NAMELESS = stored([5], tokens_of([1, 2, 3, 4, 5]), group=2)
LINEAR = [stored([5], tokens_of([1, 2, 3, 4, 5]), group=group, kind="mamba") for group in (0, 1, 2)]


@pytest.mark.parametrize("order", list(itertools.permutations([DENSE, WINDOW, NAMELESS])))
def test_only_a_dense_group_is_held_whatever_the_order_of_groups(
    indexer: Indexer, order: Sequence[object]
) -> None:
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        publish(indexer, engine, *order)
        assert indexer.matched([1, 2, 3, 4, 5]) == {("w", 0): 5}
        assert indexer.matched([3, 4, 5]) == {}
        publish(indexer, engine, removed([3], group=1), removed([5], group=2))
        assert indexer.matched([1, 2, 3, 4, 5]) == {("w", 0): 5}
        publish(indexer, engine, removed([4, 5], group=3))
        assert indexer.matched([1, 2, 3, 4, 5]) == {("w", 0): 3}
        # What a window still has of it makes no prefix, nor does one that looks whole.
        publish(indexer, engine, removed([1, 2, 3], group=3), stored([9], group=1, kind="sliding_window"))
        assert indexer.matched([1, 2, 3, 4, 5]) == {}
        assert indexer.matched([9]) == {}


@pytest.mark.parametrize("place", range(4))
def test_linear_groups_that_repeat_an_attention_block_s_hash_poison_nothing(
    indexer: Indexer, place: int
) -> None:
    events = [*LINEAR[:place], DENSE, *LINEAR[place:]]
    with ScriptedEngine() as first, ScriptedEngine() as second:
        indexer.follow("a", first)
        indexer.follow("b", second)
        publish(indexer, first, *events, worker="a")
        publish(indexer, first, stored([6], parent=5, group=3, kind="full_attention"), worker="a")
        publish(indexer, second, *LINEAR, worker="b")
        assert indexer.matched([1, 2, 3, 4, 5, 6]) == {("a", 0): 6}
        for unrelated in ([5, 6], [6], [7, 8]):
            assert indexer.matched(unrelated) == {}


# Keys


def test_workers_with_hash_seeds_of_their_own_both_hold_the_same_prompt(indexer: Indexer) -> None:
    tokens = tokens_of([1, 2, 3])
    with ScriptedEngine() as first, ScriptedEngine() as second:
        indexer.follow("a", first)
        indexer.follow("b", second)
        publish(indexer, first, stored([71, 72, 73], tokens), worker="a")
        publish(indexer, second, stored([73, 71, 99], tokens), worker="b")
        assert indexer.matched([1, 2, 3]) == {("a", 0): 3, ("b", 0): 3}
        publish(indexer, first, removed([73]), worker="a")
        assert indexer.matched([1, 2, 3]) == {("a", 0): 2, ("b", 0): 3}


def test_an_adapter_is_known_by_its_name_once_and_is_no_image_and_no_salt(indexer: Indexer) -> None:
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        publish(
            indexer,
            engine,
            stored([11, 12], tokens_of([1, 2]), lora_name="a1", extra_keys=[["a1"], ["a1"]]),
            stored([13], tokens_of([3]), lora_name=None, lora_id=7),
            stored([14], tokens_of([4]), lora_name="a1", extra_keys=[["a1", ["image", 0], "salt"]]),
        )
        assert (held(indexer, [1, 2], lora="a1"), held(indexer, [1, 2])) == (2, 0)
        assert held(indexer, [1, 2], keys=["a1"]) == 0
        assert (held(indexer, [3]), held(indexer, [3], lora="a1")) == (0, 0)
        for keys in ([], ["salt"]):
            assert held(indexer, [4], lora="a1", keys=keys) == 0  # the image is part of it


def test_what_the_base_model_computed_is_cold_for_an_adapter_and_its_removal_leaves_the_adapter_s(
    indexer: Indexer,
) -> None:
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        publish(indexer, engine, stored([1, 2]))
        assert (held(indexer, [1, 2]), held(indexer, [1, 2], lora="a1")) == (2, 0)
        publish(
            indexer, engine, stored([21, 22], tokens_of([1, 2]), lora_name="a1", extra_keys=[["a1"], ["a1"]])
        )
        publish(indexer, engine, removed([1, 2]))
        assert (held(indexer, [1, 2]), held(indexer, [1, 2], lora="a1")) == (0, 2)


def test_prompts_with_different_images_share_what_comes_before_the_image_only(indexer: Indexer) -> None:
    # Both images have the same placeholder tokens: blocks 1, 2 and 3 of both prompts are equal but for the keys.
    first = stored([1, 31, 32], tokens_of([1, 2, 3]), extra_keys=[None, [["image-a", 2]], [["image-a", -2]]])
    second = stored([1, 41, 42], tokens_of([1, 2, 3]), extra_keys=[None, [["image-b", 2]], [["image-b", -2]]])
    with ScriptedEngine() as engine, ScriptedEngine() as other:
        indexer.follow("w", engine)
        indexer.follow("other", other)
        publish(indexer, engine, first)
        publish(indexer, other, second, worker="other")
        assert indexer.matched([1, 2, 3]) == {("w", 0): 1, ("other", 0): 1}
        blocks = [
            {value for value, _ in indexer.holders.index.blocks(indexer.state(worker).slot)}
            for worker in ("w", "other")
        ]
        assert (len(blocks[0]), len(blocks[0] & blocks[1])) == (3, 1)


def test_a_salt_divides_and_an_absent_one_is_one_too(indexer: Indexer) -> None:
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        publish(indexer, engine, stored([1, 2], extra_keys=[["s1"], None]))
        assert held(indexer, [1, 2], keys=["s1"]) == 2
        assert (held(indexer, [1, 2], keys=["s2"]), held(indexer, [1, 2])) == (0, 0)
        publish(indexer, engine, stored([5, 6], tokens_of([1, 2])))
        assert (held(indexer, [1, 2]), held(indexer, [1, 2], keys=["s1"])) == (2, 2)
        publish(indexer, engine, removed([1, 2]))
        assert (held(indexer, [1, 2]), held(indexer, [1, 2], keys=["s1"])) == (2, 0)


def test_events_whose_parents_nobody_knows_cost_no_line_of_the_log_each(
    indexer: Indexer, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing(_start: int, _engine: ScriptedEngine) -> Sequence[Frames]:
        return [end()]

    with ScriptedEngine(script=nothing) as engine, caplog.at_level(logging.DEBUG):
        indexer.follow("w", engine)
        for name in range(100, 400):
            engine.batch(batch(stored([name], parent=name + 10_000)))
        indexer.wait_seq("w", 299)
        assert indexer.holders.index.counts(indexer.state("w").slot).detached == 300
        assert indexer.matched([100]) == {}
    assert len([record for record in caplog.records if record.name.startswith("indexer")]) < 5
