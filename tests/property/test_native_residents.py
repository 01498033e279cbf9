# SPDX-License-Identifier: Apache-2.0
"""The prompts in flight, in native code, in Python and simply counted, must never differ."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from indexer import _core
from router.plan.residents import Residents

ROWS = 24
rows = st.integers(0, 3)
sizes = st.sampled_from([16, 16, 64])
# Few branches, so that prompts share beginnings and part anywhere.
prompts = st.lists(st.sampled_from([0, 0, 0, 1]), max_size=12)


def chain(prompt: list[int]) -> list[int]:
    """A hash stands for its block and all before it."""
    return [
        *accumulate(
            prompt, lambda before, block: (before * 6_364_136_223_846_793_005 + block + 1) % 2**64, initial=7
        )
    ][1:]


class Live(NamedTuple):
    row: int
    size: int
    blocks: list[int]
    native: int
    plain: int


class ResidentsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.native, self.plain = _core.Residents(), Residents[int]()
        self.live: list[Live] = []
        self.ready_s: dict[tuple[int, int, int], float] = {}
        """Of each (row, size, block) that is there, the latest."""

    @rule(row=rows, size=sizes, prompt=prompts, ready=st.integers(-1, 4))
    def begin(self, row: int, size: int, prompt: list[int], ready: int) -> None:
        blocks = chain(prompt)
        packed = array("Q", blocks).tobytes()
        ready_s = ready if ready >= 0 else -math.inf
        numbers = [kind.begin(row, size, packed, ready_s) for kind in (self.native, self.plain)]
        self.live.append(Live(row, size, blocks, *numbers))
        for block in blocks:
            before_s = self.ready_s.get((row, size, block), -math.inf)
            self.ready_s[row, size, block] = max(before_s, ready_s)

    @rule(size=sizes, prompt=prompts, ends=st.tuples(prompts, prompts), first=st.integers(0, ROWS))
    def begin_everywhere(
        self, size: int, prompt: list[int], ends: tuple[list[int], list[int]], first: int
    ) -> None:
        for row in range(ROWS):
            self.begin(row, size, prompt + ends[row >= first], ready=row)

    @rule(chance=st.randoms(use_true_random=False))
    def end(self, chance: object) -> None:
        if self.live:
            one = self.live.pop(chance.randrange(len(self.live)))  # type: ignore[attr-defined]
            self.native.end(one.native)
            self.plain.end(one.plain)
            there = {(each.row, each.size, block) for each in self.live for block in each.blocks}
            self.ready_s = {block: at_s for block, at_s in self.ready_s.items() if block in there}

    @rule(size=sizes, prompt=prompts)
    def ask(self, size: int, prompt: list[int]) -> None:
        blocks = chain(prompt)
        packed = array("Q", blocks).tobytes()
        counted = {}
        for row in range(ROWS):
            ready_s = [at_s for block in blocks if (at_s := self.ready_s.get((row, size, block))) is not None]
            if ready_s:
                counted[row] = (len(ready_s), ready_s[-1])
        assert self.plain.leading(size, packed) == counted
        native = self.native.leading(size, packed)
        assert {row: (shared, ready_s) for row, shared, ready_s in native} == counted

    @invariant()
    def counts_are_those_of_distinct_blocks(self) -> None:
        counted: Counter[int] = Counter()
        for row, size, _ in {(one.row, one.size, block) for one in self.live for block in one.blocks}:
            counted[row] += size
        for row in range(ROWS):
            assert self.native.tokens(row) == self.plain.tokens(row) == counted[row]
        assert self.native.nodes == self.plain.nodes
        assert self.native.prompts == self.plain.prompts == len(self.live)
        assert self.native.nodes <= len({(one.size, block) for one in self.live for block in one.blocks})

    def teardown(self) -> None:
        for one in self.live:
            self.native.end(one.native)
            self.plain.end(one.plain)
        for residents in (self.native, self.plain):
            assert residents.nodes == residents.prompts == 0
            assert not any(residents.tokens(row) for row in range(ROWS))


TestResidentsMachine = ResidentsMachine.TestCase
TestResidentsMachine.settings = settings(max_examples=100, stateful_step_count=40)
