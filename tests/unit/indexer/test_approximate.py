# SPDX-License-Identifier: Apache-2.0
"""Blocks that only our own decisions vouch for, on both backends."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import kv_batches as kv
import pytest

from indexer.approximate import ApproximateBlocks, SentPrompt
from indexer.hashing import HashKey
from indexer.identity import Tier
from indexer.index import IndexLimits, PrefixIndex, open_index


class Rank:
    """A slot with a guess over it."""

    def __init__(self, index: PrefixIndex, capacity_blocks: int = 100, ttl_s: float = 60.0) -> None:
        self.index = index
        self.slot = index.open("m", False)
        self.guess = ApproximateBlocks(index, self.slot, capacity_blocks, ttl_s)

    def send(self, names: Sequence[int], now_s: float = 0.0, *, salt: str = "", lora: str = "") -> None:
        keys = (salt,) if salt else ()
        self.guess.sent(SentPrompt(kv.prompt(names), kv.BLOCK, "m", lora, keys), now_s)

    def events(self, *events: object) -> None:
        self.index.apply([self.slot], 0, self.index.open("m", False), kv.batch(*events))

    def held(self, names: Sequence[int], *, salt: str = "", lora: str = "") -> int:
        """Leading blocks in HBM."""
        hashes = self.index.hash_blocks(kv.prompt(names), kv.BLOCK, "m", lora, [salt] if salt else [])
        runs = [run for run in self.index.match(hashes) if run[:3] == (self.slot, Tier.HBM, 0)]
        return runs[0][3] if runs else 0


@pytest.fixture(params=["native", "reference"])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    return open_index(HashKey(kv.KEY_BYTES), IndexLimits(), request.param)


def test_a_prompt_that_was_sent_counts_as_held(index: PrefixIndex) -> None:
    rank = Rank(index)
    rank.send([1, 2, 3])
    assert (rank.held([1, 2, 3, 4]), rank.held([2, 3]), len(rank.guess)) == (3, 0, 3)


def test_a_longer_prompt_adds_what_is_new_behind_what_is_known(index: PrefixIndex) -> None:
    rank = Rank(index)
    rank.send([1, 2])
    rank.send([1, 2, 3, 4])
    assert (rank.held([1, 2, 3, 4]), len(rank.guess)) == (4, 4)
    assert index.check() == ""


def test_the_last_incomplete_block_does_not_count(index: PrefixIndex) -> None:
    rank = Rank(index)
    tokens = array("I", [*kv.tokens_of([1]), 7])
    rank.guess.sent(SentPrompt(tokens, kv.BLOCK, "m"), 0.0)
    assert len(rank.guess) == 1


def test_salt_and_adapter_keep_guesses_apart(index: PrefixIndex) -> None:
    rank = Rank(index)
    rank.send([1, 2], salt="s")
    rank.send([1, 2], lora="a", salt="a")
    assert (rank.held([1, 2], salt="s"), rank.held([1, 2], lora="a", salt="a")) == (2, 2)
    assert (rank.held([1, 2]), rank.held([1, 2], lora="a")) == (0, 0)


def test_more_than_the_rank_has_is_dropped_least_recently_used_first(index: PrefixIndex) -> None:
    rank = Rank(index, capacity_blocks=4)
    rank.send([1, 2])
    rank.send([3, 4])
    rank.send([1, 2])
    rank.send([5])
    # Of the oldest prompt its end went, as in the engine, which frees a request's blocks from the last to the first.
    assert (rank.held([1, 2]), rank.held([3, 4]), rank.held([5])) == (2, 1, 1)
    assert len(rank.guess) == 4


def test_of_a_prompt_longer_than_the_cache_the_beginning_is_kept(index: PrefixIndex) -> None:
    rank = Rank(index, capacity_blocks=2)
    rank.send([1, 2, 3])
    assert (rank.held([1, 2, 3]), len(rank.guess)) == (2, 2)


def test_a_block_that_is_not_used_for_long_goes_and_one_that_is_used_stays(index: PrefixIndex) -> None:
    rank = Rank(index, ttl_s=10.0)
    rank.send([1, 2], now_s=0.0)
    rank.send([3], now_s=0.0)
    rank.send([1], now_s=6.0)
    rank.guess.expire(10.0)
    assert (rank.held([1, 2]), rank.held([3]), len(rank.guess)) == (1, 0, 1)
    rank.guess.expire(16.0)
    assert (rank.held([1]), len(rank.guess)) == (0, 0)


def test_dropping_the_guess_leaves_what_events_said(index: PrefixIndex) -> None:
    rank = Rank(index)
    rank.events(kv.stored([1, 2]))
    rank.send([1, 2, 3])
    assert rank.held([1, 2, 3]) == 3
    rank.guess.clear()
    assert (rank.held([1, 2, 3]), len(rank.guess)) == (2, 0)
    assert index.check() == ""


def test_an_engine_s_removal_does_not_touch_the_guess(index: PrefixIndex) -> None:
    rank = Rank(index)
    rank.events(kv.stored([1]))
    rank.send([1])
    rank.events(kv.removed([1]))
    assert rank.held([1]) == 1
