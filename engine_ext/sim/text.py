# SPDX-License-Identifier: Apache-2.0
"""What the simulated model says: a function of the prompt's token ids alone.

The same prompt gives the same text on every worker, from every tier and after every preemption, so text
that differs from a cold run means that a request was changed or mixed up on its way.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

LETTERS = tuple(b"etaoin shrdlu cmfwyp vbgkq ")
"""Default output vocabulary: ids of ASCII letters and spaces in the built-in byte tokenizer."""


class OutputText:
    """The endless output of one prompt; token ``i`` costs O(1)."""

    __slots__ = ("_seed", "_vocabulary")

    def __init__(self, prompt: array[int], vocabulary: Sequence[int] = LETTERS) -> None:
        self._seed = hashlib.sha256(prompt.tobytes()).digest()
        self._vocabulary = vocabulary

    def token(self, index: int) -> int:
        """Token id at output position ``index``."""
        digest = hashlib.blake2b(index.to_bytes(4, "little"), key=self._seed, digest_size=8).digest()
        return self._vocabulary[int.from_bytes(digest, "little") % len(self._vocabulary)]


def natural_length(prompt: array[int]) -> int:
    """Tokens after which the model stops by itself where the client sets no limit: 16 to 127."""
    digest = hashlib.sha256(prompt.tobytes()).digest()
    return 16 + int.from_bytes(digest[:4], "little") % 112
