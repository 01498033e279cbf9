# SPDX-License-Identifier: Apache-2.0
"""What the simulated model says: a function of the prompt's token ids alone.

The same prompt gives the same text on every worker, from every tier and after every preemption, so text
that differs from a cold run means that a request was changed or mixed up on its way.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

LETTERS = tuple(b"etaoin shrdlu cmfwyp vbgkq ")
"""Default output vocabulary: ids of ASCII letters and spaces in the built-in byte tokenizer."""


_DRAWN_AT_ONCE = 16
"""Tokens per keyed hash of 64 bytes: four bytes for each."""


class OutputText:
    """The endless output of one prompt; O(1) per token wherever it begins."""

    __slots__ = ("_drawn", "_drawn_at", "_seed", "_vocabulary")

    def __init__(self, prompt: array[int], vocabulary: Sequence[int] = LETTERS) -> None:
        self._seed = hashlib.sha256(prompt.tobytes()).digest()
        self._vocabulary = vocabulary
        self._drawn: list[int] = []
        self._drawn_at = -1

    def token(self, index: int) -> int:
        """Token id at output position ``index``."""
        at, place = divmod(index, _DRAWN_AT_ONCE)
        if at != self._drawn_at:
            self._drawn, self._drawn_at = self._draw(at, at + 1), at
        return self._drawn[place]

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at output positions ``start`` to ``end``."""
        if end - start <= 1:
            return [self.token(start)] if start < end else []
        first = start // _DRAWN_AT_ONCE
        drawn = self._draw(first, (end - 1) // _DRAWN_AT_ONCE + 1)
        skipped = first * _DRAWN_AT_ONCE
        return drawn[start - skipped : end - skipped]

    def _draw(self, first: int, end: int) -> list[int]:
        drawn = array("I")
        for number in range(first, end):
            drawn.frombytes(hashlib.blake2b(number.to_bytes(4, "little"), key=self._seed).digest())
        if sys.byteorder == "big":
            drawn.byteswap()
        vocabulary, size = self._vocabulary, len(self._vocabulary)
        return [vocabulary[value % size] for value in drawn]


def natural_length(prompt: array[int]) -> int:
    """Tokens after which the model stops by itself where the client sets no limit: 16 to 127."""
    digest = hashlib.sha256(prompt.tobytes()).digest()
    return 16 + int.from_bytes(digest[:4], "little") % 112
