# SPDX-License-Identifier: Apache-2.0
"""Seeded traces of the same shape as Mooncake's conversation trace, for machines that do not have it.

What is imitated, with the figure of the recorded trace: every request starts with block 0 and 61 % share no
more than that; the rest continue a conversation, two minutes later in the median, with 2 new blocks in the
median and 20 at the 90th percentile; input tokens 6,909 in the median, 12,035 in the mean, 126,195 at most;
output tokens 350 in the median, 343 in the mean; 3.4 requests a second, binned to 3 seconds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from router.replay.traces import MOONCAKE_BLOCK_TOKENS, TraceRow

_BIN_MS = 3000
_LARGEST_INPUT_TOKENS = 126_195
_SMALLEST_INPUT_TOKENS = 890


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """Knobs of the generator; the defaults give the shape of the recorded trace."""

    rate_per_s: float = 3.4
    conversations_per_request: float = 0.57
    """New conversations per request; a short first turn makes its second look new as well."""
    second_turn_short: float = 0.42
    """Probability that a conversation has a second turn when its first is below the median length."""
    second_turn_long: float = 0.20
    next_turn: float = 0.66
    """Probability of each turn after that."""
    gap_median_s: float = 123.0
    gap_sigma: float = 1.1
    first_input_median_tokens: float = 5264.0
    first_input_sigma: float = 1.23
    message_median_tokens: float = 450.0
    message_sigma: float = 2.1
    largest_message_tokens: int = 30_000


@dataclass(slots=True)
class _Conversation:
    """The part of the last prompt that the next one repeats."""

    input_tokens: int
    output_tokens: int
    block_ids: list[int]
    turns: int


def generate_rows(seed: int, duration_s: float, shape: TraceShape | None = None) -> list[TraceRow]:
    """Rows of a trace of that length, in order of arrival. Equal arguments give equal rows."""
    shape = shape or TraceShape()
    # Trace generation must be repeatable, so the generator has a source of its own.
    return list(_rows(random.Random(seed), duration_s, shape))


def _rows(rng: random.Random, duration_s: float, shape: TraceShape) -> Iterator[TraceRow]:
    """Conversations start as a Poisson process; their next turns wait in a heap by time."""
    next_id = 1
    due: list[tuple[float, int, _Conversation | None]] = []
    number = 0
    start_s = 0.0
    while True:
        start_s += rng.expovariate(shape.rate_per_s * shape.conversations_per_request)
        if start_s >= duration_s:
            break
        due.append((start_s, number, None))
        number += 1
    heapq.heapify(due)
    while due:
        at_s, _, earlier = heapq.heappop(due)
        turn, next_id = _turn(rng, shape, earlier, next_id)
        yield TraceRow(
            timestamp=int(at_s * 1000) // _BIN_MS * _BIN_MS,
            input_length=turn.input_tokens,
            output_length=turn.output_tokens,
            hash_ids=turn.block_ids,
        )
        if rng.random() < _goes_on(shape, turn):
            again_s = at_s + rng.lognormvariate(math.log(shape.gap_median_s), shape.gap_sigma)
            if again_s < duration_s:
                heapq.heappush(due, (again_s, number, turn))
                number += 1


def _goes_on(shape: TraceShape, turn: _Conversation) -> float:
    """Probability of another turn. Long first prompts are mostly documents asked about once."""
    if turn.turns > 1:
        return shape.next_turn
    short = turn.input_tokens < shape.first_input_median_tokens
    return shape.second_turn_short if short else shape.second_turn_long


def _turn(
    rng: random.Random, shape: TraceShape, earlier: _Conversation | None, next_id: int
) -> tuple[_Conversation, int]:
    """One turn and the next unused block id."""
    if earlier is None:
        length = rng.lognormvariate(math.log(shape.first_input_median_tokens), shape.first_input_sigma)
        kept, turns = [0], 1
    else:
        message = rng.lognormvariate(math.log(shape.message_median_tokens), shape.message_sigma)
        length = earlier.input_tokens + earlier.output_tokens + min(message, shape.largest_message_tokens)
        kept = earlier.block_ids[: earlier.input_tokens // MOONCAKE_BLOCK_TOKENS]
        turns = earlier.turns + 1
    tokens = round(min(max(length, _SMALLEST_INPUT_TOKENS), _LARGEST_INPUT_TOKENS))
    blocks = -(-tokens // MOONCAKE_BLOCK_TOKENS)
    fresh = max(0, blocks - len(kept))
    ids = [*kept[:blocks], *range(next_id, next_id + fresh)]
    return _Conversation(tokens, _output_tokens(rng), ids, turns), next_id + fresh


def _output_tokens(rng: random.Random) -> int:
    """A short answer one time in four, else one around 420 tokens with a thin tail up to 2,000."""
    kind = rng.random()
    if kind < 0.26:
        length = rng.lognormvariate(math.log(55), 1.1)
    elif kind < 0.97:
        length = rng.gauss(410, 130)
    else:
        length = rng.uniform(600, 1600)
    return round(min(max(length, 1), 2000))
