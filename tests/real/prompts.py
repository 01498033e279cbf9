# SPDX-License-Identifier: Apache-2.0
"""Prompts nobody else has sent: the engines of a test run keep their caches from test to test."""

from __future__ import annotations

import random

FIRST_PLAIN_TOKEN = 10
"""Below it the small model's tokenizer has its special tokens."""
VOCABULARY = 1024


def token_ids(count: int) -> list[int]:
    """`count` random token ids, none of them special."""
    rng = random.SystemRandom()
    return [rng.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(count)]
