# SPDX-License-Identifier: Apache-2.0
"""Random operations on the native index and on the plain-dict one, compared after each. A seed gives one course.

Unlike the Hypothesis machine it keeps no history to shrink, so it goes on for millions of operations and lets tables
grow, be swept and wrap around. What differs names the seed and the number of the operation.
"""

from __future__ import annotations

from random import Random

import kv_batches as kv

from indexer.hashing import HashKey
from indexer.holders import APPLY_COUNTS
from indexer.index import IndexLimits, PrefixIndex, open_index

KEY = HashKey(kv.KEY_BYTES)
COUNTS = (*APPLY_COUNTS[:-1], "malformed_batch")
TOTALS = ("hbm", "ram", "storage", "doubtful_ram", "unidentified", "detached", "remembered", "block_size")
LIMITS = (IndexLimits(6, 5, 4), IndexLimits(100, 100, 100), IndexLimits())
CHAINS, CHAIN_BLOCKS = 24, 40
MEDIA = ("GPU", "GPU", "GPU", "CPU", "cpu_pinned", "STORAGE", None, "TAPE")
ODD = (
    {"type": "SomethingNew", "a": [1]},
    ["AnotherNew", 1],
    {"block_hashes": [1]},
    7,
    [],
    {"type": "BlockStored"},
)
SLOTS = 10
COMPARE_ALL_EVERY = 2_000


class Differ:
    """One world of both indexes. ``operations`` counts events applied, questions and changes of slots."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.operations = 0
        self._random = Random(seed)
        limits = self._random.choice(LIMITS)
        self._native: PrefixIndex = open_index(KEY, limits, "native")
        self._reference: PrefixIndex = open_index(KEY, limits, "reference")
        self._stores = [self._open() for _ in range(2)]
        self._slots = [self._open() for _ in range(SLOTS)]
        self._compare_at = COMPARE_ALL_EVERY

    def run(self, operations: int) -> None:
        """Go on for at least so many operations.

        Raises:
            AssertionError: the indexes differ, or the native one breaks an invariant.
        """
        end = self.operations + operations
        while self.operations < end:
            self._step()
            if self.operations >= self._compare_at:
                self._compare_all()
                self._compare_at = self.operations + COMPARE_ALL_EVERY
        self._compare_all()

    def _step(self) -> None:
        drawn = self._random.random()
        if drawn < 0.96:
            self._apply()
        elif drawn < 0.97:  # rarely: the reference walks all that all slots hold
            self.operations += 1
            self._match()
        elif drawn < 0.98:
            self.operations += 1
            self._replace()
        elif drawn < 0.985:
            self.operations += 1
            slot = self._random.choice(self._slots)
            self._native.clear(slot)
            self._reference.clear(slot)
        else:
            self.operations += 1
            self._native.sweep(self._random.randrange(1, 500))

    def _apply(self) -> None:
        events = [self._event() for _ in range(self._random.choice((1, 1, 2, 5)))]
        self.operations += len(events)
        rank = self._random.choice((None, None, 0, 1, 9))
        payload = kv.batch(*events, rank=rank)
        if self._random.random() < 0.01:
            payload = payload[: self._random.randrange(len(payload))]
        ranks = self._random.sample(self._slots, 2)
        store = self._random.choice(self._stores)
        left = self._native.apply(ranks, 0, store, payload)
        right = self._reference.apply(ranks, 0, store, payload)
        for name in COUNTS:
            self._require(getattr(left, name) == getattr(right, name), f"count {name} of {payload!r}")

    def _match(self) -> None:
        chain, at = self._random.randrange(CHAINS), self._random.randrange(1, CHAIN_BLOCKS)
        tokens = kv.prompt(_names(chain, 0, at))
        lora = self._random.choice(("", "", "salt", "adapter"))
        keys = self._random.choice(([], [], ["salt"]))
        query = self._native.hash_blocks(tokens, kv.BLOCK, "m", lora, keys)
        self._require(
            query == self._reference.hash_blocks(tokens, kv.BLOCK, "m", lora, keys), "hashes of a prompt"
        )
        self._require(self._native.match(query) == self._reference.match(query), "runs of a prompt")

    def _replace(self) -> None:
        """A slot goes, another comes; rarely a store."""
        among = self._stores if self._random.random() < 0.1 else self._slots
        at = self._random.randrange(len(among))
        self._native.retire(among[at])
        self._reference.retire(among[at])
        among[at] = self._open()

    def _open(self) -> int:
        plain = self._random.random() < 0.3
        left, right = self._native.open("m", plain), self._reference.open("m", plain)
        self._require(left == right, "the number of a slot")
        return left

    def _event(self) -> object:
        random = self._random
        drawn = random.random()
        if drawn < 0.02:
            return random.choice(ODD)
        if drawn < 0.022:
            return kv.cleared()
        chain = random.randrange(CHAINS)
        start = random.choice((0, 0, random.randrange(CHAIN_BLOCKS)))
        names = _names(chain, start, random.randrange(start, min(start + 12, CHAIN_BLOCKS)) + 1)
        group = random.choice((None, None, None, 0, 1))
        if drawn < 0.35:
            event = kv.removed(names, random.choice(MEDIA), group)
        elif drawn < 0.5:
            event = kv.placeholder(names, random.choice(("CPU", "STORAGE")))
        else:
            event = self._stored(chain, start, names, group)
        return event if random.random() < 0.5 else kv.as_array(event)

    def _stored(
        self, chain: int, start: int, names: list[int | bytes], group: int | None
    ) -> dict[str, object]:
        random = self._random
        parent = _names(chain, start - 1, start)[0] if start else None
        tokens = None
        if random.random() < 0.02:  # the same name for another content, or a length that cannot be
            tokens = [random.randrange(100) for _ in range(random.randrange(kv.BLOCK * len(names) + 2))]
        salted: list[object] = [["salt"] if not start else None, *[None] * (len(names) - 1)]
        return kv.stored(
            names,
            tokens,
            parent,
            medium=random.choice(MEDIA),
            extra_keys=random.choice((None, None, None, salted)),
            lora_name=random.choice((None, None, None, "salt", "adapter")),
            lora_id=random.choice((None, None, None, 3)),
            group=group,
            kind=random.choice((None, None, None, "full_attention", "sliding_window")),
        )

    def _compare_all(self) -> None:
        problem = self._native.check()
        self._require(not problem, problem)
        for slot in (*self._slots, *self._stores):
            same = sorted(self._native.blocks(slot)) == sorted(self._reference.blocks(slot))
            self._require(same, f"blocks of slot {slot}")
            left, right = self._native.counts(slot), self._reference.counts(slot)
            for name in TOTALS:
                self._require(getattr(left, name) == getattr(right, name), f"{name} of slot {slot}")

    def _require(self, condition: bool, what: str) -> None:
        assert condition, f"seed {self.seed}, operation {self.operations}: {what}"


def _names(chain: int, start: int, end: int) -> list[int | bytes]:
    """Names of blocks: integers, or bytes in every third chain."""
    numbers = range(chain * 1000 + start, chain * 1000 + end)
    return [number.to_bytes(4, "big") * 8 for number in numbers] if chain % 3 == 0 else list(numbers)
