# SPDX-License-Identifier: Apache-2.0
"""The prompts in flight at each rank, as a prefix tree: what a new prompt shares with them is, or will be, there.

It needs no room in HBM of its own, and it need not be computed (``router.plan.speculation``).

A block hash stands for its block and all before it, so two prompts that are equal at some depth are equal before, and
where they part is found by bisection. Nodes are runs of blocks that the same requests go through; one is divided where
another prompt parts from it, and goes with its last request. Prompts in blocks of another size have nothing in common.

Cost of ``begin``, ``end`` and ``leading``: O(nodes on the path x (log run + ranks of the node)), and the copy of a new
tail or of a divided run. The same in native code: ``indexer/native/plan/residents.hpp``.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Row = TypeVar("Row", bound=Hashable)


class Leading(NamedTuple):
    """Leading blocks of a prompt that a rank has in flight."""

    shared: int = 0
    ready_s: float = -math.inf
    """When the last request with all of them was, or will be, scheduled."""


NONE_LEADING = Leading()


@dataclass(slots=True, eq=False)
class _Node(Generic[Row]):
    """The root of a tree has neither blocks nor rows."""

    parent: _Node[Row] | None
    run: array[int]
    rows: Counter[Row] = field(default_factory=Counter)
    ready_s: dict[Row, float] = field(default_factory=dict)
    """The latest of the prompts that went through it since a rank came; never later than of the node above."""
    children: dict[int, _Node[Row]] = field(default_factory=dict)
    """By the hash of their first block."""


class Residents(Generic[Row]):
    """A tree per block size. ``Row`` names a rank."""

    def __init__(self) -> None:
        self._roots: dict[int, _Node[Row]] = {}
        self._prompts: dict[int, tuple[_Node[Row], Row, int]] = {}
        """Where each ends, at the end of a run; its rank and its block size."""
        self._tokens: Counter[Row] = Counter()
        self._next_id = 0

    def begin(self, row: Row, block_size: int, hashes: bytes, ready_s: float) -> int:
        """A prompt is at the rank from now on; returns the number to end it by.

        ``hashes``: of its full blocks, 8 bytes each. ``ready_s``: when those sent behind it will find its
        blocks; minus infinity: they will not.
        """
        blocks = array("Q", hashes)
        node, depth = self._roots.setdefault(block_size, _Node(None, array("Q"))), 0
        while depth < len(blocks):
            below = node.children.get(blocks[depth])
            if below is None:
                below = node.children[blocks[depth]] = _Node(node, blocks[depth:])
            else:
                common = _common(below.run, blocks, depth)
                if common < len(below.run):
                    below = _divided(node, below, common)
            if not below.rows[row]:
                self._tokens[row] += len(below.run) * block_size
            below.rows[row] += 1
            below.ready_s[row] = max(ready_s, below.ready_s.get(row, -math.inf))
            node, depth = below, depth + len(below.run)
        number, self._next_id = self._next_id, self._next_id + 1
        self._prompts[number] = node, row, block_size
        return number

    def end(self, number: int) -> None:
        """It is gone.

        Raises:
            KeyError: no such prompt is in flight.
        """
        node, row, block_size = self._prompts.pop(number)
        while node.parent is not None:
            parent = node.parent
            node.rows[row] -= 1
            if not node.rows[row]:
                del node.rows[row], node.ready_s[row]
                self._tokens[row] -= len(node.run) * block_size
            if not node.rows:
                del parent.children[node.run[0]]
            node = parent
        if not self._tokens[row]:
            del self._tokens[row]
        if not node.children and self._roots.get(block_size) is node:
            del self._roots[block_size]

    def leading(self, block_size: int, hashes: bytes) -> dict[Row, Leading]:
        """By rank, how many leading blocks of a prompt are also those of one in flight there; zeros left out."""
        found: dict[Row, Leading] = {}
        blocks = memoryview(hashes).cast("Q")
        node, depth = self._roots.get(block_size), 0
        while node is not None and depth < len(blocks):
            node = node.children.get(blocks[depth])
            if node is None:
                break
            common = _common(node.run, blocks, depth)
            depth += common
            for row in node.rows:
                found[row] = Leading(depth, node.ready_s[row])
            if common < len(node.run):
                break
        return found

    def tokens(self, row: Row) -> int:
        """Distinct prompt tokens in flight at the rank."""
        return self._tokens[row]

    @property
    def prompts(self) -> int:
        """Those in flight."""
        return len(self._prompts)

    @property
    def nodes(self) -> int:
        """Runs of the trees."""
        return sum(_count(root) - 1 for root in self._roots.values())


def _common(run: array[int], blocks: array[int] | memoryview[int], depth: int) -> int:
    """Blocks that both begin with, of which the first is known to be equal."""
    equal, different = 1, min(len(run), len(blocks) - depth) + 1
    while different - equal > 1:
        middle = (equal + different) // 2
        if run[middle - 1] == blocks[depth + middle - 1]:
            equal = middle
        else:
            different = middle
    return equal


def _divided(parent: _Node[Row], lower: _Node[Row], blocks: int) -> _Node[Row]:
    """The first blocks of a node, as one of its own above it; prompts that end with the run still end with ``lower``."""
    upper = _Node(parent, lower.run[:blocks], Counter(lower.rows), dict(lower.ready_s))
    parent.children[upper.run[0]] = upper
    lower.parent, lower.run = upper, lower.run[blocks:]
    upper.children[lower.run[0]] = lower
    return upper


def _count(node: _Node[Row]) -> int:
    return 1 + sum(_count(child) for child in node.children.values())
