# SPDX-License-Identifier: Apache-2.0
"""Blocks of an adapter's former weights are known, each once, and nothing else is taken for one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_ext.vllm.adapters.former import AdapterBlocks, Weights

OLD, NEW, OTHER = Weights("a", "p", "old"), Weights("a", "p", "new"), Weights("b", "p", "old")


def test_a_load_of_other_weights_gives_up_what_is_held_of_the_former_ones() -> None:
    blocks: AdapterBlocks[int, str] = AdapterBlocks()
    blocks.loaded(OLD)
    assert all(blocks.note(place, content, OLD) for place, content in ((1, "x"), (2, "y")))
    assert blocks.note(3, "z", OTHER)
    assert blocks.loaded(NEW) == [(1, "x"), (2, "y")]
    assert blocks.loaded(NEW) == []
    assert len(blocks) == 1


def test_a_load_of_the_same_weights_gives_up_nothing() -> None:
    blocks: AdapterBlocks[int, str] = AdapterBlocks()
    blocks.note(1, "x", OLD)
    assert blocks.loaded(OLD) == []
    assert len(blocks) == 1


def test_the_same_files_in_another_folder_are_other_weights_as_they_are_hashed_apart() -> None:
    blocks: AdapterBlocks[int, str] = AdapterBlocks()
    blocks.note(1, "x", OLD)
    assert blocks.loaded(Weights("a", "elsewhere", "old")) == [(1, "x")]


def test_a_block_that_is_stored_under_former_weights_is_of_no_use_and_not_held() -> None:
    blocks: AdapterBlocks[int, str] = AdapterBlocks()
    blocks.note(1, "x", OTHER)
    blocks.loaded(NEW)
    assert not blocks.note(1, "y", OLD)
    assert len(blocks) == 0


def test_what_was_evicted_or_cleared_is_not_given_up_again() -> None:
    blocks: AdapterBlocks[int, str] = AdapterBlocks()
    for place in (1, 2):
        blocks.note(place, "x", OLD)
    blocks.gone(1)
    blocks.gone(7)
    assert blocks.loaded(NEW) == [(2, "x")]
    blocks.note(3, "x", NEW)
    blocks.clear()
    assert blocks.loaded(OLD) == []


WEIGHTS = st.builds(Weights, st.sampled_from("ab"), st.just("p"), st.sampled_from(["1", "2", "3"]))
STEPS = st.lists(st.one_of(WEIGHTS, st.tuples(st.integers(0, 4), WEIGHTS)), max_size=30)


@given(STEPS)
def test_after_every_step_only_blocks_of_present_weights_are_held(
    steps: list[Weights | tuple[int, Weights]],
) -> None:
    blocks: AdapterBlocks[int, Weights] = AdapterBlocks()
    held: dict[int, Weights] = {}
    now: dict[str, Weights] = {}
    for step in steps:
        if isinstance(step, Weights):
            now[step.name] = step
            former = {place: of for place, of in held.items() if of.name == step.name and of != step}
            assert dict(blocks.loaded(step)) == former
            held = {place: of for place, of in held.items() if place not in former}
        else:
            place, weights = step
            useful = now.get(weights.name, weights) == weights
            assert blocks.note(place, weights, weights) == useful
            held.pop(place, None)
            if useful:
                held[place] = weights
        assert len(blocks) == len(held)
