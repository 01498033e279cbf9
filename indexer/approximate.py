# SPDX-License-Identifier: Apache-2.0
"""What our own decisions must have put into the HBM of one rank: a guess that stands in where no events come.

The guess lies over a slot of the index as blocks of a cache group that no engine has, so that whoever asks the index
finds it like everything else, and what events said of the slot stays as it is beneath.

    a request is sent ─▶ its full blocks are there, most recently used
    more blocks than the rank has ─▶ the least recently used go; of one request the last ones first, as in vLLM
    not used for ``ttl_s`` ─▶ it goes

Blocks cost one entry of a dict each. Not for several threads at once.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from indexer.index import NO_SLOT, PrefixIndex

GUESS_GROUP = 0xFFFF
"""The cache group of these blocks; engines number theirs from 0. Snapshots leave it out."""


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """A prompt as it is hashed."""

    tokens: array[int]
    block_size: int
    model: str
    lora: str = ""
    first_block_keys: Sequence[str] = ()


class ApproximateBlocks:
    """The guess for one slot. ``capacity_blocks``: how many the rank has."""

    def __init__(self, index: PrefixIndex, slot: int, capacity_blocks: int, ttl_s: float) -> None:
        self.capacity_blocks = capacity_blocks
        self._index = index
        self._slot = slot
        self._ttl_s = ttl_s
        self._used_at_s: OrderedDict[int, float] = OrderedDict()
        """By request hash, least recently used first."""

    def __len__(self) -> int:
        return len(self._used_at_s)

    def sent(self, prompt: SentPrompt, now_s: float) -> None:
        """A request with this prompt goes to the rank. O(blocks of the prompt)."""
        packed = self._index.hash_blocks(
            prompt.tokens, prompt.block_size, prompt.model, prompt.lora, prompt.first_block_keys
        )
        hashes = struct.unpack(f"<{len(packed) // 8}Q", packed)[: self.capacity_blocks]
        events = [_stored(prompt, hashes, start, end) for start, end in self._missing(hashes)]
        if not self._apply(events):
            return
        # The end of a prompt is evicted before its beginning.
        for value in reversed(hashes):
            self._used_at_s[value] = now_s
            self._used_at_s.move_to_end(value)
        self._drop(len(self._used_at_s) - self.capacity_blocks)

    def expire(self, now_s: float) -> None:
        """Drop what was not used for long. O(dropped)."""
        count = 0
        for used_at_s in self._used_at_s.values():
            if used_at_s + self._ttl_s > now_s:
                break
            count += 1
        self._drop(count)

    def clear(self) -> None:
        """Drop everything: the cache is empty, or events tell of it again."""
        self._drop(len(self._used_at_s))

    def _missing(self, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Runs of blocks that are not known yet."""
        start: int | None = None
        for i, value in enumerate(hashes):
            if value in self._used_at_s:
                if start is not None:
                    yield start, i
                start = None
            elif start is None:
                start = i
        if start is not None:
            yield start, len(hashes)

    def _drop(self, count: int) -> None:
        if count <= 0:
            return
        oldest = list(islice(self._used_at_s, count))
        removal: dict[str, object] = {
            "type": "BlockRemoved",
            "block_hashes": oldest,
            "medium": None,
            "group_idx": GUESS_GROUP,
        }
        if self._apply([removal]):
            for value in oldest:
                del self._used_at_s[value]

    def _apply(self, events: Sequence[dict[str, object]]) -> bool:
        """Whether the index had room for it; what it has no room for is not guessed."""
        try:
            if events:
                self._index.apply([self._slot], 0, NO_SLOT, msgspec.msgpack.encode([0.0, events]))
        except MemoryError:
            return False
        return True


def _stored(prompt: SentPrompt, hashes: Sequence[int], start: int, end: int) -> dict[str, object]:
    """Blocks of the prompt as an engine would announce them, under our own hashes as names."""
    size = prompt.block_size
    extra_keys: list[list[str] | None] = [None] * (end - start)
    if start == 0:
        # As engines do it, the adapter stands first: the index takes it out by its place.
        extra_keys[0] = [*([prompt.lora] if prompt.lora else []), *prompt.first_block_keys]
    return {
        "type": "BlockStored",
        "block_hashes": hashes[start:end],
        "parent_block_hash": hashes[start - 1] if start else None,
        "token_ids": prompt.tokens[start * size : end * size].tolist(),
        "block_size": size,
        "lora_name": prompt.lora or None,
        "extra_keys": extra_keys,
        "group_idx": GUESS_GROUP,
    }
